"""Cells that torch has too: the same parameters, drawn alike, and the same steps and gradients.

Shape legend: B sequences, T steps, F features, H hidden units, P projected units.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto.cells import GRU, LSTM, Cell, Elman, ProjectedLSTM

PAIRS: dict[str, tuple[Callable[..., Cell], Callable[..., nn.Module]]] = {
    "tanh": (Elman, nn.RNNCell),
    "relu": (partial(Elman, nonlinearity="relu"), partial(nn.RNNCell, nonlinearity="relu")),
    "gru": (GRU, nn.GRUCell),
    "lstm": (LSTM, nn.LSTMCell),
}


def _gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("name", PAIRS)
@settings(deadline=None, max_examples=12)
@given(
    batch_size=st.integers(1, 5),
    F=st.integers(1, 7),
    H=st.integers(1, 9),
    bias=st.booleans(),
)
def test_steps_equal_those_of_torch(name: str, batch_size: int, F: int, H: int, bias: bool) -> None:
    torch.manual_seed(10 * F + H)
    cell, peer = (make(F, H, bias=bias).double() for make in PAIRS[name])
    peer.load_state_dict(cell.state_dict())
    x_TBF = torch.randn(4, batch_size, F, dtype=torch.float64)
    state, other = cell.initial_state(batch_size), None
    ours, theirs = torch.zeros(()), torch.zeros(())
    for step, x_BF in enumerate(x_TBF):
        y, state = cell(x_BF, state)
        other = peer(x_BF, other)
        expected = other if isinstance(state, tuple) else (other,)
        found = state if isinstance(state, tuple) else (state,)
        for one, two in zip((y, *found), (expected[0], *expected), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
        ours, theirs = ours + (step + 1) * y.sum(), theirs + (step + 1) * expected[0].sum()
    ours.backward()
    theirs.backward()
    for weight, gradient in _gradients(peer).items():
        torch.testing.assert_close(_gradients(cell)[weight], gradient, rtol=1e-11, atol=1e-11)
    assert len(_gradients(cell)) == (4 if bias else 2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_parameters_are_named_shaped_and_drawn_as_in_torch(name: str, bias: bool) -> None:
    make, make_peer = PAIRS[name]
    torch.manual_seed(3)
    cell = make(5, 7, bias=bias)
    torch.manual_seed(3)
    peer = make_peer(5, 7, bias=bias)
    assert list(cell.state_dict()) == list(peer.state_dict())
    for key, value in peer.state_dict().items():
        assert torch.equal(cell.state_dict()[key], value), key


@settings(deadline=None, max_examples=25)
@given(
    batch_size=st.integers(1, 4),
    F=st.integers(1, 6),
    sizes=st.integers(2, 9).flatmap(lambda H: st.tuples(st.just(H), st.integers(1, H - 1))),
    bias=st.booleans(),
)
def test_the_projected_lstm_equals_that_of_torch(batch_size: int, F: int, sizes: tuple[int, int], bias: bool) -> None:
    H, P = sizes
    torch.manual_seed(F)
    cell = ProjectedLSTM(F, H, proj_size=P, bias=bias).double()
    torch.manual_seed(F)
    peer = nn.LSTM(F, H, proj_size=P, bias=bias, batch_first=True).double()
    assert [f"{name}_l0" for name in cell.state_dict()] == list(peer.state_dict())
    for name, weight in cell.named_parameters():
        assert torch.equal(weight, getattr(peer, f"{name}_l0")), name
    x_BTF = torch.randn(batch_size, 5, F, dtype=torch.float64)
    expected_BTP, (last_h, last_c) = peer(x_BTF)
    state = cell.initial_state(batch_size)
    total = torch.zeros(())
    for step in range(5):
        y_BP, state = cell(x_BTF[:, step], state)
        torch.testing.assert_close(y_BP, expected_BTP[:, step], rtol=1e-12, atol=1e-12)
        total = total + y_BP.sum()
    torch.testing.assert_close(state[0], last_h[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state[1], last_c[0], rtol=1e-12, atol=1e-12)
    total.backward()
    expected_BTP.sum().backward()
    for name, weight in cell.named_parameters():
        torch.testing.assert_close(weight.grad, getattr(peer, f"{name}_l0").grad, rtol=1e-11, atol=1e-11)


def test_single_precision_agrees_to_rounding() -> None:
    for make, make_peer in PAIRS.values():
        torch.manual_seed(0)
        cell, peer = make(33, 65), make_peer(33, 65)
        peer.load_state_dict(cell.state_dict())
        x_BF = torch.randn(4, 33)
        y, _ = cell(x_BF, cell.initial_state(4))
        expected = peer(x_BF)
        torch.testing.assert_close(y, expected[0] if isinstance(expected, tuple) else expected, rtol=1e-5, atol=1e-6)
