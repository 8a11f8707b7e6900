"""Weights from and to torch: cells that torch has too, parameters shared with cells, copied from and to layers.

Shape legend: B sequences, T steps, F features, H hidden units, P projected units.
"""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from stretto.cells import (
    GRU,
    LSTM,
    Cell,
    Elman,
    ProjectedLSTM,
    Zoneout,
    cell_from,
    load_layer,
    store_layer,
)
from stretto.errors import StrettoError

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


F, H = 3, 5
TORCH_CELLS: dict[str, nn.Module] = {
    "tanh": nn.RNNCell(F, H),
    "relu": nn.RNNCell(F, H, nonlinearity="relu", bias=False),
    "gru": nn.GRUCell(F, H),
    "lstm": nn.LSTMCell(F, H),
    "lstm-bare": nn.LSTMCell(F, H, bias=False).double(),
}


@pytest.mark.parametrize("name", TORCH_CELLS)
def test_a_cell_made_from_torch_shares_its_parameters(name: str) -> None:
    module = copy.deepcopy(TORCH_CELLS[name]).eval()
    drawn = torch.get_rng_state()
    cell = cell_from(module)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not cell.training
    ours, theirs = dict(cell.named_parameters()), dict(module.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(ours[key] is theirs[key] for key in ours)
    dtype = module.weight_ih.dtype
    x_BF = torch.randn(4, F, dtype=dtype)
    optimiser = torch.optim.SGD(cell.parameters(), lr=0.5)
    for _ in range(2):
        y_BH, _ = cell(x_BF, cell.initial_state(4))
        expected = module(x_BF)
        torch.testing.assert_close(y_BH, expected[0] if isinstance(expected, tuple) else expected)
        y_BH.square().sum().backward()
        assert all(weight.grad is not None for weight in module.parameters())
        before = module.weight_ih.detach().clone()
        optimiser.step()
        assert not torch.equal(module.weight_ih, before)


def test_a_cell_made_from_torch_can_be_made_again() -> None:
    module = nn.RNNCell(F, H, nonlinearity="relu", bias=False).double()
    other = cell_from(module).with_input_size(7)
    assert isinstance(other, Elman)
    assert other.nonlinearity == "relu"
    assert other.bias_ih is None
    assert other.weight_ih.shape == (H, 7)
    assert (other.weight_ih.dtype, other.weight_ih.device.type) == (torch.float64, "cpu")
    assert other.weight_hh is not module.weight_hh


class Twisted(nn.GRUCell):
    """Computes something else with the same parameters."""


@pytest.mark.parametrize("module", [nn.Linear(F, H), nn.LSTM(F, H), Twisted(F, H), LSTM(F, H)])
def test_modules_other_than_torchs_cells_are_refused(module: nn.Module) -> None:
    with pytest.raises(StrettoError, match=f"{type(module).__name__} has no matching cell"):
        cell_from(module)


def test_weights_that_are_computed_cannot_be_shared() -> None:
    module = nn.LSTMCell(F, H)
    prune.random_unstructured(module, "weight_hh", amount=0.5)
    with pytest.raises(StrettoError, match="weight_hh of the LSTMCell is computed"):
        cell_from(module)


LAYERS: dict[str, tuple[type[nn.Module], dict[str, object], type[Cell], dict[str, object]]] = {
    "tanh": (nn.RNN, {}, Elman, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}, Elman, {"nonlinearity": "relu"}),
    "gru": (nn.GRU, {}, GRU, {}),
    "gru-bare": (nn.GRU, {"bias": False}, GRU, {"bias": False}),
    "lstm": (nn.LSTM, {}, LSTM, {}),
    "projected": (nn.LSTM, {"proj_size": 2}, ProjectedLSTM, {"proj_size": 2}),
}


