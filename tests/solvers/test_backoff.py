"""Backoff: on nets that do not forget, attempts become rare, and every call is exact.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
import math
import pickle
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_oracle import assert_equal, pair, results

import stretto
from stretto.solvers import AbstractSolver, backoff, shooting
from stretto.solvers.backoff import FIRST_COST_SHARE, LAST_COST_SHARE, MAX_SKIP_CALLS, MIN_SKIP_CALLS, Backoff
from stretto.solvers.multigrid import ReverseCycles

pytestmark = pytest.mark.usefixtures("quick_compiler")

F, H = 2, 8
CHAOTIC = 8.0
SOLVERS: dict[str, Callable[[], AbstractSolver]] = {
    "shooting": lambda: stretto.Shooting(num_chunks=4, tolerance=1e-8),
    "multigrid": lambda: stretto.Multigrid(coarsening=8, num_levels=2, tolerance=1e-8),
    "relaxation": lambda: stretto.Multigrid(coarsening=8, num_levels=1, tolerance=1e-8),
    "newton": lambda: stretto.Newton(tolerance=1e-8),
    "newton, diagonal": lambda: stretto.Newton(jacobian="diagonal", tolerance=1e-8),
}
# Coarse grids are for long memories; nets that forget soon are for the others.
QUICK = [name for name in SOLVERS if name != "multigrid"]


@pytest.fixture
def bold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even an expensive attempt is repeated soon, to keep tests quick."""
    monkeypatch.setattr(backoff, "FIRST_COST_SHARE", 1.0)


def _chaotic(solver: Any, backend: str = "cpp") -> tuple[stretto.RNN, stretto.RNN, torch.Tensor]:
    """A net that does not forget, run sequentially and by a solver, and a batch."""
    torch.manual_seed(0)
    serial, parallel = pair(stretto.cells.GRU(F, H), solver, scale=CHAOTIC, backend=backend)
    return serial, parallel, torch.randn(1, 200, F, dtype=torch.float64)


def _is_skipped(rnn: stretto.RNN) -> bool:
    return rnn.solution.reason.startswith("not tried again")


def _calls_until_tried(rnn: stretto.RNN, x_BTF: torch.Tensor) -> int:
    """Calls that are skipped before the next attempt, which is made too."""
    for count in range(100_000):
        rnn(x_BTF)
        if not _is_skipped(rnn):
            return count
    raise AssertionError("it was never tried again")


@pytest.mark.parametrize(
    "name",
    [name if name in ("shooting", "multigrid") else pytest.param(name, marks=pytest.mark.slow) for name in SOLVERS],
)
def test_every_call_equals_a_sequential_run_and_attempts_are_few(name: str) -> None:
    serial, parallel, x_BTF = _chaotic(SOLVERS[name]())
    expected = results(serial, x_BTF)
    works = []
    for _ in range(200):
        assert_equal(results(parallel, x_BTF), expected, 1e-12)
        solution = parallel.solution
        assert solution.fell_back
        assert solution.residual == 0.0
        assert _is_skipped(parallel) == (solution.work == 1.0)
        works.append(solution.work)
    attempts = [number for number, work in enumerate(works) if work > 1]
    assert attempts[0] == 0
    rests = [later - earlier - 1 for earlier, later in pairwise(attempts)]
    first = max(MIN_SKIP_CALLS, math.ceil((works[0] - 1) / FIRST_COST_SHARE))
    assert rests == [first * 2**number for number in range(len(rests))]
    # The next one would be beyond the end.
    assert len(attempts) == 1 + int(math.log2((200 - len(attempts)) / first + 1))
    # Two attempts with a pause between them stay within 15 %, and so does every longer run.
    for end in range(first + 2, 201):
        assert sum(works[:end]) <= 1.15 * end


@pytest.mark.parametrize("name", SOLVERS)
def test_a_skipped_call_says_why_and_for_how_long(name: str, bold: None) -> None:
    _, parallel, x_BTF = _chaotic(SOLVERS[name]())
    with torch.no_grad():
        printed = repr(parallel.solver)
        parallel(x_BTF)
        reason = parallel.solution.reason
        assert reason
        assert not _is_skipped(parallel)
        assert repr(parallel.solver) == printed
        parallel(x_BTF)
        reported = parallel.solution.reason
        left = int(reported.split()[4])
        assert left >= MIN_SKIP_CALLS
        assert reported == f"not tried again for {left} calls: {reason}"
        assert (parallel.solution.iterations, parallel.solution.work) == (1, 1.0)
        for more in range(left - 1, 1, -1):
            parallel(x_BTF)
            assert parallel.solution.reason == f"not tried again for {more} calls: {reason}"
        parallel(x_BTF)
        assert parallel.solution.reason == f"not tried again for 1 call: {reason}"
        parallel(x_BTF)
        assert parallel.solution.reason == reason


