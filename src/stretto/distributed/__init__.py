"""Training on several ranks: joining and launching them, exact gradients over ranks, time divided over ranks."""

from stretto.distributed.launch import count_cores, handle_signals, launch_ranks, leave_exit_code
from stretto.distributed.mesh import TimeBlock, TimeMesh
from stretto.distributed.replica import global_count, replicate, scale_loss
from stretto.distributed.world import (
    DeferredErrors,
    LostRank,
    World,
    detect_lost_rank,
    is_distributed,
    is_rank0,
    join_ranks,
    take_gpu,
)

__all__ = [
    "DeferredErrors",
    "LostRank",
    "TimeBlock",
    "TimeMesh",
    "World",
    "count_cores",
    "detect_lost_rank",
    "global_count",
    "handle_signals",
    "is_distributed",
    "is_rank0",
    "join_ranks",
    "launch_ranks",
    "leave_exit_code",
    "replicate",
    "scale_loss",
    "take_gpu",
]
