"""Who runs an accelerated layer: measured once for each kind of batch and reported, and torch itself where it has to.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import stretto
from stretto.errors import StrettoError

F, H = 8, 4
B, T = 3, 5


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


@pytest.fixture
def x_TBF() -> torch.Tensor:
    return torch.randn(T, B, F, dtype=torch.float64)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every call of torch's own GRU."""
    calls: list[int] = []
    forward = nn.GRU.forward

    def counted(*given: Any) -> Any:
        calls.append(1)
        return forward(*given)

    monkeypatch.setattr(nn.GRU, "forward", counted)
    return calls


def _measured(layer: Any) -> dict[str, Any]:
    measured: dict[str, Any] = layer.explain_choice()
    return measured


def test_a_kind_of_batch_is_measured_once_and_reported(x_TBF: torch.Tensor, by_torch: list[int]) -> None:
    layer = stretto.accelerate(nn.GRU(F, H).double())
    assert _measured(layer) == {}
    layer(x_TBF)
    (measured,) = _measured(layer).values()
    assert measured["faster"] == ("cpp" if measured["ratio"] > 1 else "torch")
    assert measured["ratio"] > 0
    by_torch.clear()
    layer(x_TBF)
    layer(x_TBF + 1)
    assert list(_measured(layer).values()) == [measured]
    assert len(by_torch) == (2 if measured["faster"] == "torch" else 0)


