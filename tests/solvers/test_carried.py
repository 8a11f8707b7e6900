"""Boundaries carried from one visit of a sequence to the next.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import numpy as np
import torch

import stretto

F, H = 3, 7


def test_boundaries_are_carried_from_visit_to_visit() -> None:
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
    cache = stretto.TrajectoryCache(most_bytes=3 * 4 * H * 8)
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


def test_adjoints_are_carried_too_if_asked() -> None:
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


def test_the_nearer_of_two_starts_is_taken() -> None:
    """A net that remembers for long: where it was last time is nearer than what burning in comes to."""
    torch.manual_seed(0)
    cache = stretto.TrajectoryCache()
    solver = stretto.Shooting(num_chunks=10, tolerance=1e-11, cache=cache, persist=True)
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


def test_states_that_are_no_numbers_are_not_carried() -> None:
    cache = stretto.TrajectoryCache()
    rnn = stretto.RNN(stretto.cells.GRU(F, H), solver=stretto.Shooting(num_chunks=5, max_sweeps=1, cache=cache))
    x_BTF = torch.randn(2, 50, F)
    x_BTF[1, 3] = torch.nan
    rnn(x_BTF, sample_ids=[0, 1])
    assert len(cache) == 1
