"""What all solvers with chunks share: layers and directions, their bridge to autograd, how residuals are measured.

Shape legend: B sequences, C chunks, T steps, F features, H hidden units.
"""

import copy
import math
import re
from typing import Any

import pytest
import torch
from solver_oracle import assert_equal, pair, results

import stretto
from stretto.solvers import AbstractSolver
from stretto.solvers.base import residual_norm

F, H = 3, 7
SOLVERS: list[AbstractSolver] = [
    stretto.Shooting(num_chunks=4, tolerance=1e-13),
    stretto.Multigrid(tolerance=1e-13, max_iterations=99, backward_iterations=99),
    stretto.Newton(tolerance=1e-13),
]


@pytest.mark.parametrize(
    ("layers", "both_ways"),
    [(2, True), *(pytest.param(*given, marks=pytest.mark.slow) for given in [(2, False), (1, True)])],
)
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_layers_and_directions(solver: AbstractSolver, layers: int, both_ways: bool) -> None:
    torch.manual_seed(2)
    serial, parallel = pair(
        stretto.cells.LSTM(F, H), copy.deepcopy(solver), num_layers=layers, bidirectional=both_ways, backend="eager"
    )
    x_BTF = torch.randn(3, 400, F, dtype=torch.float64)
    lengths = [400, 13, 370]
    assert_equal(results(parallel, x_BTF, lengths=lengths), results(serial, x_BTF, lengths=lengths), 1e-10)
    assert len(parallel.solutions) == layers * (2 if both_ways else 1)
    assert not any(solution.fell_back for solution in parallel.solutions)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_batches_without_steps_or_sequences(solver: AbstractSolver) -> None:
    rnn = stretto.RNN(stretto.cells.GRU(F, H), backend="eager", solver=copy.deepcopy(solver))
    assert rnn(torch.randn(0, 9, F))[0].shape == (0, 9, H)
    y_BTH, h_BH = rnn(torch.randn(2, 9, F), torch.ones(2, H), lengths=[0, 0])
    assert not y_BTH.any()
    assert bool((h_BH == 1).all())


