"""How to get through time: sequentially, or in many chunks at once. One file per method."""

from stretto.solvers.adjoint import ReverseSweeps, differentiable_chunks
from stretto.solvers.base import AbstractSolver, CellVariants, Problem, Result, Serial, Solution, residual_norm
from stretto.solvers.chunks import Chunks
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
    "Chunks",
    "Multigrid",
    "Newton",
    "Problem",
    "Result",
    "ReverseSweeps",
    "Serial",
    "Shooting",
    "Solution",
    "TimeParallel",
    "TrajectoryCache",
    "count_ranks",
    "differentiable_chunks",
    "residual_norm",
]
