"""Optimisers by name: against their formulae written out, groups, and their state through JSON and tensors."""

import json
import math
from typing import Any, get_args

import pytest
import torch
from torch import nn

from stretto import extras
from stretto.errors import StrettoError
from stretto.large_batch import LargeBatch, OptimizerName, make_optimizer
from stretto.large_batch.optimizers import _lamb

NAMES = get_args(OptimizerName)


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2, bias=False)).double()


def _gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def _reference(name: str, model: nn.Module, *, steps: int, lr: float, decay: float) -> list[torch.Tensor]:
    """The papers' formulae, a tensor at a time."""
    weights = [p.detach().clone() for p in model.parameters()]
    first = [torch.zeros_like(w) for w in weights]
    second = [torch.zeros_like(w) for w in weights]
    for step in range(1, steps + 1):
        _gradients(model, step)
        for w, m, v, p in zip(weights, first, second, model.parameters(), strict=True):
            assert p.grad is not None
            g, is_matrix = p.grad.clone(), w.dim() >= 2
            wd = decay if is_matrix else 0.0
            if name in ("sgd", "momentum", "nesterov"):
                g = g + wd * w
                if name != "sgd":
                    m.mul_(0.9).add_(g)
                    g = m if name == "momentum" else g + 0.9 * m
                w.sub_(lr * g)
            elif name == "lars":
                if is_matrix:
                    g = (g + wd * w) * 0.001 * w.norm() / (g.norm() + wd * w.norm())
                m.mul_(0.9).add_(g)
                w.sub_(lr * m)
            else:
                g = g + wd * w if name == "adam" else g
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                if name == "lamb" and is_matrix:
                    r = m / (v.sqrt() + 1e-6) + wd * w
                    w.sub_(lr * w.norm() / (r.norm() + 1e-6) * r)
                else:
                    if name == "adamw":
                        w.mul_(1 - lr * wd)
                    # LAMB's small number is added to the root before its correction.
                    small = 1e-6 / math.sqrt(1 - 0.999**step) if name == "lamb" else 1e-8
                    root = (v / (1 - 0.999**step)).sqrt()
                    w.sub_(lr * (m / (1 - 0.9**step)) / (root + small))
    return weights


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_updates_are_those_of_the_papers(name: str, decay: float) -> None:
    model = _model()
    expected = _reference(name, model, steps=5, lr=0.05, decay=decay)
    optimizer = make_optimizer(name, model.parameters(), lr=0.05, weight_decay=decay)
    for step in range(1, 6):
        _gradients(model, step)
        optimizer.step()
    for parameter, weight in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), weight, rtol=1e-10, atol=1e-12)


def test_lamb_moves_a_matrix_by_the_rate_times_its_norm_from_the_first_step_on_and_a_bias_by_the_rate() -> None:
    model = nn.Linear(30, 40).double()
    with torch.no_grad():
        model.weight.mul_(100)
    optimizer = make_optimizer("lamb", model, lr=0.01)
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        _gradients(model, 0)
        optimizer.step()
        moved = [float((p.detach() - b).norm()) for p, b in zip(model.parameters(), before, strict=True)]
        assert moved[0] == pytest.approx(0.01 * float(before[0].norm()), rel=1e-4), step
        assert moved[1] == pytest.approx(0.01 * math.sqrt(40), rel=1e-3), step
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]


@pytest.mark.parametrize("name", NAMES)
def test_biases_and_gains_have_no_decay(name: str) -> None:
    optimizer = make_optimizer(name, _model(), lr=0.1, weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert [{p.dim() for p in group["params"]} for group in optimizer.param_groups] == [{2}, {1}]
    assert len(make_optimizer(name, nn.Linear(2, 2, bias=False), lr=0.1).param_groups) == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_state_goes_through_json_and_tensors(name: Any) -> None:
    def made(seed: int) -> tuple[nn.Module, Any]:
        model = _model(seed)
        recipe = LargeBatch(base_batch_size=4, base_lr=0.01, base_warmup_epochs=0.5, batch_size=16, epochs=9)
        return model, recipe.build(model, optimizer=name, decay="cosine", steps_per_epoch=3, weight_decay=0.1)

    def walk(model: nn.Module, built: Any, steps: range) -> None:
        for step in steps:
            _gradients(model, step)
            built.optimizer.step()
            built.schedule.step()
            built.optimizer.zero_grad()

    model, built = made(0)
    walk(model, built, range(4))
    state = built.optimizer.state_dict()
    groups = json.loads(json.dumps(state["param_groups"], allow_nan=False))
    tensors = {
        number: {key: torch.as_tensor(value).clone() for key, value in entries.items()}
        for number, entries in state["state"].items()
    }
    schedule = json.loads(json.dumps(built.schedule.state_dict(), allow_nan=False))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    walk(model, built, range(4, 9))

    other, again = made(1)
    other.load_state_dict(weights)
    for group in groups:
        group.update({"betas": tuple(group["betas"])} if "betas" in group else {})
    again.optimizer.load_state_dict({"state": tensors, "param_groups": groups})
    again.schedule.load_state_dict(schedule)
    walk(other, again, range(4, 9))
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: make_optimizer("adagrad", nn.Linear(2, 2), lr=0.1), r"no optimiser 'adagrad'.*'lamb'"),
        (lambda: make_optimizer("sgd", [], lr=0.1), "no parameters to train"),
        (lambda: make_optimizer("sgd", nn.Linear(2, 2).requires_grad_(False), lr=0.1), "no parameters to train"),
        (lambda: make_optimizer("sgd", [{"params": []}], lr=0.1), r"dict was given .*groups are made here"),
        (lambda: make_optimizer("sgd", nn.Linear(2, 2), lr=0.1, weight_decay=-1.0), r"weight_decay is -1.0"),
        (lambda: make_optimizer("adam", nn.LSTM(2, 2), lr=0.1, gates=True), r"gates .* 'adam'.*'lars' or 'lamb'"),
        (lambda: make_optimizer("lamb", nn.LSTM(2, 2).parameters(), lr=0.1, gates=True), r"Give the model"),
        (lambda: make_optimizer("lars", [nn.Parameter(torch.zeros(2, 2) * 1j)], lr=0.1), r"'lars' .*complex64"),
    ],
)
def test_bad_input_is_named(call: Any, words: str) -> None:
    with pytest.raises(StrettoError, match=words):
        call()


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_missing_package_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> Any:
        raise ImportError(f"No module named {module!r}")

    monkeypatch.setitem(extras.EXTRA_OF, "pytorch_optimizer", "tuning")
    monkeypatch.setattr(extras.importlib, "import_module", missing)
    _lamb.cache_clear()
    with pytest.raises(StrettoError, match=r"'pytorch_optimizer'.*stretto\[tuning\]"):
        make_optimizer(name, nn.Linear(2, 2), lr=0.1)
    make_optimizer("adam", nn.Linear(2, 2), lr=0.1)
