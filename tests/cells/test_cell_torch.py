"""Weights from and to torch: cells that torch has too, parameters shared with cells, copied from and to layers.

Shape legend: B sequences, T steps, F features, H hidden units, P projected units.
"""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

import stretto
from stretto.cells import (
    GRU,
    LSTM,
    Cell,
    Elman,
    ProjectedLSTM,
    State,
    Zoneout,
    cell_from,
    load_layer,
    store_layer,
)
from stretto.errors import StrettoError
from stretto.kernels import loop_over_steps
from stretto.state import flatten

LAYERS: dict[str, tuple[type[nn.Module], type[Cell], dict[str, Any]]] = {
    "tanh": (nn.RNN, Elman, {}),
    "relu": (nn.RNN, Elman, {"nonlinearity": "relu"}),
    "gru": (nn.GRU, GRU, {}),
    "lstm": (nn.LSTM, LSTM, {}),
    "projected": (nn.LSTM, ProjectedLSTM, {"proj_size": 2}),
}
"""torch's layer, the cell that does a step of it, and what both are made with."""


@pytest.mark.parametrize("name", LAYERS)
@settings(deadline=None, max_examples=12)
@given(batch_size=st.integers(1, 5), F=st.integers(1, 7), H=st.integers(3, 9), bias=st.booleans())
def test_parameters_steps_and_gradients_equal_those_of_torch(
    name: str, batch_size: int, F: int, H: int, bias: bool
) -> None:
    layer_kind, cell_kind, options = LAYERS[name]
    torch.manual_seed(10 * F + H)
    cell = cell_kind(F, H, bias=bias, **options)
    torch.manual_seed(10 * F + H)
    layer = layer_kind(F, H, bias=bias, **options)
    assert [f"{key}_l0" for key in cell.state_dict()] == list(layer.state_dict())
    for key, weight in cell.named_parameters():
        assert torch.equal(weight, layer.get_parameter(f"{key}_l0")), key
    cell, layer = cell.double(), layer.double()
    x_TBF = torch.randn(4, batch_size, F, dtype=torch.float64)
    expected_TBH, last = layer(x_TBF)
    y_BTH, state = _run(cell, x_TBF.transpose(0, 1))
    torch.testing.assert_close(y_BTH.transpose(0, 1), expected_TBH, rtol=1e-12, atol=1e-12)
    for ours_BH, theirs_1BH in zip(flatten(state), flatten(last), strict=True):
        torch.testing.assert_close(ours_BH, theirs_1BH[0], rtol=1e-12, atol=1e-12)
    weights_TBH = torch.randn_like(expected_TBH)
    (y_BTH.transpose(0, 1) * weights_TBH).sum().backward()
    (expected_TBH * weights_TBH).sum().backward()
    for key, weight in cell.named_parameters():
        torch.testing.assert_close(weight.grad, layer.get_parameter(f"{key}_l0").grad, rtol=1e-11, atol=1e-11)


def _run(cell: Cell, x_BTF: torch.Tensor) -> tuple[torch.Tensor, State]:
    return loop_over_steps(cell, x_BTF, cell.initial_state(len(x_BTF)))


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


@pytest.mark.parametrize("module", [nn.Linear(F, H), nn.TransformerEncoderLayer(F * H, 1), Twisted(F, H), LSTM(F, H)])
def test_modules_other_than_torchs_cells_are_refused(module: nn.Module) -> None:
    with pytest.raises(StrettoError, match=f"{type(module).__name__} has no matching cell"):
        cell_from(module)


def test_weights_that_are_computed_cannot_be_shared() -> None:
    module = nn.LSTMCell(F, H)
    prune.random_unstructured(module, "weight_hh", amount=0.5)
    with pytest.raises(StrettoError, match="weight_hh of the LSTMCell is computed"):
        cell_from(module)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_loaded_layers_make_the_whole_module(name: str, bias: bool) -> None:
    torch.manual_seed(0)
    kind, cell_kind, options = LAYERS[name]
    module = kind(F, H, num_layers=2, bidirectional=True, batch_first=True, bias=bias, **options).double()
    width = 2 * int(options.get("proj_size", H))
    x_BTF = y_BTF = torch.randn(2, 4, F, dtype=torch.float64)
    for layer, size in enumerate((F, width)):
        ways = []
        for reverse in (False, True):
            cell = cell_kind(size, H, bias=bias, **options).double()
            load_layer(cell, module, layer=layer, reverse=reverse)
            ways.append(_run(cell, y_BTF.flip(1))[0].flip(1) if reverse else _run(cell, y_BTF)[0])
        y_BTF = torch.cat(ways, dim=-1)
    torch.testing.assert_close(y_BTF, module(x_BTF)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_storing_undoes_loading_and_touches_one_layer(name: str, reverse: bool) -> None:
    torch.manual_seed(0)
    kind, cell_kind, options = LAYERS[name]
    module = kind(F, H, num_layers=2, bidirectional=True, **options)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    cell, back = cell_kind(F, H, **options), cell_kind(F, H, **options)
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.RNN(3, 4, 2, nonlinearity="relu", bidirectional=True),
        lambda: nn.GRU(3, 4, 2, bias=False, bidirectional=True),
        lambda: nn.LSTM(3, 4, 2, bidirectional=True),
        lambda: nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True),
    ],
)
def test_cells_share_the_parameters_of_layers(make: Any) -> None:
    module = make().double()
    cells = [cell_from(module, layer=layer, reverse=reverse) for layer in (0, 1) for reverse in (False, True)]
    assert {id(weight) for cell in cells for weight in cell.parameters()} == set(map(id, module.parameters()))
    rnn = stretto.RNN(cells, 2, bidirectional=True, batch_first=False, backend="torch")
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(rnn(x)[0], module(x)[0], rtol=1e-10, atol=1e-10)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = rnn(x)[0]
    before.square().sum().backward()
    optimizer.step()
    assert not torch.equal(rnn(x)[0], before)
    torch.testing.assert_close(rnn(x)[0], module(x)[0], rtol=1e-10, atol=1e-10)
    with pytest.raises(StrettoError, match="has no layer 2"):
        cell_from(module, layer=2)