@pytest.mark.parametrize("name", QUICK)
def test_a_net_that_learned_to_forget_is_tried_again(name: str, bold: None) -> None:
    serial, parallel, x_BTF = _chaotic(SOLVERS[name]())
    with torch.no_grad():
        parallel(x_BTF)
        first = _calls_until_tried(parallel, x_BTF)
        assert parallel.solution.fell_back
        for rnn in (serial, parallel):
            rnn.cells[0].weight_hh.mul_(0.1 / CHAOTIC)  # type: ignore[operator, union-attr]
            rnn.cells[0].bias_hh.zero_()  # type: ignore[operator, union-attr]
        assert _calls_until_tried(parallel, x_BTF) == 2 * first
    assert not parallel.solution.fell_back
    expected = results(serial, x_BTF)
    for _ in range(3):
        assert_equal(results(parallel, x_BTF), expected, 1e-7)
        assert not parallel.solution.fell_back
    with torch.no_grad():
        for parameter, strong in zip(parallel.parameters(), _chaotic(None)[1].parameters(), strict=True):
            parameter.copy_(strong)
        # It attempts, for shooting twice because its first estimate was of another net, then pauses.
        for _ in range(3):
            parallel(x_BTF)
            assert parallel.solution.fell_back
        assert _calls_until_tried(parallel, x_BTF) < 2 * first


@pytest.mark.parametrize(
    ("solver", "iterations", "fell_back"),
    [
        (stretto.Multigrid(tolerance=1e-10, max_iterations=3), 3, False),
        (stretto.Multigrid(), 2, False),
        (stretto.Newton(tolerance=1e-10, max_iterations=2), 3, True),
        (stretto.Shooting(num_chunks=6, tolerance=1e-10, max_sweeps=6), 6, False),
        (stretto.Shooting(num_chunks=6, tolerance=1e-10, until_converged=True), 6, False),
    ],
    ids=str,
)
def test_iterations_that_were_asked_for_are_made(solver: AbstractSolver, iterations: int, fell_back: bool) -> None:
    _, parallel, x_BTF = _chaotic(solver, backend="eager")
    for _ in range(4):
        parallel(x_BTF)[0].sum().backward()
        assert parallel.solution.fell_back == fell_back
        assert parallel.solution.iterations == iterations
        assert not _is_skipped(parallel)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("again", [copy.deepcopy, lambda rnn: pickle.loads(pickle.dumps(rnn))])
def test_copies_keep_the_backoff_and_continue_separately(name: str, again: Any) -> None:
    _, parallel, x_BTF = _chaotic(SOLVERS[name]())
    with torch.no_grad():
        parallel(x_BTF)
        twin = again(parallel)
        for _ in range(2):
            twin(x_BTF)
            assert _is_skipped(twin)
        parallel(x_BTF)
    left = [int(rnn.solution.reason.split()[4]) for rnn in (parallel, twin)]
    assert left[0] == left[1] + 1


@pytest.mark.parametrize("name", QUICK)
def test_lengths_precision_and_layers_back_off_separately(name: str) -> None:
    torch.manual_seed(1)
    _, parallel = pair(stretto.cells.GRU(H, H), SOLVERS[name](), scale=0.1, num_layers=2)
    with torch.no_grad():
        parallel.cells[1].weight_hh.mul_(CHAOTIC / 0.1)  # type: ignore[operator, union-attr]
        x_BTF = torch.randn(1, 400, H, dtype=torch.float64)
        parallel(x_BTF)
        assert [solution.fell_back for solution in parallel.solutions] == [False, True]
        parallel(x_BTF)
        assert [solution.reason.startswith("not tried") for solution in parallel.solutions] == [False, True]
        parallel(x_BTF.repeat(1, 4, 1))
        assert not any(solution.reason.startswith("not tried") for solution in parallel.solutions)
        parallel.float()(x_BTF.float())
        assert not any(solution.reason.startswith("not tried") for solution in parallel.solutions)


