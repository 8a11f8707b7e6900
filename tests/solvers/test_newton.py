"""Whole trajectories by Newton's method, beside the same layer run sequentially; its Jacobians and its scan.

Shape legend: B sequences, C chunks, T steps, P real steps of all sequences, S units of a state, F features, H hidden.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from newton_cells import (
    CELLS,
    CONVERGING,
    Counting,
    F,
    H,
    Linear,
    Noisy,
    Rotated,
    Sine,
    Stateless,
    WeightsAsInput,
    assert_close,
    counted,
    twin,
)
from solver_oracle import TOLERANCE, assert_equal, pair, results

import stretto
from stretto.solvers import AbstractSolver, Problem, Result, Serial, newton
from stretto.solvers.newton import AllSteps, SequenceMajor, solve_recurrence
from stretto.state import flatten, unflatten


@pytest.mark.parametrize("form", ["dense", "diagonal"])
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cell", CONVERGING)
def test_it_equals_a_sequential_run(cell: str, dtype: torch.dtype, form: Any) -> None:
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
def test_it_equals_a_sequential_run_for_any_sizes(
    cell: str, form: Any, lengths: list[int], padding: int, damping: float
) -> None:
    serial, parallel = _nets(cell)
    parallel.solver = stretto.Newton(jacobian=form, tolerance=1e-13, damping=damping)
    x_BTF = torch.randn(len(lengths), max(1, max(lengths) + padding), F, dtype=torch.float64)
    torch.manual_seed(2)
    found = results(parallel, x_BTF, lengths=lengths)
    torch.manual_seed(2)
    assert_equal(found, results(serial, x_BTF, lengths=lengths), 1e-10)


def _rotation(size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]


@pytest.mark.parametrize(
    ("make", "steps", "features", "scale", "most"),
    [
        pytest.param(lambda: Linear(0.4 * torch.randn(4, 4, dtype=torch.float64)), 100, 4, 1.0, 1, id="linear"),
        pytest.param(lambda: stretto.cells.GRU(2, 5).double(), 100, 2, 1.0, 4, id="easy GRU"),
        pytest.param(lambda: WeightsAsInput(4).double(), 1000, 20, 0.5, 6, id="weights as input"),
        pytest.param(lambda: Rotated(_rotation(6)), 4000, 6, 0.05, 12, id="rotation that hardly forgets"),
    ],
)
def test_it_converges_within_few_iterations(
    make: Callable[[], stretto.Cell], steps: int, features: int, *, scale: float, most: int
) -> None:
    torch.manual_seed(0)
    serial = stretto.RNN(make(), backend="eager")
    parallel = twin(serial, tolerance=1e-12)
    x_BTF = scale * torch.randn(1, steps, features, dtype=torch.float64)
    assert_equal(results(parallel, x_BTF), results(serial, x_BTF), 1e-10)
    assert counted(parallel) <= most


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


# --- limits and fallbacks


def _strong(hidden: int, scale: float) -> stretto.RNN:
    """A GRU with recurrent weights scaled up."""
    serial = stretto.RNN(stretto.cells.GRU(F, hidden).double(), backend="eager")
    with torch.no_grad():
        serial.cells[0].weight_hh.mul_(scale)  # type: ignore[operator, union-attr]
    return serial


def test_damping_helps_a_net_near_the_edge() -> None:
    torch.manual_seed(2)
    serial = _strong(12, 4.0)
    plain, damped = twin(serial), twin(serial, damping=0.1)
    x_BTF = torch.randn(1, 300, F, dtype=torch.float64)
    with torch.no_grad():
        for parallel in (plain, damped):
            assert_close(parallel(x_BTF), serial(x_BTF))
    assert plain.solution.fell_back
    assert counted(damped) > 5


def test_steps_that_meet_must_meet_over_chunks_too() -> None:
    """Slow iterations end with steps that nearly meet; what adds up over a chunk is more, and is iterated away."""
    torch.manual_seed(0)
    serial = _strong(16, 2.0)
    parallel = twin(serial, damping=0.05)
    x_BTF = torch.randn(1, 1024, F, dtype=torch.float64)
    with torch.no_grad():
        assert_close(parallel(x_BTF), serial(x_BTF))
    assert 1e-12 < parallel.solution.residual <= 1e-6
    assert parallel.solution.iterations == counted(parallel) + 2


def test_fewer_steps_that_miss_are_progress_too() -> None:
    """Units that switch: each iteration leaves fewer steps that miss, and some of these by as much as before."""
    torch.manual_seed(3)
    serial = stretto.RNN(stretto.cells.IndRNN(F, 16).double(), backend="eager")
    parallel = twin(serial)
    x_BTF = torch.randn(2, 1000, F, dtype=torch.float64)
    with torch.no_grad():
        assert_close(parallel(x_BTF), serial(x_BTF))
    assert counted(parallel) > 5


def test_chunks_that_do_not_agree_run_sequentially() -> None:
    """Evaluations of a step differ by less than the tolerance, and those of a chunk by more."""
    torch.manual_seed(0)
    rnn = stretto.RNN(Noisy(torch.eye(2, dtype=torch.float64)), backend="eager", solver=stretto.Newton())
    y_BTH, _ = rnn(torch.zeros(1, 2000, 2, dtype=torch.float64))
    assert rnn.solution.fell_back
    assert "do not agree" in rnn.solution.reason
    assert bool((y_BTH[0, -1] > 1e-4).all())


def test_a_step_with_random_numbers_runs_sequentially() -> None:
    rnn = stretto.RNN(stretto.cells.Zoneout(stretto.cells.GRU(F, H)), backend="eager", solver=stretto.Newton())
    rnn(torch.randn(2, 40, F))
    assert rnn.solution.fell_back
    assert "did not halve" in rnn.solution.reason
    rnn.eval()
    rnn(torch.randn(2, 40, F))
    assert not rnn.solution.fell_back


def test_a_tolerance_finer_than_numbers_is_said_to_be() -> None:
    torch.manual_seed(0)
    serial, parallel = pair(CELLS["gru"](), stretto.Newton(tolerance=1e-12), torch.float32, scale=1.0, backend="eager")
    x_BTF = torch.randn(1, 200, F)
    assert_equal(results(parallel, x_BTF), results(serial, x_BTF), 1e-7)
    assert parallel.solution.fell_back
    assert parallel.solution.reason.endswith("a tolerance of 1.0e-12 is finer than torch.float32 resolves")


def test_so_many_iterations_and_no_more() -> None:
    torch.manual_seed(0)
    serial, parallel = pair(CELLS["gru"](), None, scale=1.0, backend="eager")
    x_BTF = torch.randn(1, 200, F, dtype=torch.float64)
    for most in (1, 2):
        parallel.solver = stretto.Newton(tolerance=1e-13, max_iterations=most)
        assert_equal(results(parallel, x_BTF), results(serial, x_BTF), 1e-12)
        assert parallel.solution.fell_back
        assert parallel.solution.iterations == most + 1
        said = r"a residual of \S+ is left after (1 iteration|2 iterations)"
        assert re.fullmatch(said, parallel.solution.reason)
    parallel.solver = stretto.Newton(tolerance=1e-13, max_iterations=20)
    parallel(x_BTF)
    assert counted(parallel) <= 5


def test_dense_jacobians_that_would_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton, "MAX_JACOBIAN_BYTES", 2 * 100 * (2 * H) ** 2 * 8)
    rnn = stretto.RNN(stretto.cells.LSTM(F, H).double(), backend="eager", solver=stretto.Newton())
    rnn(torch.randn(2, 50, F, dtype=torch.float64))
    assert not rnn.solution.fell_back
    rnn(torch.randn(1, 101, F, dtype=torch.float64))
    assert rnn.solution.fell_back
    assert rnn.solution.work == 1.0
    for said in ("10 x 10 Jacobians of 101 steps", 'jacobian="diagonal"', "stretto.Shooting"):
        assert said in rnn.solution.reason
    rnn.solver = stretto.Newton(jacobian="diagonal")
    rnn(torch.randn(1, 101, F, dtype=torch.float64))
    assert not rnn.solution.fell_back


def _difficult(form: Any) -> list[Any]:
    """Weights a hundred times too large: gates switch, Jacobians overflow."""
    return [lambda: stretto.cells.GRU(2, 5), 2, 100.0, {"jacobian": form}, "overflows|did not halve"]


@pytest.mark.parametrize(
    ("make", "features", "scale", "words", "reason"),
    [
        _difficult("dense"),
        _difficult("diagonal"),
        # States stay below 1, and differences grow a hundredfold at each step.
        (lambda: Sine(100.0 * torch.linalg.qr(torch.randn(4, 4))[0]), 4, 1.0, {}, r"^iteration \d+ overflows$"),
        (
            lambda: Counting(torch.eye(2)),
            2,
            1.0,
            {},
            "^part 1 of the state is of torch.int64, which has no derivative$",
        ),
        (Stateless, F, 1.0, {}, "^there is no state$"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_what_does_not_converge_runs_sequentially(
    *, make: Callable[[], stretto.Cell], features: int, scale: float, words: dict[str, Any], reason: str, seed: int
) -> None:
    torch.manual_seed(seed)
    serial = stretto.RNN(make(), backend="eager")
    with torch.no_grad():
        for parameter in serial.parameters():
            parameter.mul_(scale)
        parallel = twin(serial, **words)
        x_BTF = torch.randn(1, 200, features)
        assert torch.equal(parallel(x_BTF)[0], serial(x_BTF)[0])
    assert parallel.solution.fell_back
    assert re.search(reason, parallel.solution.reason)


@pytest.mark.parametrize("lengths", [[1], [1, 0, 1], [0, 0]])
def test_nothing_to_find(lengths: list[int]) -> None:
    serial, parallel = pair(CELLS["lstm"](), stretto.Newton(tolerance=1e-13), backend="eager")
    x_BTF = torch.randn(len(lengths), 2, F, dtype=torch.float64)
    assert_equal(results(parallel, x_BTF, lengths=lengths), results(serial, x_BTF, lengths=lengths), 1e-12)
    assert parallel.solution.fell_back
    assert parallel.solution.reason == "no sequence has more than one step"
    assert (parallel.solution.iterations, parallel.solution.work) == (1, 1.0)


# --- steps and Jacobians


LENGTHS = [4, 0, 6, 1]


class _Kept(AbstractSolver):
    """Runs sequentially, and keeps the problem it was given."""

    problem: Problem

    def solve(self, problem: Problem) -> Result:
        self.problem = problem
        return Serial().solve(problem)


def _problem(cell: torch.nn.Module, x_BTF: torch.Tensor, lengths: list[int]) -> Problem:
    solver = _Kept()
    stretto.RNN(cell, backend="eager", solver=solver)(x_BTF, lengths=lengths)
    return solver.problem


def _coupled(size: int, moves: int, moved: int) -> Rotated:
    """Each unit moves itself, and one of them another."""
    weight_SS = torch.diag(torch.linspace(0.3, 0.7, size, dtype=torch.float64))
    if moves != moved:
        weight_SS[moved, moves] = 0.2
    return Rotated(weight_SS)


JACOBIAN_CELLS = {
    "gru": lambda: stretto.cells.GRU(F, H),
    "lstm": lambda: stretto.cells.LSTM(F, H),
    "indrnn": lambda: stretto.cells.IndRNN(F, H),
    "recurrent-dropout": lambda: stretto.cells.RecurrentDropout(stretto.cells.Elman(F, H)),
}


@pytest.mark.parametrize("cell_name", sorted(JACOBIAN_CELLS))
def test_jacobians_are_those_of_the_cell(cell_name: str) -> None:
    torch.manual_seed(0)
    cell = JACOBIAN_CELLS[cell_name]().double()
    problem = _problem(cell, torch.randn(len(LENGTHS), 6, F, dtype=torch.float64), LENGTHS)
    order = SequenceMajor(problem.layout)
    steps = AllSteps(problem, order)
    state = cell.initial_state(1)
    size = sum(part.shape[1] for part in flatten(state))
    earlier_PS = torch.randn(sum(LENGTHS), size, dtype=torch.float64)

    def moved(earlier_S: torch.Tensor, x_F: torch.Tensor) -> torch.Tensor:
        parts = earlier_S[None].split([part.shape[1] for part in flatten(state)], dim=1)
        return torch.cat([part[0] for part in flatten(cell(x_F[None], unflatten(state, parts))[1])])

    linearized = steps.linearize(earlier_PS)
    dense_PSS, diagonal_PS = linearized.jacobians("dense"), linearized.jacobians("diagonal")
    assert linearized.products == 2 * size
    for row, x_F in enumerate(problem.x_PF[order.rows_P].detach()):
        assert torch.allclose(linearized.after_PS[row], moved(earlier_PS[row], x_F), atol=1e-13)
        expected_SS = torch.func.jacrev(moved)(earlier_PS[row], x_F)
        assert torch.allclose(dense_PSS[row], expected_SS, atol=1e-13)
        assert torch.allclose(diagonal_PS[row], expected_SS.diagonal(), atol=1e-13)
    assert torch.allclose(steps.after(earlier_PS), linearized.after_PS, atol=1e-13)
    assert not linearized.after_PS.requires_grad


@pytest.mark.parametrize("size", [1, 2, 5, 8, 9])
def test_diagonal_jacobians_take_few_products(size: int) -> None:
    problem = _problem(_coupled(size, 0, 0), torch.randn(2, 4, size, dtype=torch.float64), [4, 3])
    steps = AllSteps(problem, SequenceMajor(problem.layout))
    linearized = steps.linearize(torch.randn(7, size, dtype=torch.float64))
    found_PS = linearized.diagonals_if_uncoupled()
    assert found_PS is not None
    assert linearized.products == 1 + (size - 1).bit_length()
    assert torch.equal(found_PS, linearized.jacobians("diagonal"))


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.data())
def test_one_number_that_moves_another_is_noticed(size: int, data: st.DataObject) -> None:
    moves, moved = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    problem = _problem(_coupled(size, moves, moved), torch.randn(1, 3, size, dtype=torch.float64), [3])
    linearized = AllSteps(problem, SequenceMajor(problem.layout)).linearize(torch.randn(3, size, dtype=torch.float64))
    assert linearized.diagonals_if_uncoupled() is None


# --- the scan


def _substituted(linear_T: torch.Tensor, offset_TS: torch.Tensor) -> torch.Tensor:
    state_S = torch.zeros_like(offset_TS[0])
    made = []
    for linear, offset_S in zip(linear_T, offset_TS, strict=True):
        state_S = (linear @ state_S if linear.dim() == 2 else linear * state_S) + offset_S
        made.append(state_S)
    return torch.stack(made)


def _drawn(T: int, S: int, form: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (T, S, S) if form == "dense" else (T, S)
    linear_T = torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(S)
    return linear_T, torch.randn(T, S, generator=generator, dtype=torch.float64)


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 4), st.sampled_from(["dense", "diagonal"]))
def test_recurrences_one_after_another_equal_substitution(lengths: list[int], S: int, form: str) -> None:
    """The first step of each has no linear part, whatever is drawn for it."""
    linear_T, offset_TS = _drawn(sum(lengths), S, form, seed=sum(lengths))
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    alone = [
        _substituted(linear_T[start : start + length], offset_TS[start : start + length])
        for start, length in zip(starts, lengths, strict=True)
    ]
    linear_T[starts] = 0
    found_TS, expected_TS = solve_recurrence(linear_T, offset_TS), torch.cat(alone)
    assert float((found_TS - expected_TS).abs().max()) <= 1e-12 * max(1.0, float(expected_TS.abs().max()))
