"""Chunks of time at once, beside the same layer step after step.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stretto
from stretto.errors import StrettoError
from stretto.graph.structure import flatten

F, H = 3, 7
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def _forgetful(rnn: stretto.RNN) -> stretto.RNN:
    """Weights small enough for states to be forgotten within a few steps."""
    with torch.no_grad():
        for name, parameter in rnn.named_parameters():
            if "hh" in name:
                parameter.mul_(0.3)
    return rnn


def _results(rnn: stretto.RNN, x_BTF: torch.Tensor, **words: Any) -> dict[str, torch.Tensor]:
    """Outputs, final states and every gradient."""
    x_BTF = x_BTF.detach().clone().requires_grad_()
    state = rnn.initial_state(len(x_BTF))
    given_state = [part.detach().clone().normal_(generator=torch.Generator().manual_seed(3)) for part in flatten(state)]
    for part in given_state:
        part.requires_grad_()
    nested = given_state[0] if isinstance(state, torch.Tensor) else tuple(given_state)
    y, after = rnn(x_BTF, nested if len(rnn.cells) == 1 else None, **words)
    generator = torch.Generator().manual_seed(5)
    results = {"y": y, **{f"final {n}": part for n, part in enumerate(flatten(after))}}
    loss = sum((t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in results.values())
    inputs = {"x": x_BTF, **dict(rnn.named_parameters())}
    if len(rnn.cells) == 1:
        inputs |= {f"state {n}": part for n, part in enumerate(given_state)}
    gradients = torch.autograd.grad(loss, list(inputs.values()))  # type: ignore[arg-type]
    found = {name: tensor.detach() for name, tensor in results.items()}
    return found | {f"d {name}": g for name, g in zip(inputs, gradients, strict=True)}


def _assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in one.items():
        scale = max(1e-3, float(other[name].abs().max())) if value.numel() else 1.0
        worst = float((value - other[name]).abs().max()) / scale if value.numel() else 0.0
        assert worst <= tolerance, (name, worst)


def _pair(cell: stretto.Cell, solver: Any, dtype: torch.dtype = torch.float64, **words: Any) -> list[stretto.RNN]:
    serial = _forgetful(stretto.RNN(cell, **words).to(dtype))
    parallel = copy.deepcopy(serial)
    parallel.solver = solver
    return [serial, parallel]


CELLS = {
    "gru": lambda: stretto.cells.GRU(F, H),
    "lstm": lambda: stretto.cells.LSTM(F, H),
    "layer-norm-lstm": lambda: stretto.cells.LayerNormLSTM(F, H),
    "indrnn": lambda: stretto.cells.IndRNN(F, H),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_it_equals_step_after_step(cell: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-7
    serial, parallel = _pair(CELLS[cell](), stretto.Shooting(num_chunks=5, tolerance=tolerance), dtype)
    x_BTF = torch.randn(2, 300, F, dtype=dtype)
    _assert_equal(_results(parallel, x_BTF), _results(serial, x_BTF), TOLERANCE[dtype])
    assert not parallel.solution.fell_back
    assert parallel.solution.residual <= tolerance
    assert 2 <= parallel.solution.iterations < 5
    assert parallel.solution.backward_iterations is not None
    assert parallel.solution.backward_residual is not None
    assert parallel.solution.work == parallel.solution.iterations


@settings(max_examples=40, deadline=None)
@given(
    cell=st.sampled_from(sorted(CELLS)),
    num_chunks=st.integers(1, 12),
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=4),
    padding=st.integers(0, 2),
    kernel=st.sampled_from(["eager", "auto"]),
)
def test_it_equals_step_after_step_for_any_sizes(
    cell: str, num_chunks: int, lengths: list[int], padding: int, kernel: str
) -> None:
    torch.manual_seed(1)
    solver = stretto.Shooting(num_chunks=num_chunks, tolerance=1e-13)
    serial, parallel = _pair(CELLS[cell](), solver, kernel=kernel)
    x_BTF = torch.randn(len(lengths), max(1, max(lengths) + padding), F, dtype=torch.float64)
    _assert_equal(_results(parallel, x_BTF, lengths=lengths), _results(serial, x_BTF, lengths=lengths), 1e-10)


@pytest.mark.parametrize(("layers", "both_ways"), [(2, False), (1, True), (2, True)])
def test_layers_and_directions(layers: int, both_ways: bool) -> None:
    torch.manual_seed(2)
    solver = stretto.Shooting(num_chunks=4, tolerance=1e-13)
    serial, parallel = _pair(CELLS["gru"](), solver, num_layers=layers, bidirectional=both_ways)
    x_BTF = torch.randn(3, 90, F, dtype=torch.float64)
    lengths = [90, 13, 70]
    _assert_equal(_results(parallel, x_BTF, lengths=lengths), _results(serial, x_BTF, lengths=lengths), 1e-10)
    assert len(parallel.solutions) == layers * (2 if both_ways else 1)


def test_a_net_that_does_not_forget_is_walked_step_after_step_and_told() -> None:
    torch.manual_seed(0)
    serial = stretto.RNN(stretto.cells.GRU(F, 32).double())
    with torch.no_grad():
        for name, parameter in serial.named_parameters():
            if "hh" in name:
                parameter.mul_(8.0)  # chaotic: what differs a little differs altogether soon
    parallel = copy.deepcopy(serial)
    parallel.solver = stretto.Shooting(num_chunks=16)
    x_BTF = torch.randn(1, 400, F, dtype=torch.float64)
    _assert_equal(_results(parallel, x_BTF), _results(serial, x_BTF), 1e-12)
    assert parallel.solution.fell_back
    assert "shorter than the net's memory" in parallel.solution.reason
    assert parallel.solution.iterations <= 5


def test_as_many_sweeps_as_chunks_are_exact_whatever_the_net() -> None:
    torch.manual_seed(0)
    serial = stretto.RNN(stretto.cells.GRU(F, 16).double())
    with torch.no_grad():
        for name, parameter in serial.named_parameters():
            if "hh" in name:
                parameter.mul_(3.0)
    parallel = copy.deepcopy(serial)
    parallel.solver = stretto.Shooting(num_chunks=4, max_sweeps=4)
    x_BTF = torch.randn(2, 30, F, dtype=torch.float64)
    _assert_equal(_results(parallel, x_BTF, lengths=[30, 17]), _results(serial, x_BTF, lengths=[30, 17]), 1e-11)
    assert parallel.solution.residual < 1e-12
    assert parallel.solution.backward_iterations == 4


def test_fewer_sweeps_are_told_by_what_is_left() -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(stretto.cells.GRU(F, H), solver=stretto.Shooting(num_chunks=8, max_sweeps=1))
    rnn(torch.randn(1, 64, F))
    assert rnn.solution.iterations == 1
    assert rnn.solution.residual > 1e-3
    assert not rnn.solution.fell_back


def test_states_that_are_no_numbers_are_walked_step_after_step() -> None:
    rnn = stretto.RNN(stretto.cells.GRU(F, H), solver=stretto.Shooting(num_chunks=4))
    x_BTF = torch.randn(1, 40, F)
    x_BTF[0, 3] = torch.nan
    y_BTH, _ = rnn(x_BTF)
    assert rnn.solution.fell_back
    assert rnn.solution.reason == "a state is no number"
    assert bool(y_BTH[0, :3].isfinite().all())
    assert bool(y_BTH[0, 3:].isnan().all())


@pytest.mark.parametrize(("T", "num_chunks"), [(1, 4), (3, 100), (5, 1)])
def test_few_steps(T: int, num_chunks: int) -> None:
    serial, parallel = _pair(CELLS["lstm"](), stretto.Shooting(num_chunks=num_chunks, tolerance=1e-13))
    x_BTF = torch.randn(2, T, F, dtype=torch.float64)
    _assert_equal(_results(parallel, x_BTF), _results(serial, x_BTF), 1e-10)


def test_without_gradients_and_with_frozen_parameters() -> None:
    serial, parallel = _pair(CELLS["gru"](), stretto.Shooting(num_chunks=4, tolerance=1e-13))
    x_BTF = torch.randn(2, 60, F, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(parallel(x_BTF)[0], serial(x_BTF)[0], atol=1e-12)
    for rnn in (serial, parallel):
        rnn.cells[0].weight_ih.requires_grad_(False)
        rnn(x_BTF)[0].sum().backward()
    assert parallel.cells[0].weight_ih.grad is None
    assert torch.allclose(parallel.cells[0].weight_hh.grad, serial.cells[0].weight_hh.grad, atol=1e-10)


def test_gradients_can_be_asked_for_again() -> None:
    serial, parallel = _pair(CELLS["gru"](), stretto.Shooting(num_chunks=4, tolerance=1e-13))
    x_BTF = torch.randn(2, 60, F, dtype=torch.float64)
    loss = parallel(x_BTF)[0].square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    (2 * serial(x_BTF)[0].square().sum()).backward()
    for one, other in zip(parallel.parameters(), serial.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-10)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"num_chunks": 0}, "num_chunks is 0"),
        ({"num_chunks": "many"}, "num_chunks is 'many'"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
        ({"max_sweeps": 0}, "max_sweeps is 0"),
    ],
)
def test_settings_that_make_no_sense(words: dict[str, Any], said: str) -> None:
    with pytest.raises(StrettoError, match=said):
        stretto.Shooting(**words)


def test_calls_that_make_no_sense() -> None:
    cell = stretto.cells.GRU(F, H)
    rnn = stretto.RNN(cell, solver=stretto.Shooting(num_chunks=4, cache=stretto.TrajectoryCache()))
    x_BTF = torch.randn(2, 40, F)
    with pytest.raises(StrettoError, match="not known by any number"):
        rnn(x_BTF)
    with pytest.raises(StrettoError, match="3 sample_ids were given for 2 sequences"):
        rnn(x_BTF, sample_ids=[1, 2, 3])
    with pytest.raises(StrettoError, match="save='states' was given with Shooting"):
        stretto.RNN(cell, save="states", solver=stretto.Shooting())
    with pytest.raises(StrettoError, match="most_bytes is 0"):
        stretto.TrajectoryCache(most_bytes=0)