@pytest.mark.parametrize("name", QUICK)
def test_states_that_are_nan_do_not_count(name: str) -> None:
    torch.manual_seed(0)
    serial, parallel = pair(stretto.cells.GRU(F, H), SOLVERS[name](), scale=0.1)
    x_BTF = torch.randn(1, 200, F, dtype=torch.float64)
    broken_BTF = x_BTF.clone()
    broken_BTF[0, 100] = torch.nan
    with torch.no_grad():
        for _ in range(2):
            assert bool(parallel(broken_BTF)[0][0, 100:].isnan().all())
            assert parallel.solution.fell_back
    assert_equal(results(parallel, x_BTF), results(serial, x_BTF), 1e-7)
    assert not parallel.solution.fell_back


def test_a_gradient_that_is_found_sequentially_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    serial, parallel = pair(stretto.cells.GRU(F, H), SOLVERS["relaxation"](), scale=0.1)
    x_BTF = torch.randn(1, 200, F, dtype=torch.float64)
    expected = results(serial, x_BTF)
    assert_equal(results(parallel, x_BTF), expected, 1e-7)
    assert not parallel.solution.fell_back
    with monkeypatch.context() as patched:
        patched.setattr(ReverseCycles, "_why_stop", lambda *_, **__: "it takes too long")
        assert_equal(results(parallel, x_BTF), expected, 1e-7)
    assert "the gradient was found sequentially: it takes too long" in parallel.solution.reason
    assert_equal(results(parallel, x_BTF), expected, 1e-12)
    assert parallel.solution.reason.endswith("calls: the gradient: it takes too long")
    with torch.no_grad():
        _calls_until_tried(parallel, x_BTF)
    assert_equal(results(parallel, x_BTF), expected, 1e-7)
    assert not parallel.solution.fell_back


def test_a_gradient_that_is_nan_does_not_count() -> None:
    torch.manual_seed(0)
    _, parallel = pair(stretto.cells.GRU(F, H), SOLVERS["relaxation"](), scale=0.1)
    x_BTF = torch.randn(1, 200, F, dtype=torch.float64)
    (parallel(x_BTF)[0].sum() * math.inf).backward()
    assert "a gradient is NaN or inf" in parallel.solution.reason
    parallel(x_BTF)
    assert not parallel.solution.fell_back


def test_a_probe_that_proves_wrong_in_the_same_call_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep that is to verify does not; a new probe would say the same as the one before."""
    serial, parallel, x_BTF = _chaotic(stretto.Shooting(num_chunks=6, tolerance=1e-8))
    monkeypatch.setattr(shooting, "estimate_forgetting", lambda *_, **__: (2.0, 60))
    expected = results(serial, x_BTF)
    assert_equal(results(parallel, x_BTF), expected, 1e-7)
    assert re.match(r"after one sweep chunks of \d+ steps differ by", parallel.solution.reason)
    assert_equal(results(parallel, x_BTF), expected, 1e-12)
    assert _is_skipped(parallel)
    assert "after one sweep" in parallel.solution.reason


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.floats(0.01, 1000.0)), min_size=1, max_size=40),
    st.floats(0.01, 1000.0),
)
def test_failed_attempts_cost_little_in_any_order(outcomes: list[tuple[bool, float]], work: float) -> None:
    """A failed attempt costs at most a fixed share of the calls that follow it."""
    known = Backoff()
    for succeeds, cost in outcomes:
        assert known.should_skip() == ""
        if succeeds:
            known.succeed()
            assert known.should_skip() == ""
            continue
        known.fail(work=cost, reason="so it is")
        rest = known.calls_to_skip
        assert rest >= MIN_SKIP_CALLS
        assert cost / rest <= FIRST_COST_SHARE
        known.fail(work=10 * cost, reason="said twice")
        assert (known.calls_to_skip, known.reason) == (rest, "so it is")
        assert sum(bool(known.should_skip()) for _ in range(rest)) == rest
    for _ in range(20):
        known.fail(work=work, reason="so it is")
        rest, known.calls_to_skip = known.calls_to_skip, 0
    assert rest == max(MAX_SKIP_CALLS, math.ceil(work / LAST_COST_SHARE))
