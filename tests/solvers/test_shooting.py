"""Multiple shooting, beside the same layer run sequentially; boundaries kept from one visit of a sequence to the next.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import functools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_oracle import TOLERANCE, assert_equal, pair, results

import stretto
from stretto.errors import StrettoError
from stretto.solvers.shooting import PROBE_SHARE, CorrectedSweeps

F, H = 3, 7

CELLS = {
    "gru": lambda: stretto.cells.GRU(F, H),
    "lstm": lambda: stretto.cells.LSTM(F, H),
    "layer-norm-lstm": lambda: stretto.cells.LayerNormLSTM(F, H),
    "indrnn": lambda: stretto.cells.IndRNN(F, H),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_it_equals_a_sequential_run(cell: str, dtype: torch.dtype) -> None:
    """States at the boundaries are found by burning in; one sweep verifies them, in reverse too."""
    torch.manual_seed(0)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    serial, parallel = pair(CELLS[cell](), stretto.Shooting(num_chunks=5, tolerance=tolerance), dtype)
    x_BTF = torch.randn(2, 700, F, dtype=dtype)
    assert_equal(results(parallel, x_BTF), results(serial, x_BTF), TOLERANCE[dtype])
    solution = parallel.solution
    assert not solution.fell_back
    assert solution.residual <= tolerance
    assert solution.iterations == 1
    assert solution.backward_iterations == 2
    assert solution.backward_residual is not None
    assert solution.backward_residual <= tolerance
    assert 1 < solution.work < 2.5


@functools.cache
def _nets(cell: str, backend: str) -> list[stretto.RNN]:
    """Layers that are built once for all examples."""
    torch.manual_seed(1)
    return pair(CELLS[cell](), "serial", backend=backend)


@pytest.mark.parametrize("backend", ["eager", pytest.param("auto", marks=pytest.mark.slow)])
@settings(max_examples=40, deadline=None)
@given(
    cell=st.sampled_from(sorted(CELLS)),
    num_chunks=st.integers(1, 12),
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=4),
    padding=st.integers(0, 2),
    until_converged=st.booleans(),
)
def test_it_equals_a_sequential_run_for_any_sizes(
    *, cell: str, num_chunks: int, lengths: list[int], padding: int, backend: str, until_converged: bool
) -> None:
    serial, parallel = _nets(cell, backend)
    parallel.solver = stretto.Shooting(num_chunks=num_chunks, tolerance=1e-13, until_converged=until_converged)
    x_BTF = torch.randn(len(lengths), max(1, max(lengths) + padding), F, dtype=torch.float64)
    assert_equal(results(parallel, x_BTF, lengths=lengths), results(serial, x_BTF, lengths=lengths), 1e-10)


def test_a_net_that_learned_to_remember_is_noticed() -> None:
    """It forgot when it was probed; now the sweep that is to verify does not, and the rest runs sequentially."""
    torch.manual_seed(0)
    serial, parallel = pair(CELLS["gru"](), stretto.Shooting(num_chunks=6, tolerance=1e-13))
    x_BTF = torch.randn(2, 600, F, dtype=torch.float64)
    assert_equal(results(parallel, x_BTF), results(serial, x_BTF), 1e-10)
    assert not parallel.solution.fell_back
    with torch.no_grad():
        for rnn in (serial, parallel):
            rnn.cells[0].bias_hh[H : 2 * H] += 6.0  # type: ignore[index]
    lengths = [600, 310]
    assert_equal(results(parallel, x_BTF, lengths=lengths), results(serial, x_BTF, lengths=lengths), 1e-10)
    assert parallel.solution.fell_back
    assert "after one sweep chunks of 100 steps differ by" in parallel.solution.reason
    assert_equal(results(parallel, x_BTF), results(serial, x_BTF), 1e-10)
    assert "the net does not forget within a chunk of 100 steps" in parallel.solution.reason


@pytest.mark.parametrize("cell", ["gru", "lstm", "indrnn"])
def test_it_sweeps_until_converged_if_asked(cell: str) -> None:
    """A net that remembers longer than its chunks, by sweeps alone."""
    torch.manual_seed(0)
    solver = stretto.Shooting(num_chunks=12, tolerance=1e-12, until_converged=True)
    serial, parallel = pair(CELLS[cell](), solver, scale=1.0)
    with torch.no_grad():
        for rnn in (serial, parallel):
            if cell in ("gru", "lstm"):
                rnn.cells[0].bias_hh[H : 2 * H] += 4.0  # type: ignore[index]
    x_BTF = torch.randn(2, 240, F, dtype=torch.float64)
    lengths = [240, 130]
    assert_equal(results(parallel, x_BTF, lengths=lengths), results(serial, x_BTF, lengths=lengths), 1e-10)
    assert not parallel.solution.fell_back
    assert 2 <= parallel.solution.iterations <= 12


def _starts_of(scale: float, keep: float, *, seed: int) -> tuple[dict[str, float], float]:
    """The largest mismatch after a first sweep from each start, and that of the one that was used."""
    torch.manual_seed(seed)
    _, rnn = pair(CELLS["gru"](), stretto.Shooting(num_chunks=8, tolerance=1e-12, until_converged=True), scale=scale)
    with torch.no_grad():
        rnn.cells[0].bias_hh[H : 2 * H] += keep  # type: ignore[index]
        x_BTF = torch.randn(1, 160, F, dtype=torch.float64)
        step = stretto.RNN(rnn.cells[0])
        found = {}
        for name, burnt in (("burnt in", 20 // PROBE_SHARE), ("initial", 0)):
            gaps, end_BH = [], step(x_BTF[:, :20])[1]
            for first in range(20, 160, 20):
                state_BH = step(x_BTF[:, first - burnt : first])[1] if burnt else None
                start_BH = rnn.initial_state(1) if state_BH is None else state_BH
                gaps.append(float((end_BH - start_BH).abs().max()))
                end_BH = step(x_BTF[:, first : first + 20], start_BH)[1]
            found[name] = max(gaps)
        asked = mock.patch.object(CorrectedSweeps, "next_boundaries", autospec=True, side_effect=_StartChosenError)
        with asked as call, pytest.raises(_StartChosenError):
            rnn(x_BTF)
        return found, float(call.call_args.args[3])


class _StartChosenError(Exception):
    """Raised once the start is chosen: the rest of the solve does not matter."""


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([0.3, 2.0, 6.0]), st.sampled_from([-2.0, 0.0, 4.0]), st.integers(0, 99))
def test_it_starts_where_a_sweep_leaves_the_smallest_residual(scale: float, keep: float, seed: int) -> None:
    found, chosen = _starts_of(scale, keep, seed=seed)
    assert chosen == pytest.approx(min(found.values()), rel=1e-6)


def test_either_start_may_be_the_nearer() -> None:
    nearer = {min(found, key=found.__getitem__) for found, _ in (_starts_of(6.0, 0.0, seed=n) for n in range(12))}
    assert nearer == {"burnt in", "initial"}


def test_as_many_sweeps_as_chunks_are_exact_whatever_the_net() -> None:
    torch.manual_seed(0)
    serial, parallel = pair(stretto.cells.GRU(F, 16), stretto.Shooting(num_chunks=4, max_sweeps=4), scale=3.0)
    x_BTF = torch.randn(2, 30, F, dtype=torch.float64)
    assert_equal(results(parallel, x_BTF, lengths=[30, 17]), results(serial, x_BTF, lengths=[30, 17]), 1e-11)
    assert parallel.solution.residual < 1e-12
    assert parallel.solution.backward_iterations == 4


def test_with_fewer_sweeps_the_residual_is_reported() -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(stretto.cells.GRU(F, H), solver=stretto.Shooting(num_chunks=8, max_sweeps=1))
    rnn(torch.randn(1, 64, F))
    assert rnn.solution.iterations == 1
    assert rnn.solution.residual > 1e-3
    assert not rnn.solution.fell_back


def test_one_sweep_reports_a_state_that_is_nan() -> None:
    torch.manual_seed(0)
    _, rnn = pair(CELLS["gru"](), stretto.Shooting(num_chunks=4, max_sweeps=1))
    x_BTF = torch.randn(1, 40, F, dtype=torch.float64)
    rnn(x_BTF)
    assert "NaN or inf" not in rnn.solution.reason
    x_BTF[0, 13] = torch.nan
    rnn(x_BTF)
    assert math.isnan(rnn.solution.residual)
    assert rnn.solution.reason.endswith("; a state is NaN or inf")


def test_tables_made_without_gradients_serve_with_them() -> None:
    """Those of batches of one shape are kept from call to call."""
    for T in (60, 61):
        serial, parallel = pair(CELLS["gru"](), stretto.Shooting(num_chunks=4, tolerance=1e-13))
        x_BTF = torch.randn(2, T, F, dtype=torch.float64)
        with torch.inference_mode():
            parallel(x_BTF)
        assert_equal(results(parallel, x_BTF), results(serial, x_BTF), 1e-10)


def test_calls_that_make_no_sense() -> None:
    cell = stretto.cells.GRU(F, H)
    rnn = stretto.RNN(cell, solver=stretto.Shooting(num_chunks=4, cache=stretto.TrajectoryCache()))
    x_BTF = torch.randn(2, 40, F)
    with pytest.raises(StrettoError, match="sequences have no ids"):
        rnn(x_BTF)
    with pytest.raises(StrettoError, match="3 sample_ids were given for 2 sequences"):
        rnn(x_BTF, sample_ids=[1, 2, 3])
    with pytest.raises(StrettoError, match=r"save='states' was given with solver=Shooting"):
        stretto.RNN(cell, save="states", solver=stretto.Shooting())
    with pytest.raises(StrettoError, match="TrajectoryCache got max_bytes=0"):
        stretto.TrajectoryCache(max_bytes=0)


# --- warm starts from a cache


def test_boundaries_are_kept_from_visit_to_visit() -> None:
    """The same sequence again: each chunk begins where the one before ended; after enough visits it is exact."""
    torch.manual_seed(0)
    cache = stretto.TrajectoryCache()
    rnn = stretto.RNN(
        stretto.cells.GRU(F, H).double(), solver=stretto.Shooting(num_chunks=5, max_sweeps=1, cache=cache)
    )
    serial = stretto.RNN(rnn.cells[0])
    x_BTF = torch.randn(3, 50, F, dtype=torch.float64)
    lengths = [50, 21, 0]
    residuals = []
    for visit in range(5):
        order = np.random.default_rng(visit).permutation(3).tolist()
        y_BTH, _ = rnn(x_BTF[order], lengths=[lengths[n] for n in order], sample_ids=[100 + n for n in order])
        residuals.append(rnn.solution.residual)
    expected_BTH, _ = serial(x_BTF[order], lengths=[lengths[n] for n in order])
    assert residuals[0] > 1e-3
    assert residuals[-1] < 1e-12
    assert torch.allclose(y_BTH, expected_BTH, atol=1e-12)
    assert "2 of 2 sequences from where they were last time" in rnn.solution.reason
    assert len(cache) == 2
    assert cache.num_bytes == (4 + 2) * H * 8


def test_a_cache_is_saved_bounded_and_cleared() -> None:
    cache = stretto.TrajectoryCache(max_bytes=3 * 4 * H * 8)
    rnn = stretto.RNN(
        stretto.cells.GRU(F, H).double(), solver=stretto.Shooting(num_chunks=5, max_sweeps=1, cache=cache)
    )
    x_BTF = torch.randn(5, 50, F, dtype=torch.float64)
    rnn(x_BTF, sample_ids=torch.arange(5))
    assert len(cache) == 3
    twin = stretto.TrajectoryCache()
    twin.load_state_dict(cache.state_dict())
    assert twin.num_bytes == cache.num_bytes
    rnn.solver.cache = twin  # type: ignore[union-attr]
    rnn(x_BTF, sample_ids=torch.arange(5))
    assert "3 of 5" in rnn.solution.reason
    cache.clear()
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_adjoints_are_kept_too_if_asked() -> None:
    """With weights that stay, gradients come closer to the exact ones visit by visit, and then are them."""
    torch.manual_seed(0)
    serial = stretto.RNN(stretto.cells.GRU(F, H).double())
    x_BTF = torch.randn(2, 50, F, dtype=torch.float64)
    expected = torch.autograd.grad(serial(x_BTF)[0].square().sum(), list(serial.parameters()))
    gaps = {}
    for adjoints in (False, True):
        cache = stretto.TrajectoryCache(adjoints=adjoints)
        rnn = stretto.RNN(serial.cells[0], solver=stretto.Shooting(num_chunks=5, max_sweeps=1, cache=cache))
        gaps[adjoints] = []
        for _ in range(12):
            loss = rnn(x_BTF, sample_ids=[0, 1])[0].square().sum()
            found = torch.autograd.grad(loss, list(rnn.parameters()))
            gaps[adjoints].append(max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)))
        assert rnn.solution.backward_residual is not None
    assert gaps[False][-1] > 1e-6
    assert gaps[True][-1] < 1e-12
    assert rnn.solution.backward_residual < 1e-12


def test_the_nearer_of_two_starts_is_used() -> None:
    """A net that remembers for long: where it was last time is nearer than what burning in comes to."""
    torch.manual_seed(0)
    cache = stretto.TrajectoryCache()
    solver = stretto.Shooting(num_chunks=10, tolerance=1e-11, cache=cache, until_converged=True)
    rnn = stretto.RNN(stretto.cells.GRU(F, H).double(), solver=solver)
    with torch.no_grad():
        rnn.cells[0].bias_hh[H : 2 * H] += 5.0  # type: ignore[index]
        x_BTF = torch.randn(1, 200, F, dtype=torch.float64)
        first, _ = rnn(x_BTF, sample_ids=[7])
        needed = rnn.solution.iterations
        assert "from where they were" not in rnn.solution.reason
        again, _ = rnn(x_BTF, sample_ids=[7])
        assert rnn.solution.iterations == 2 < needed
        assert "1 of 1 sequences from where they were last time" in rnn.solution.reason
        assert torch.allclose(first, again, atol=1e-10)
        for place in list(cache._held):
            cache.put(place, [torch.full_like(part, 9.0) for part in cache._held[place]])
        misled, _ = rnn(x_BTF, sample_ids=[7])
        assert "from where they were" not in rnn.solution.reason
        assert torch.allclose(first, misled, atol=1e-10)


def test_states_that_are_nan_are_not_cached() -> None:
    cache = stretto.TrajectoryCache()
    rnn = stretto.RNN(stretto.cells.GRU(F, H), solver=stretto.Shooting(num_chunks=5, max_sweeps=1, cache=cache))
    x_BTF = torch.randn(2, 50, F)
    x_BTF[1, 3] = torch.nan
    rnn(x_BTF, sample_ids=[0, 1])
    assert len(cache) == 1
