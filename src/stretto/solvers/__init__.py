"""How to get through time: sequentially, or in many chunks at once. One file per method."""

from stretto.solvers.base import AbstractSolver, CellVariants, Problem, Result, Serial, Solution
from stretto.solvers.multigrid import Multigrid
from stretto.solvers.newton import Newton
from stretto.solvers.shooting import MAX_KERNEL_ROWS, CacheKey, Shooting, TrajectoryCache
from stretto.solvers.time_parallel import SEGMENT_STEPS, TimeParallel, count_ranks

__all__ = [
    "MAX_KERNEL_ROWS",
    "SEGMENT_STEPS",
    "AbstractSolver",
    "CacheKey",
    "CellVariants",
    "Multigrid",
    "Newton",
    "Problem",
    "Result",
    "Serial",
    "Shooting",
    "Solution",
    "TimeParallel",
    "TrajectoryCache",
    "count_ranks",
]
