"""Training by several workers: exact gradients over ranks, time laid over them, joining and leaving, starting them."""

from stretto.distributed.mesh import TimeBlock, TimeMesh
from stretto.distributed.scaling import global_count, scale_loss

__all__ = ["TimeBlock", "TimeMesh", "global_count", "scale_loss"]
