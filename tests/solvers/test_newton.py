"""Whole trajectories by Newton's method, beside the same layer step after step.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import functools
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from newton_cells import CELLS, CONVERGING, F, Linear, Rotated, WeightsAsInput, assert_close, counted, twin
from solver_oracle import TOLERANCE, assert_equal, pair, results

import stretto


@pytest.mark.parametrize("form", ["dense", "diagonal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cell", CONVERGING)
def test_it_equals_step_after_step(cell: str, dtype: torch.dtype, form: Any) -> None:
    torch.manual_seed(0)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    solver = stretto.Newton(jacobian=form, tolerance=tolerance)
    serial, parallel = pair(CELLS[cell](), solver, dtype, scale=0.9, backend="eager")
    x_BTF = torch.randn(3, 150, F, dtype=dtype)
    lengths = [90, 0, 150]
    torch.manual_seed(1)
    found = results(parallel, x_BTF, lengths=lengths)
    torch.manual_seed(1)
    assert_equal(found, results(serial, x_BTF, lengths=lengths), TOLERANCE[dtype])
    solution = parallel.solution
    assert solution.solver == "newton"
    assert 1 <= counted(parallel) < solution.iterations
    assert solution.residual <= tolerance
    assert solution.backward_iterations is not None
    assert solution.backward_residual is not None
    assert solution.backward_residual <= tolerance
    assert solution.work > solution.iterations


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_compiled_steps_will_do(cell: str, quick_compiler: None) -> None:
    torch.manual_seed(0)
    serial, parallel = pair(CELLS[cell](), stretto.Newton(tolerance=1e-13))
    x_BTF = torch.randn(2, 100, F, dtype=torch.float64)
    assert_equal(results(parallel, x_BTF, lengths=[64, 100]), results(serial, x_BTF, lengths=[64, 100]), 1e-10)
    assert counted(parallel) <= 4


@functools.cache
def _nets(cell: str) -> list[stretto.RNN]:
    torch.manual_seed(1)
    return pair(CELLS[cell](), "serial", backend="eager")


@settings(max_examples=25, deadline=None)
@given(
    cell=st.sampled_from(sorted(CELLS)),
    form=st.sampled_from(["dense", "diagonal"]),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    padding=st.integers(0, 2),
    damping=st.sampled_from([0.0, 0.1]),
)
def test_it_equals_step_after_step_for_any_sizes(
    cell: str, form: Any, lengths: list[int], padding: int, damping: float
) -> None:
    serial, parallel = _nets(cell)
    parallel.solver = stretto.Newton(jacobian=form, tolerance=1e-13, damping=damping)
    x_BTF = torch.randn(len(lengths), max(1, max(lengths) + padding), F, dtype=torch.float64)
    torch.manual_seed(2)
    found = results(parallel, x_BTF, lengths=lengths)
    torch.manual_seed(2)
    assert_equal(found, results(serial, x_BTF, lengths=lengths), 1e-10)


@pytest.mark.parametrize(("layers", "both_ways"), [(2, False), (1, True), (2, True)])
def test_layers_and_directions(layers: int, both_ways: bool) -> None:
    torch.manual_seed(2)
    solver = stretto.Newton(tolerance=1e-13)
    serial, parallel = pair(CELLS["gru"](), solver, num_layers=layers, bidirectional=both_ways, backend="eager")
    x_BTF = torch.randn(3, 60, F, dtype=torch.float64)
    lengths = [60, 13, 44]
    assert_equal(results(parallel, x_BTF, lengths=lengths), results(serial, x_BTF, lengths=lengths), 1e-10)
    assert len(parallel.solutions) == layers * (2 if both_ways else 1)
    assert not any(solution.fell_back for solution in parallel.solutions)


def test_a_linear_recurrence_takes_one_iteration() -> None:
    torch.manual_seed(0)
    serial = stretto.RNN(Linear(0.4 * torch.randn(4, 4, dtype=torch.float64)), backend="eager")
    parallel = twin(serial, tolerance=1e-12)
    x_BTF = torch.randn(2, 100, 4, dtype=torch.float64)
    assert_equal(results(parallel, x_BTF), results(serial, x_BTF), 1e-10)
    assert counted(parallel) == 1
    assert parallel.solution.iterations == 2


def test_an_easy_gru() -> None:
    torch.manual_seed(0)
    serial = stretto.RNN(stretto.cells.GRU(2, 5).double(), backend="eager")
    parallel = twin(serial)
    x_BTF = torch.randn(1, 100, 2, dtype=torch.float64)
    with torch.no_grad():
        assert_close(parallel(x_BTF), serial(x_BTF))
    assert counted(parallel) <= 4


@pytest.mark.parametrize("form", ["dense", "diagonal"])
@pytest.mark.parametrize("seed", range(3))
def test_a_difficult_gru_is_walked_step_after_step(seed: int, form: Any) -> None:
    """Weights a hundred times too large: gates switch, Jacobians overflow."""
    torch.manual_seed(seed)
    serial = stretto.RNN(stretto.cells.GRU(2, 5), backend="eager")
    with torch.no_grad():
        for parameter in serial.parameters():
            parameter.mul_(100.0)
    parallel = twin(serial, jacobian=form)
    x_BTF = torch.randn(1, 100, 2)
    with torch.no_grad():
        assert_close(parallel(x_BTF), serial(x_BTF))
    assert parallel.solution.fell_back
    assert re.search("overflows|did not halve", parallel.solution.reason)


@pytest.mark.parametrize("form", ["dense", "diagonal"])
def test_derivatives_are_those_of_finite_differences(form: Any) -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(
        stretto.cells.GRU(1, 2).double(), backend="eager", solver=stretto.Newton(jacobian=form, tolerance=1e-13)
    )
    names = [name for name, _ in rnn.named_parameters()]

    def outputs(x_BTF: torch.Tensor, state_BH: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = torch.func.functional_call(rnn, dict(zip(names, parameters, strict=True)), (x_BTF, state_BH))
        assert not rnn.solution.fell_back
        return made[0], made[1]

    x_BTF = torch.randn(1, 4, 1, dtype=torch.float64, requires_grad=True)
    state_BH = torch.randn(1, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(outputs, (x_BTF, state_BH, *rnn.parameters()))


def test_weights_that_come_as_input() -> None:
    torch.manual_seed(0)
    size = 4
    serial = stretto.RNN(WeightsAsInput(size).double(), backend="eager")
    parallel = twin(serial, tolerance=1e-12)
    x_BTF = torch.randn(1, 1000, size * size + size, dtype=torch.float64) / math.sqrt(size)
    assert_equal(results(parallel, x_BTF), results(serial, x_BTF), 1e-10)
    assert counted(parallel) <= 6


def test_a_rotation_that_hardly_forgets() -> None:
    torch.manual_seed(0)
    rotation_HH, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
    serial = stretto.RNN(Rotated(rotation_HH), backend="eager")
    parallel = twin(serial, tolerance=1e-9)
    x_BTF = 0.05 * torch.randn(1, 4000, 6, dtype=torch.float64)
    with torch.no_grad():
        assert_close(parallel(x_BTF), serial(x_BTF))
    assert counted(parallel) <= 12
