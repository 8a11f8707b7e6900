"""Who walks through time: step after step, or many stretches of it at once."""

from stretto.solvers.multigrid.multigrid import Multigrid
from stretto.solvers.newton.newton import Newton
from stretto.solvers.serial import Serial
from stretto.solvers.shooting.shooting import Shooting
from stretto.solvers.shooting.trajectory_cache import TrajectoryCache
from stretto.solvers.solver import AbstractSolver, Solution

__all__ = ["AbstractSolver", "Multigrid", "Newton", "Serial", "Shooting", "Solution", "TrajectoryCache"]
