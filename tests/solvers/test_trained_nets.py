"""Every exact solver on nets that learned to remember, beside a sequential run.

Shape legend: B sequences, T steps, F features.
"""

import copy
import functools
import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from solver_oracle import assert_equal, results
from trained_nets import Trained, trained_on_adding, trained_on_characters, trained_on_copying, trained_on_windows

import stretto
from stretto.solvers import AbstractSolver

SOLVERS: dict[str, Callable[[float], AbstractSolver]] = {
    "shooting": lambda tolerance: stretto.Shooting(num_chunks=8, tolerance=tolerance),
    "sweeps until chunks agree": lambda tolerance: stretto.Shooting(
        num_chunks=8, tolerance=tolerance, until_converged=True
    ),
    "multigrid": lambda tolerance: stretto.Multigrid(tolerance=tolerance),
    "newton": lambda tolerance: stretto.Newton(tolerance=tolerance),
    "newton, diagonal": lambda tolerance: stretto.Newton(jacobian="diagonal", tolerance=tolerance),
}
NETS = ["copying", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adding", "windows", "characters"))]
WEIGHTS = pytest.mark.parametrize(
    "is_trained", [pytest.param(False, id="initial weights", marks=pytest.mark.slow), pytest.param(True, id="trained")]
)
TRAINED_SHARE = 0.75
"""The share of the loss of a net that remembers nothing which a trained one has at most."""


@pytest.fixture(scope="module", params=NETS)
def trained(request: pytest.FixtureRequest) -> Trained:
    """A net that was trained on one of the tasks."""
    if request.param == "adding":
        return trained_on_adding()
    if request.param == "copying":
        return trained_on_copying()
    folder = os.environ.get("STRETTO_DATA")
    if not folder:
        pytest.skip("STRETTO_DATA is not set")
    if request.param == "windows":
        return trained_on_windows(Path(folder))
    with gzip.open(Path(folder) / "tinyshakespeare" / "input.txt.gz", "rt", encoding="utf-8") as stream:
        return trained_on_characters(stream.read(100_000))


def _net(trained: Trained, *, is_trained: bool) -> stretto.RNN:
    """A copy of the trained net, or one with initial weights."""
    return copy.deepcopy(trained.rnn if is_trained else trained.initial)


def _given(trained: Trained, *, is_trained: bool) -> torch.Tensor:
    return trained.x_BTF if is_trained else trained.x_BTF[:1]


@functools.cache
def _sequential_results(trained: Trained, dtype: torch.dtype, *, is_trained: bool) -> dict[str, torch.Tensor]:
    """What every solver has to find."""
    return results(_net(trained, is_trained=is_trained).to(dtype), _given(trained, is_trained=is_trained).to(dtype))


def test_it_was_trained(trained: Trained) -> None:
    assert trained.loss < TRAINED_SHARE * trained.ignorant


@pytest.mark.parametrize("name", SOLVERS)
@WEIGHTS
def test_exact_is_exact(trained: Trained, name: str, is_trained: bool) -> None:
    """In double precision; gradients too, through hundreds of steps."""
    parallel = _net(trained, is_trained=is_trained).double()
    parallel.solver = SOLVERS[name](1e-13)
    found = results(parallel, _given(trained, is_trained=is_trained).double())
    assert_equal(found, _sequential_results(trained, torch.float64, is_trained=is_trained), 1e-10)
    assert parallel.solution.residual <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVERS)
@WEIGHTS
def test_single_precision(trained: Trained, name: str, is_trained: bool) -> None:
    parallel = _net(trained, is_trained=is_trained)
    parallel.solver = SOLVERS[name](1e-7)
    found = results(parallel, _given(trained, is_trained=is_trained))
    assert_equal(found, _sequential_results(trained, torch.float32, is_trained=is_trained), 1e-5)


def test_long_memory_is_found_by_a_probe(trained: Trained) -> None:
    """A net that still remembers after a chunk runs sequentially, at the cost of the probe."""
    rnn = copy.deepcopy(trained.rnn)
    rnn.solver = stretto.Shooting(num_chunks=32, tolerance=1e-7)
    with torch.no_grad():
        rnn(trained.x_BTF)
    assert rnn.solution.fell_back
    assert rnn.solution.work < 1.5


@pytest.mark.slow
def test_gates_need_fewer_sweeps_than_none() -> None:
    """The adding net keeps its sum by its update gates: their products reach over many chunks at once."""
    trained = trained_on_adding()
    rnn = copy.deepcopy(trained.rnn).double()
    rnn.solver = stretto.Shooting(num_chunks=32, tolerance=1e-8, until_converged=True)
    with torch.no_grad():
        rnn(trained.x_BTF.double())
    assert "corrected by" in rnn.solution.reason
    assert rnn.solution.iterations < 24
