"""Calls that accelerated layers leave to torch, single steps above all: the same numbers, refusals and traces.

Shape legend: B sequences, T steps, F features, H hidden units, L layers times directions.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

import stretto
from stretto.nn import torch_layers

F, H, B = 3, 4, 2
OPTIONS = (
    {},
    {"num_layers": 2, "bidirectional": True},
    {"batch_first": True, "bias": False},
    {"num_layers": 2, "dropout": 0.5},
)
KINDS = ("RNN", "GRU", "LSTM")


def _pair(kind: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A plain layer, and the same accelerated, which has run one step."""
    torch.manual_seed(0)
    plain = getattr(nn, kind)(F, H, **options)
    ours = stretto.accelerate(copy.deepcopy(plain))
    with torch.no_grad():
        ours(_x(plain))
    return plain, ours


def _x(layer: Any, *, rows: int = B, steps: int = 1) -> torch.Tensor:
    x_TBF = torch.randn(steps, rows, F)
    return x_TBF.transpose(0, 1).contiguous() if layer.batch_first else x_TBF


def _state(layer: Any, *, rows: int = B) -> Any:
    count = layer.num_layers * (1 + layer.bidirectional)
    out = layer.proj_size or layer.hidden_size
    h_LBH = torch.randn(count, rows, out)
    return (h_LBH, torch.randn(count, rows, layer.hidden_size)) if isinstance(layer, nn.LSTM) else h_LBH


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [tensor for part in value for tensor in _tensors(part)]


def _outcome(run: Callable[[], Any]) -> Any:
    """What a call gives, or what it raises."""
    torch.manual_seed(1)
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - any error must be torch's
        return type(error), str(error)


def _check_same(plain: Callable[[], Any], ours: Callable[[], Any]) -> None:
    wanted, found = _outcome(plain), _outcome(ours)
    if isinstance(wanted[0], type):
        assert found == wanted
        return
    assert [type(part) for part in found] == [type(part) for part in wanted]
    for one, other in zip(_tensors(found), _tensors(wanted), strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad


@pytest.mark.parametrize("options", [*OPTIONS, {"proj_size": 2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_over_single_steps_is_torchs_to_the_bit(kind: str, options: dict[str, Any]) -> None:
    if options.get("proj_size") and kind != "LSTM":
        options = {"nonlinearity": "relu"} if kind == "RNN" else {}
    layers = _pair(kind, **options)
    steps, first = [_x(layers[0]).requires_grad_() for _ in range(4)], _state(layers[0])

    def loop(layer: nn.Module, first: Any) -> list[torch.Tensor]:
        state, found = first, []
        for x in steps:
            y, state = layer(x, state)
            found.append(y)
        (torch.stack(found).square().sum() + sum(part.sum() for part in _tensors(state))).backward()
        gradients = [tensor.grad for tensor in (*steps, *layer.parameters()) if tensor.grad is not None]
        for tensor in steps:
            tensor.grad = None
        return [*found, *_tensors(state), *gradients]

    for given in (first, None):
        wanted, ours = (_outcome(lambda layer=layer, given=given: loop(layer, given)) for layer in layers)
        assert len(ours) == len(wanted)
        for one, other in zip(ours, wanted, strict=True):
            assert torch.equal(one, other)
        for layer in layers:
            layer.zero_grad()
    (explained,) = stretto.explain(layers[1]).layers
    assert explained.calls == 9
    assert explained.backend == "torch"


@pytest.mark.parametrize("kind", KINDS)
def test_states_that_do_not_fit_are_taken_and_refused_as_by_torch(kind: str) -> None:
    plain, ours = _pair(kind)
    x, state = _x(plain), _state(plain)
    parts = _tensors(state)
    wrong: list[Any] = [
        list(parts),
        tuple(parts),
        tuple(parts[:1]),
        (*parts, *parts),
        parts[0],
        _state(plain, rows=B + 1),
        tuple(part[0] for part in parts) if kind == "LSTM" else parts[0][0],
        tuple(part.double() for part in parts) if kind == "LSTM" else parts[0].double(),
        "state",
    ]
    for given in wrong:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _check_same(lambda given=given: plain(x, given), lambda given=given: ours(x, given))
    for given in (x.double(), x[..., :2], _x(plain, rows=B + 1), x[0], x.half()):
        _check_same(lambda given=given: plain(given, state), lambda given=given: ours(given, state))
    _check_same(lambda: plain(x, state), lambda: ours(x, state))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_changed_since_the_last_step_counts(kind: str) -> None:
    plain, ours = _pair(kind)
    x, state = _x(plain), _state(plain)

    def check() -> None:
        _check_same(lambda: plain(x, state), lambda: ours(x, state))

    def in_both(change: Callable[[nn.Module], None]) -> None:
        for layer in (plain, ours):
            torch.manual_seed(2)
            change(layer)
        check()

    in_both(lambda layer: layer.weight_hh_l0.data.mul_(2))
    in_both(lambda layer: setattr(layer, "weight_ih_l0", nn.Parameter(torch.randn_like(layer.weight_ih_l0))))
    in_both(lambda layer: layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()}, assign=True))
    other = {name: torch.randn_like(value) for name, value in plain.named_parameters()}
    _check_same(lambda: functional_call(plain, other, (x, state)), lambda: functional_call(ours, other, (x, state)))
    check()
    in_both(lambda layer: parametrizations.weight_norm(layer, "weight_hh_l0"))
    in_both(lambda layer: layer.double())
    x, state = x.double(), tuple(part.double() for part in state) if isinstance(state, tuple) else state.double()
    check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_step_takes_batches_of_any_size(kind: str) -> None:
    plain, ours = _pair(kind)
    traced = [torch.jit.trace(layer, (_x(plain),), check_trace=False) for layer in (plain, ours)]
    other = _x(plain, rows=B + 3)
    assert traced[0](other)[0].shape == (1, B + 3, H)
    _check_same(lambda: traced[0](other), lambda: traced[1](other))


def test_autocast_and_grad_modes_are_seen() -> None:
    plain, ours = _pair("GRU")
    x, state = _x(plain), _state(plain)
    for mode in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode():
            wanted, found = plain(x, state), ours(x, state)
        for one, other in zip(_tensors(found), _tensors(wanted), strict=True):
            assert one.dtype == other.dtype
            assert (one.requires_grad, one.is_inference()) == (other.requires_grad, other.is_inference())
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 5])
def test_options_that_change_after_a_call_count(kind: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_layers, "expected_speedup", Mock(return_value=0.5))
    plain, ours = _pair(kind, num_layers=2, bidirectional=True, dropout=0.5)
    x = _x(plain, rows=B, steps=steps)
    changes = {"training": True, "batch_first": True, "dropout": 0.0, "input_size": F + 1}
    for name, value in changes.items():
        for layer in (plain, ours):
            setattr(layer, name, value)
        for _ in range(2):
            _check_same(lambda: plain(x), lambda: ours(x))