@pytest.mark.parametrize("faster", ["cpp", "torch"])
def test_who_was_faster_runs(
    faster: str, x_TBF: torch.Tensor, by_torch: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = stretto.accelerate(nn.GRU(F, H).double())
    monkeypatch.setattr(type(layer), "_measure", lambda *_, **__: {"faster": faster, "ratio": 1.0})
    layer(x_TBF)
    assert len(by_torch) == (faster == "torch")


def test_other_kinds_of_batches_are_measured_by_themselves(x_TBF: torch.Tensor) -> None:
    layer = stretto.accelerate(nn.GRU(F, H).double())
    wanted = copy.deepcopy(layer)
    stretto.accelerate(wanted, backend="torch")
    packed = pack_padded_sequence(x_TBF, torch.tensor([5, 3, 1]))
    batches = [x_TBF, x_TBF.repeat(4, 1, 1), x_TBF.repeat(1, 4, 1), packed]
    for number, batch in enumerate(batches, start=1):
        found, expected = layer(batch)[1], wanted(batch)[1]
        assert (found - expected).abs().max() <= 1e-10
        assert len(_measured(layer)) == number
    with torch.no_grad():
        layer(x_TBF)
    assert len(_measured(layer)) == len(batches) + 1
    layer.float()(x_TBF.float())
    assert len(_measured(layer)) == len(batches) + 2


def test_measuring_leaves_no_trace(x_TBF: torch.Tensor) -> None:
    layer = stretto.accelerate(nn.GRU(F, H, num_layers=2, dropout=0.5).double())
    seen: list[int] = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    x_TBF.requires_grad_()
    torch.manual_seed(1)
    layer(x_TBF)
    after = torch.get_rng_state()
    assert len(_measured(layer)) == len(seen) == 1
    assert x_TBF.grad is None
    assert all(parameter.grad is None for parameter in layer.parameters())
    torch.manual_seed(1)
    layer(x_TBF)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_measurements_do_not_travel(again: Callable[[nn.Module], nn.Module], x_TBF: torch.Tensor) -> None:
    layer = stretto.accelerate(nn.GRU(F, H).double())
    layer(x_TBF)
    assert _measured(again(layer)) == {}
    assert len(_measured(layer)) == 1
    assert _measured(stretto.accelerate(layer)) == {}


def test_the_choice_can_be_made_anew(x_TBF: torch.Tensor, by_torch: list[int]) -> None:
    layer = stretto.accelerate(nn.GRU(F, H).double(), backend="torch")
    wanted = layer(x_TBF)[0]
    assert len(by_torch) == 1
    stretto.accelerate(layer, backend="cpp")
    assert (layer(x_TBF)[0] - wanted).abs().max() <= 1e-10
    assert len(by_torch) == 1
    assert _measured(layer) == {}


def test_layers_whose_parameters_are_all_frozen_can_be_measured(x_TBF: torch.Tensor) -> None:
    layer = nn.GRU(F, H).double().requires_grad_(False)
    wanted = layer(x_TBF)[0]
    stretto.accelerate(layer)
    assert (layer(x_TBF)[0] - wanted).abs().max() <= 1e-10
    assert len(_measured(layer)) == 1


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_what_has_no_kernel_is_left_to_torch_unless_a_backend_was_named(
    autocast: bool, x_TBF: torch.Tensor, by_torch: list[int]
) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    theirs = nn.GRU(F, H).to(dtype)
    ours = stretto.accelerate(copy.deepcopy(theirs))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        wanted = theirs(x_TBF.to(dtype))[0]
        by_torch.clear()
        found = ours(x_TBF.to(dtype))[0]
        assert torch.equal(found, wanted)
        assert found.dtype == wanted.dtype
        assert len(by_torch) == 1
        for backend in ("cpp", "eager"):
            stretto.accelerate(ours, backend=backend)  # type: ignore[arg-type]
            reason = "autocast is on" if autocast else "bfloat16"
            for call in (lambda: ours(x_TBF.to(dtype)), lambda: ours.ragged(x_TBF.to(dtype), [T] * B)):
                with pytest.raises(StrettoError, match=rf"GRU\(8, 4\).*{backend}.*{reason}") as refused:
                    call()
                assert "backend='auto'" in str(refused.value)
    assert len(by_torch) == 1


def test_a_machine_without_a_compiler_runs_torch_unless_a_backend_was_named(
    x_TBF: torch.Tensor, by_torch: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(backend="torch", reason="there is no compiler")

    monkeypatch.setattr("stretto.nn.torch_layers._layer_program", built)
    layer = stretto.accelerate(nn.GRU(F, H).double())
    layer(x_TBF)
    assert len(by_torch) == 1
    with pytest.raises(StrettoError, match="there is no compiler"):
        stretto.accelerate(layer, backend="cpp")(x_TBF)


def test_auto_without_measuring_takes_the_kernel(x_TBF: torch.Tensor, by_torch: list[int]) -> None:
    layer = stretto.accelerate(nn.GRU(F, H).double(), measure=False)
    layer(x_TBF)
    assert by_torch == []
    assert _measured(layer) == {}
    assert torch.equal(layer(x_TBF)[0], stretto.accelerate(layer, backend="cpp")(x_TBF)[0])


WRONG: dict[str, Callable[[nn.RNNBase], Any]] = {
    "features": lambda layer: layer(torch.zeros(T, B, F + 1)),
    "dimensions": lambda layer: layer(torch.zeros(T, B, F, 1)),
    "precision": lambda layer: layer(torch.zeros(T, B, F, dtype=torch.float64)),
    "state for another batch": lambda layer: layer(torch.zeros(T, B, F), torch.zeros(1, B + 1, H)),
    "state of a single sequence": lambda layer: layer(torch.zeros(T, B, F), torch.zeros(1, H)),
    "state for a single sequence": lambda layer: layer(torch.zeros(T, F), torch.zeros(1, B, H)),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_refused_in_the_words_of_torch(what: str) -> None:
    layer = nn.GRU(F, H)
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        WRONG[what](layer)
    stretto.accelerate(layer, backend="cpp")
    with pytest.raises(theirs.type) as ours:
        WRONG[what](layer)
    assert str(ours.value) == str(theirs.value)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(StrettoError, match="list is not a module"):
        stretto.accelerate([nn.GRU(F, H)])  # type: ignore[type-var]


def test_an_unknown_kernel_is_refused_and_nothing_is_changed() -> None:
    layer = nn.GRU(F, H)
    with pytest.raises(StrettoError, match="'fast'"):
        stretto.accelerate(layer, backend="fast")  # type: ignore[arg-type]
    assert type(layer) is nn.GRU
