"""Accelerated layers beside torch's own: all options, kinds of input and initial states, values and gradients.

Shape legend: B sequences, T steps, F features, L layers times directions, H hidden units or projected ones.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import stretto

# Two directions of H are F wide, so that the layers above them share the programs of the first.
F, H, P = 8, 4, 2
B, T = 4, 6
TOLERANCE = 1e-10
KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "rnn-tanh": nn.RNN,
    "rnn-relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "gru": nn.GRU,
    "lstm": nn.LSTM,
    "projected": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=P, **options),
}
LENGTHS = {"sorted": [6, 4, 4, 1], "unsorted": [4, 1, 6, 4]}


@final
@dataclass(slots=True, kw_only=True)
class Call:
    """What a layer is called with: a padded batch or a sequence, to be packed or not, and perhaps an initial state."""

    x: torch.Tensor
    state: list[torch.Tensor] | None
    lengths: list[int] | None = None

    def input_of(self, layer: nn.RNNBase) -> torch.Tensor | PackedSequence:
        """The batch in the form in which the layer gets it."""
        if self.lengths is None:
            return self.x
        is_sorted = self.lengths == sorted(self.lengths, reverse=True)
        lengths_B = torch.tensor(self.lengths)
        return pack_padded_sequence(self.x, lengths_B, batch_first=layer.batch_first, enforce_sorted=is_sorted)

    def run(self, layer: nn.RNNBase) -> dict[str, torch.Tensor]:
        """Outputs, final states, and the gradients of a loss that weighs every number of them differently."""
        given = None if self.state is None else tuple(self.state) if layer.mode == "LSTM" else self.state[0]
        y, after = layer(self.input_of(layer), given)
        states = list(after) if isinstance(after, tuple) else [after]
        values = {"y": y.data if isinstance(y, PackedSequence) else y}
        values |= {f"final state {number}": state for number, state in enumerate(states)}
        generator = torch.Generator().manual_seed(5)
        loss = torch.zeros((), dtype=torch.float64)
        for value in values.values():
            loss = loss + (value * torch.randn(value.shape, dtype=value.dtype, generator=generator)).sum()
        inputs = {"x": self.x, **dict(layer.named_parameters())}
        inputs |= {f"state {number}": state for number, state in enumerate(self.state or [])}
        inputs = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
        gradients = torch.autograd.grad(loss, list(inputs.values()))
        return {**values, **{f"gradient of {name}": g for name, g in zip(inputs, gradients, strict=True)}}


def _call(layer: nn.RNNBase, kind: str, *, given: bool) -> Call:
    generator = torch.Generator().manual_seed(3)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=torch.float64, generator=generator).requires_grad_()

    count = layer.num_layers * (2 if layer.bidirectional else 1)
    rows = () if kind == "unbatched" else (B,)
    widths = [layer.proj_size or layer.hidden_size, *([layer.hidden_size] if layer.mode == "LSTM" else [])]
    state = [drawn(count, *rows, width) for width in widths] if given else None
    batch = (B, T) if layer.batch_first else (T, B)
    x = drawn(T, F) if kind == "unbatched" else drawn(*batch, F)
    return Call(x=x, state=state, lengths=LENGTHS.get(kind))


def _accelerated(layer: nn.RNNBase) -> nn.RNNBase:
    return stretto.accelerate(copy.deepcopy(layer), backend="cpp")


def _assert_same(layer: nn.RNNBase, call: Call) -> None:
    """The generated kernel alone does what torch does."""
    ours = _accelerated(layer)
    wanted = call.run(layer)
    found = call.run(ours)
    assert [item.backend for item in stretto.explain(ours).layers] == ["cpp"]
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, name
        assert (found[name] - tensor).abs().max() <= TOLERANCE, name


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("given", [False, True], ids=["", "state"])
@pytest.mark.parametrize("kind", ["batched", "unbatched", "sorted", "unsorted"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch-first"])
@pytest.mark.parametrize("both_ways", [False, True], ids=["", "both-ways"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("bias", [True, False], ids=["", "bare"])
@pytest.mark.parametrize("layer", KINDS)
@pytest.mark.slow
def test_any_options_and_input(  # noqa: PLR0917 - pytest names what it gives
    layer: str, bias: bool, num_layers: int, both_ways: bool, batch_first: bool, kind: str, given: bool
) -> None:
    dropout = 0.4 if num_layers > 1 else 0.0
    options = {"num_layers": num_layers, "bias": bias, "bidirectional": both_ways}
    theirs = KINDS[layer](F, H, batch_first=batch_first, dropout=dropout, **options).double()
    theirs.train(mode=not dropout)
    _assert_same(theirs, _call(theirs, kind, given=given))


@pytest.mark.parametrize("kind", ["batched", "unsorted"])
@pytest.mark.parametrize("name", KINDS)
def test_packed_and_padded_outputs_keep_their_form(name: str, kind: str) -> None:
    theirs = KINDS[name](F, H, bidirectional=True).double()
    call = _call(theirs, kind, given=False)
    found, wanted = (layer(call.input_of(layer))[0] for layer in (_accelerated(theirs), theirs))
    assert type(found) is type(wanted)
    if isinstance(wanted, PackedSequence):
        for field in ("batch_sizes", "sorted_indices", "unsorted_indices"):
            assert torch.equal(getattr(found, field), getattr(wanted, field)), field


def test_dropout_between_layers_is_there_in_training_alone() -> None:
    layer = _accelerated(nn.GRU(F, H, num_layers=2, dropout=0.5).double())
    x_TBF = torch.randn(T, B, F, dtype=torch.float64)

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        y_TBH: torch.Tensor = layer(x_TBF)[0]
        return y_TBH

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    layer.eval()
    assert torch.equal(drawn(1), drawn(2))


@pytest.mark.parametrize("kind", ["batched", "unsorted"])
def test_dropout_of_everything_leaves_the_upper_layer_without_input(kind: str) -> None:
    theirs = nn.LSTM(F, H, num_layers=2, dropout=1.0, bidirectional=True).double()
    _assert_same(theirs, _call(theirs, kind, given=True))


def test_dropout_keeps_the_expected_share() -> None:
    # Layers without recurrence or bias, and a linear one above: its outputs count what was kept.
    layer = nn.RNN(1, 64, num_layers=2, bias=False, nonlinearity="relu", dropout=0.25)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.fill_(0.0 if "_hh_" in name else 1.0)
    y_BTH = _accelerated(layer)(torch.ones(50, 20, 1))[0]
    kept = y_BTH[..., 0] * 0.75 / 64
    # Each of 1000 steps has 64 draws: five standard errors of their mean.
    assert abs(kept.mean() - 0.75) < 5 * (0.75 * 0.25 / 64_000) ** 0.5


@pytest.mark.parametrize("frozen", ["weight_hh_l0", "bias_ih_l0", "weight_ih_l0_reverse"])
@pytest.mark.parametrize("layer", KINDS)
def test_a_frozen_parameter_has_no_gradient_and_others_keep_theirs(layer: str, frozen: str) -> None:
    theirs = KINDS[layer](F, H, bidirectional=True).double()
    getattr(theirs, frozen).requires_grad_(False)
    call = _call(theirs, "batched", given=True)
    _assert_same(theirs, call)
    ours = _accelerated(theirs)
    ours(call.x)[0].sum().backward()
    assert [name for name, parameter in ours.named_parameters() if parameter.grad is None] == [frozen]


@pytest.mark.parametrize("layer", KINDS)
def test_frozen_layers_pass_gradients_on(layer: str) -> None:
    theirs = KINDS[layer](F, H).double().requires_grad_(False)
    call = _call(theirs, "batched", given=True)
    _assert_same(theirs, call)
    assert not _accelerated(theirs)(call.x.detach())[0].requires_grad


@pytest.mark.parametrize("pair", [("weight_ih_l0", "weight_ih_l0_reverse"), ("bias_ih_l0", "bias_hh_l0")])
@pytest.mark.parametrize("layer", KINDS)
def test_tied_parameters_stay_tied_and_gather_both_gradients(layer: str, pair: tuple[str, str]) -> None:
    theirs = KINDS[layer](F, H, bidirectional=True).double()
    one, other = pair
    setattr(theirs, other, getattr(theirs, one))
    ours = _accelerated(theirs)
    assert getattr(ours, one) is getattr(ours, other)
    _assert_same(theirs, _call(theirs, "batched", given=False))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layer", KINDS)
def test_values_without_gradients_are_those_with_them(layer: str, mode: Callable[[], Any]) -> None:
    ours = _accelerated(KINDS[layer](F, H, bidirectional=True).double())
    x_TBF = torch.randn(T, B, F, dtype=torch.float64)
    wanted = ours(x_TBF)[0]
    with mode():
        assert torch.equal(ours(x_TBF)[0], wanted.detach())


@pytest.mark.parametrize("layer", ["gru", "lstm"])
def test_layers_converted_afterwards_run_in_their_new_precision(layer: str) -> None:
    theirs = KINDS[layer](F, H)
    x_TBF = torch.randn(T, B, F)
    ours = _accelerated(theirs)
    torch.testing.assert_close(ours(x_TBF)[0], theirs(x_TBF)[0], atol=1e-6, rtol=1e-5)
    theirs, ours = theirs.double(), ours.double()
    torch.testing.assert_close(ours(x_TBF.double())[0], theirs(x_TBF.double())[0], atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("layer", ["rnn-tanh", "rnn-relu", "gru", "lstm"])
def test_a_single_unit_feature_step_or_sequence(layer: str) -> None:
    theirs = KINDS[layer](1, 1).double()
    for steps, rows in [(1, 1), (T, 1), (1, B), (T, B)]:
        x_TBF = torch.randn(steps, rows, 1, dtype=torch.float64, requires_grad=True)
        _assert_same(theirs, Call(x=x_TBF, state=None))


@pytest.mark.parametrize("layer", KINDS)
def test_gradients_can_be_differentiated_again(layer: str) -> None:
    theirs = KINDS[layer](F, H, bidirectional=True).double()
    x_TBF = torch.randn(T, B, F, dtype=torch.float64, requires_grad=True)
    found = []
    for one in (theirs, _accelerated(theirs)):
        inputs = [x_TBF, *one.parameters()]
        gradients = torch.autograd.grad(one(x_TBF)[0].square().sum(), inputs, create_graph=True)
        size = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        found.append(torch.autograd.grad(size, inputs))
    for wanted, ours in zip(*found, strict=True):
        assert (ours - wanted).abs().max() <= TOLERANCE * max(1.0, wanted.abs().max().item())
