"""Who walks through time: step after step, or many stretches of it at once."""

from stretto.solvers.serial import Serial
from stretto.solvers.shooting import Shooting
from stretto.solvers.solver import AbstractSolver, Solution
from stretto.solvers.trajectory_cache import TrajectoryCache

__all__ = ["AbstractSolver", "Serial", "Shooting", "Solution", "TrajectoryCache"]
