"""Who walks through time: step after step, or many stretches of it at once."""

from stretto.solvers.multigrid.multigrid import Multigrid
from stretto.solvers.newton.newton import Newton
from stretto.solvers.ranks.leg import Leg, Sums
from stretto.solvers.ranks.neighbours import Neighbours, count_ranks
from stretto.solvers.ranks.relay import PIECE, TOLD, Relay
from stretto.solvers.serial import Serial
from stretto.solvers.shooting.shooting import MOST_ROWS, Shooting
from stretto.solvers.shooting.trajectory_cache import TrajectoryCache
from stretto.solvers.solver import AbstractSolver, Chain, Solution, Solved
from stretto.solvers.variants import AnyProgram, Variants

__all__ = [
    "MOST_ROWS",
    "PIECE",
    "TOLD",
    "AbstractSolver",
    "AnyProgram",
    "Chain",
    "Leg",
    "Multigrid",
    "Neighbours",
    "Newton",
    "Relay",
    "Serial",
    "Shooting",
    "Solution",
    "Solved",
    "Sums",
    "TrajectoryCache",
    "Variants",
    "count_ranks",
]
