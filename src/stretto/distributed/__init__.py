"""Training by several workers: exact gradients over ranks, time laid over them, joining and leaving, starting them."""

from stretto.distributed.gradient_norms import LocalNorm, Parts, denominators, parts_of_ranks, square_of, squared_norm
from stretto.distributed.joining import LostWorker, is_first, is_worker, joined, lost_worker
from stretto.distributed.launching import leave_exit, start_workers
from stretto.distributed.mesh import TimeBlock, TimeMesh
from stretto.distributed.replica import replicated
from stretto.distributed.scaling import global_count, scale_loss
from stretto.distributed.world import World

__all__ = [
    "LocalNorm",
    "LostWorker",
    "Parts",
    "TimeBlock",
    "TimeMesh",
    "World",
    "denominators",
    "global_count",
    "is_first",
    "is_worker",
    "joined",
    "leave_exit",
    "lost_worker",
    "parts_of_ranks",
    "replicated",
    "scale_loss",
    "square_of",
    "squared_norm",
    "start_workers",
]