def _run(cell: Cell, x_BTF: torch.Tensor) -> torch.Tensor:
    state, outputs = cell.initial_state(len(x_BTF)), []
    for x_BF in x_BTF.unbind(dim=1):
        y, state = cell(x_BF, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("name", LAYERS)
def test_loaded_layers_make_the_whole_module(name: str) -> None:
    torch.manual_seed(0)
    kind, settings, cell_kind, cell_settings = LAYERS[name]
    module = kind(F, H, num_layers=2, bidirectional=True, batch_first=True, **settings).double()
    width = 2 * int(cell_settings.get("proj_size", H))
    x_BTF = y_BTF = torch.randn(2, 4, F, dtype=torch.float64)
    for layer, size in enumerate((F, width)):
        ways = []
        for reverse in (False, True):
            cell = cell_kind(size, H, **cell_settings).double()
            load_layer(cell, module, layer=layer, reverse=reverse)
            ways.append(_run(cell, y_BTF.flip(1)).flip(1) if reverse else _run(cell, y_BTF))
        y_BTF = torch.cat(ways, dim=-1)
    torch.testing.assert_close(y_BTF, module(x_BTF)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_storing_undoes_loading_and_touches_one_layer(name: str, reverse: bool) -> None:
    torch.manual_seed(0)
    kind, settings, cell_kind, cell_settings = LAYERS[name]
    module = kind(F, H, num_layers=2, bidirectional=True, **settings)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    cell, back = cell_kind(F, H, **cell_settings), cell_kind(F, H, **cell_settings)
    kept = [weight.clone() for weight in cell.parameters()]
    store_layer(cell, module, layer=0, reverse=reverse)
    changed = {key for key, value in module.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {f"{key}_l0{'_reverse' if reverse else ''}" for key in cell.state_dict()}
    load_layer(back, module, layer=0, reverse=reverse)
    for one, two, three in zip(cell.parameters(), back.parameters(), kept, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
        assert one is not two


REFUSED = {
    "kind": (GRU(F, H), nn.LSTM(F, H), {}, "Use LSTM"),
    "reset": (GRU(F, H, reset="before"), nn.GRU(F, H), {}, "Use GRU with reset='after'"),
    "squash": (Elman(F, H), nn.RNN(F, H, nonlinearity="relu"), {}, "Use Elman with nonlinearity='relu'"),
    "projection": (LSTM(F, H), nn.LSTM(F, H, proj_size=2), {}, "Use ProjectedLSTM"),
    "no projection": (ProjectedLSTM(F, H, proj_size=2), nn.LSTM(F, H), {}, "Use LSTM"),
    "wrapped": (Zoneout(LSTM(F, H)), nn.LSTM(F, H), {}, r"give its \.cell"),
    "module": (LSTM(F, H), nn.LSTMCell(F, H), {}, "LSTMCell has no layers"),
    "input": (LSTM(F + 1, H), nn.LSTM(F, H), {}, r"weight_ih \(20, 4\).*weight_ih \(20, 3\)"),
    "hidden": (LSTM(F, H), nn.LSTM(F, H + 1), {}, "Make the cell with the sizes"),
    "bias": (LSTM(F, H, bias=False), nn.LSTM(F, H), {}, "the bias and the dtype"),
    "no bias": (LSTM(F, H), nn.LSTM(F, H, bias=False), {}, "the bias and the dtype"),
    "width": (ProjectedLSTM(F, H, proj_size=2), nn.LSTM(F, H, proj_size=3), {}, "weight_hr"),
    "dtype": (LSTM(F, H), nn.LSTM(F, H).double(), {}, "of torch.float32.*of torch.float64"),
    "layer": (LSTM(F, H), nn.LSTM(F, H, 2), {"layer": 2}, "has no layer 2"),
    "below": (LSTM(F, H), nn.LSTM(F, H, 2), {"layer": -1}, "has no layer -1"),
    "reverse": (LSTM(F, H), nn.LSTM(F, H), {"reverse": True}, "has no layer 0 in reverse"),
}


@pytest.mark.parametrize("move", [load_layer, store_layer])
@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_do_not_fit_are_refused_and_left_alone(name: str, move: object) -> None:
    cell, module, where, message = REFUSED[name]
    before = [weight.clone() for weight in (*cell.parameters(), *module.parameters())]
    with pytest.raises(StrettoError, match=message):
        move(cell, module, **where)
    for weight, earlier in zip((*cell.parameters(), *module.parameters()), before, strict=True):
        assert torch.equal(weight, earlier)
