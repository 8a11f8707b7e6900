"""Arguments of solvers: what is refused, and what they print."""

from typing import Any

import pytest

import stretto
from stretto.errors import StrettoError
from stretto.solvers import AbstractSolver, Serial, TimeParallel

NAN, INF = float("nan"), float("inf")
WRONG: list[tuple[type[AbstractSolver], str, list[Any]]] = [
    (stretto.Shooting, "num_chunks", [0, "many"]),
    (stretto.Shooting, "tolerance", [0.0, NAN, True]),
    (stretto.Shooting, "max_sweeps", [0]),
    (stretto.Shooting, "until_converged", ["yes"]),
    (stretto.Multigrid, "num_levels", [0, 2.0]),
    (stretto.Multigrid, "coarsening", [1, True]),
    (stretto.Multigrid, "max_iterations", [-1, 1.5]),
    (stretto.Multigrid, "backward_iterations", [-2]),
    (stretto.Multigrid, "tolerance", [0.0, -1e-3, INF, NAN, "small"]),
    (stretto.Multigrid, "fine_relaxation", ["FC"]),
    (stretto.Multigrid, "coarse_relaxation", [["F"]]),
    (stretto.Newton, "jacobian", ["banded"]),
    (stretto.Newton, "tolerance", [0.0, -1e-6, NAN, INF, True]),
    (stretto.Newton, "max_iterations", [0, 2.5]),
    (stretto.Newton, "damping", [-0.1, 1.0, "much"]),
    (TimeParallel, "tolerance", [0.0, NAN, "small"]),
    (TimeParallel, "segment_steps", [0, 1.5]),
]


@pytest.mark.parametrize(("solver", "name", "values"), WRONG)
def test_arguments_out_of_range_are_refused(solver: Any, name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(StrettoError, match=f"{solver.__name__} got {name}="):
            solver(**{name: value})


def test_a_solver_prints_the_arguments_that_are_not_the_default() -> None:
    assert repr(Serial()) == "Serial()"
    assert repr(stretto.Newton()) == "Newton()"
    assert repr(stretto.Newton(jacobian="diagonal", damping=0.1)) == "Newton(jacobian='diagonal', damping=0.1)"
    assert repr(stretto.Multigrid(tolerance=1e-3)) == "Multigrid(tolerance=0.001)"
    assert repr(stretto.Shooting(num_chunks=4, max_sweeps=1)) == "Shooting(num_chunks=4, max_sweeps=1)"
    assert repr(TimeParallel(segment_steps=7)) == "TimeParallel(segment_steps=7)"
