"""Training by several workers: exact gradients over ranks, joining and leaving the group, starting it."""

from stretto.distributed.scaling import global_count, scale_loss

__all__ = ["global_count", "scale_loss"]