@pytest.mark.parametrize(
    ("solver", "reason"),
    [
        (stretto.Shooting(num_chunks=4), "NaN or inf|does not forget"),
        (stretto.Shooting(num_chunks=4, max_sweeps=2), "NaN or inf"),
        (stretto.Shooting(num_chunks=4, until_converged=True), "; a state is NaN or inf"),
        (stretto.Multigrid(), "a state is NaN or inf"),
        (stretto.Newton(), "a state is NaN or inf"),
    ],
    ids=str,
)
def test_states_that_are_nan_are_those_of_a_sequential_run(solver: Any, reason: str) -> None:
    torch.manual_seed(0)
    _, rnn = pair(stretto.cells.GRU(F, H), solver, backend="eager")
    x_BTF = torch.randn(2, 400, F, dtype=torch.float64)
    x_BTF[0, 130] = torch.nan
    for _ in range(2):
        y_BTH, _ = rnn(x_BTF)
        assert bool(y_BTH[0, :130].isfinite().all())
        assert bool(y_BTH[0, 130:].isnan().all())
        assert bool(y_BTH[1].isfinite().all())
        assert re.search(reason, rnn.solution.reason)
    assert rnn.solution.fell_back != getattr(solver, "until_converged", False)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_gradients_can_be_asked_for_again(solver: AbstractSolver) -> None:
    serial, parallel = pair(stretto.cells.GRU(F, H), solver, backend="eager")
    x_BTF = torch.randn(2, 60, F, dtype=torch.float64)
    loss = parallel(x_BTF)[0].square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    (2 * serial(x_BTF)[0].square().sum()).backward()
    for one, other in zip(parallel.parameters(), serial.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-10)  # type: ignore[arg-type]


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_gradients_can_be_differentiated(solver: AbstractSolver) -> None:
    serial, parallel = pair(stretto.cells.GRU(F, H), solver, backend="eager")
    found = []
    for rnn in (serial, parallel):
        x_BTF = torch.randn(1, 60, F, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        (d_x,) = torch.autograd.grad(rnn(x_BTF)[0].square().sum(), x_BTF, create_graph=True)
        found.append(torch.autograd.grad(d_x.square().sum(), [x_BTF, *rnn.parameters()]))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_without_gradients_and_with_frozen_parameters(solver: AbstractSolver) -> None:
    serial, parallel = pair(stretto.cells.GRU(F, H), solver, backend="eager")
    x_BTF = torch.randn(2, 60, F, dtype=torch.float64)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y_BTH, _ = parallel(1.0 * x_BTF)
            assert torch.allclose(y_BTH, serial(1.0 * x_BTF)[0], atol=1e-12)
            assert not y_BTH.requires_grad
    for rnn in (serial, parallel):
        rnn.cells[0].weight_ih.requires_grad_(False)
        rnn(x_BTF)[0].sum().backward()
    assert parallel.cells[0].weight_ih.grad is None
    assert torch.allclose(parallel.cells[0].weight_hh.grad, serial.cells[0].weight_hh.grad, atol=1e-10)


class WarmUp(stretto.Cell):
    """A cell that counts its steps and changes its behaviour for good after the first fifty."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_hh = torch.nn.Parameter(0.3 * torch.eye(F))

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, F), torch.zeros(batch_size, dtype=torch.int64)

    def forward(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        h_BF, count_B = state
        h_BF = torch.tanh(x_t + h_BF @ self.weight_hh) * torch.where(count_B < 50, 1.0, 2.0).to(x_t)[:, None]
        return h_BF, (h_BF, count_B + 1)


@pytest.mark.parametrize(
    "solver",
    [
        stretto.Shooting(num_chunks=4),
        stretto.Shooting(num_chunks=4, until_converged=True),
        stretto.Multigrid(coarsening=20, tolerance=1e-6),
        stretto.Newton(),
    ],
    ids=str,
)
def test_counters_that_do_not_agree_are_not_overlooked(solver: AbstractSolver) -> None:
    """All other states agree at the boundaries although every later chunk has counted from zero."""
    serial, parallel = pair(WarmUp(), solver, backend="eager")
    x_BTF = torch.randn(1, 160, F, dtype=torch.float64)
    assert torch.allclose(parallel(x_BTF)[0], serial(x_BTF)[0], atol=1e-5)


def test_states_are_measured_part_by_part_and_gradients_together() -> None:
    new, old = (
        [torch.tensor([0.5, -1.0]), torch.tensor([10.0, 4.0])],
        [torch.tensor([0.4, -1.0]), torch.tensor([10.0, 2.0])],
    )
    assert residual_norm(new, old) == pytest.approx(0.2)
    assert residual_norm(new[:1], old[:1]) == pytest.approx(0.1)
    assert residual_norm(new, old, rows_C=torch.tensor([True, False])) == pytest.approx(0.1)
    assert residual_norm(new[:1], old[:1], kind="gradient") == pytest.approx(0.1)
    assert residual_norm([1e-3 * new[0]], [1e-3 * old[0]]) == pytest.approx(1e-4)
    assert residual_norm([1e-3 * new[0]], [1e-3 * old[0]], kind="gradient") == pytest.approx(0.1)
    assert residual_norm([torch.zeros(2)], old[:1], kind="gradient") == 1.0
    assert residual_norm([torch.zeros(0, 2)], [torch.zeros(0, 2)]) == residual_norm([], []) == 0.0


def test_whole_numbers_must_be_equal() -> None:
    assert residual_norm([torch.tensor([10**9])], [torch.tensor([10**9 + 1])]) == 1.0
    assert residual_norm([torch.tensor([True])], [torch.tensor([True])]) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_never_agree(value: float) -> None:
    states_CH = torch.tensor([[1.0], [value]])
    for other_CH in (torch.ones(2, 1), states_CH):
        assert math.isnan(residual_norm([states_CH], [other_CH]))
        assert math.isnan(residual_norm([states_CH], [other_CH], kind="gradient"))
