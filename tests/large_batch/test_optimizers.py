"""Optimisers by name: against their formulae written out, groups, gates, and their state through JSON and tensors."""

import copy
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.func import functional_call

import stretto
from stretto.cells import (
    GRU,
    LSTM,
    AttentionCell,
    Cell,
    CoupledLSTM,
    Elman,
    LayerNormLSTM,
    MinimalGatedUnit,
    ProjectedLSTM,
)
from stretto.errors import StrettoError
from stretto.large_batch import OptimizerName, make_optimizer, parameters_by_gate
from stretto.large_batch.gates import Gate

NAMES = tuple(name for name in get_args(OptimizerName) if name != "muon")
"""Muon has tests of its own."""


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


@pytest.mark.parametrize("name", NAMES)
def test_biases_and_gains_have_no_decay(name: str) -> None:
    optimizer = make_optimizer(name, _model(), lr=0.1, weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert [{p.dim() for p in group["params"]} for group in optimizer.param_groups] == [{2}, {1}]
    assert len(make_optimizer(name, nn.Linear(2, 2, bias=False), lr=0.1).param_groups) == 1


def test_one_group_decays_all_weights_as_torch_does_if_asked() -> None:
    model, twin = _model(), _model()
    ours = make_optimizer("adamw", model, lr=0.1, weight_decay=0.01, decay_biases=True)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.01, fused=True)
    for update in range(3):
        for net, optimizer in ((model, ours), (twin, plain)):
            _gradients(net, update)
            optimizer.step()
    assert len(ours.param_groups) == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: make_optimizer("adagrad", nn.Linear(2, 2), lr=0.1), r"optimizer='adagrad'.*'lamb'"),
        (lambda: make_optimizer("sgd", [], lr=0.1), "no parameters to train"),
        (lambda: make_optimizer("sgd", nn.Linear(2, 2).requires_grad_(False), lr=0.1), "no parameters to train"),
        (lambda: make_optimizer("sgd", [{"params": []}], lr=0.1), r"dict was given .*groups are made here"),
        (lambda: make_optimizer("sgd", nn.Linear(2, 2), lr=0.1, weight_decay=-1.0), r"weight_decay=-1.0"),
        (lambda: make_optimizer("sgd", nn.Linear(2, 2), lr=float("nan")), r"lr=nan"),
        (lambda: make_optimizer("lamb", nn.Linear(2, 2), lr=-1.0), r"lr=-1.0"),
        (lambda: make_optimizer("adam", nn.LSTM(2, 2), lr=0.1, gates=True), r"gates=True .* 'adam'.*'lars' or 'lamb'"),
        (lambda: make_optimizer("lamb", nn.LSTM(2, 2).parameters(), lr=0.1, gates=True), r"Give the model"),
        (lambda: make_optimizer("lars", [nn.Parameter(torch.zeros(2, 2) * 1j)], lr=0.1), r"'lars' .*complex64"),
    ],
)
def test_bad_input_is_named(call: Any, words: str) -> None:
    with pytest.raises(StrettoError, match=words):
        call()


class _Net(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = stretto.RNN(rnn, backend="eager") if isinstance(rnn, Cell) else rnn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rnn(x)[0]
        return y


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "LSTM": (lambda: _Net(nn.LSTM(3, 4, batch_first=True)), 4),
    "two layers, both directions": (lambda: _Net(nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)), 4),
    "projected": (lambda: _Net(nn.LSTM(3, 4, proj_size=2, batch_first=True)), 4),
    "GRU": (lambda: _Net(nn.GRU(3, 4, batch_first=True)), 3),
    "accelerated": (lambda: stretto.accelerate(_Net(nn.GRU(3, 4, batch_first=True)), backend="torch"), 3),
    "own LSTM": (lambda: _Net(LSTM(3, 4)), 4),
    "own GRU": (lambda: _Net(GRU(3, 4)), 3),
    "own coupled": (lambda: _Net(CoupledLSTM(3, 4)), 3),
    "own minimal": (lambda: _Net(MinimalGatedUnit(3, 4)), 2),
    "own attention": (lambda: _Net(AttentionCell(3, 4, memory_size=2)), 3),
    "own layer norm": (lambda: _Net(LayerNormLSTM(3, 4)), 4),
}


@pytest.mark.parametrize("name", ["lars", "lamb"])
@pytest.mark.parametrize("kind", MODELS)
def test_updates_are_those_of_separate_parameters(kind: str, name: str) -> None:
    torch.manual_seed(0)
    make, num_gates = MODELS[kind]
    model = make().double()
    is_packed = {key: value.dim() == 2 and len(value) == num_gates * 4 for key, value in model.named_parameters()}
    assert any(is_packed.values())
    apart = {
        key: [nn.Parameter(part.detach().clone()) for part in value.chunk(num_gates if is_packed[key] else 1)]
        for key, value in model.named_parameters()
    }
    listed = [part for parts in apart.values() for part in parts]
    reference = make_optimizer(name, listed, lr=0.1, weight_decay=0.01)
    optimizer = make_optimizer(name, model, lr=0.1, weight_decay=0.01, gates=True)
    whole = copy.deepcopy(model)
    plain = make_optimizer(name, whole, lr=0.1, weight_decay=0.01)
    for _ in range(4):
        x = torch.randn(2, 5, 3, dtype=torch.float64)
        for net, its in ((model, optimizer), (whole, plain)):
            its.zero_grad()
            torch.autograd.backward(net(x).square().sum())
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            its.step()
        reference.zero_grad()
        joined = {key: torch.cat(list(parts)) for key, parts in apart.items()}
        torch.autograd.backward(functional_call(model, joined, (x,)).square().sum())
        nn.utils.clip_grad_norm_(listed, 1.0)
        reference.step()
    for key, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), torch.cat(list(apart[key])).detach(), rtol=1e-12, atol=1e-12)
    # It matters: as one tensor the same weights end elsewhere.
    other = dict(whole.named_parameters())
    assert any((value - other[key]).abs().max() > 1e-6 for key, value in model.named_parameters() if is_packed[key])


def test_what_holds_gates_is_taken_apart_and_nothing_else() -> None:
    lstm, gru = nn.LSTM(3, 4, proj_size=2), nn.GRUCell(3, 5)
    own = ProjectedLSTM(3, 4, proj_size=2)
    model = nn.ModuleList([lstm, nn.RNN(3, 4), nn.Linear(8, 16), gru, Elman(3, 4), own])
    found = parameters_by_gate(model)
    gates = [p for p in found if isinstance(p, Gate)]
    assert len(gates) == 4 + 4 + 3 + 3 + 4 + 4
    packed = [lstm.weight_ih_l0, lstm.weight_hh_l0, gru.weight_ih, gru.weight_hh, own.weight_ih, own.weight_hh]
    assert {id(gate.packed) for gate in gates} == {id(p) for p in packed}
    assert sum(p.numel() for p in found) == sum(p.numel() for p in model.parameters())


def test_a_gate_is_its_rows_in_memory_and_gradient() -> None:
    model = nn.GRU(3, 4)
    gates = [p for p in parameters_by_gate(model) if isinstance(p, Gate)]
    weight = model.weight_ih_l0
    assert all(gate.grad is None for gate in gates)
    torch.autograd.backward(model(torch.randn(2, 1, 3))[0].sum())
    assert weight.grad is not None
    assert gates[1].grad is not None
    assert torch.equal(gates[1].grad, weight.grad[4:8])
    optimizer = torch.optim.SGD(gates, lr=0.1)
    version = weight._version
    before = weight.detach().clone()
    optimizer.step()
    # Autograd sees that the packed weight changed.
    assert weight._version > version
    torch.testing.assert_close(weight.detach(), before - 0.1 * weight.grad)
    optimizer.zero_grad(set_to_none=False)
    assert not weight.grad.any()
    gates[2].grad = torch.ones(4, 3)
    assert weight.grad.sum() == 12
    optimizer.zero_grad()
    assert weight.grad is None
    assert model.state_dict().keys() == nn.GRU(3, 4).state_dict().keys()


def test_gates_follow_a_model_that_is_moved_and_are_copied_with_it() -> None:
    model = nn.GRU(3, 4)
    optimizer = make_optimizer("lamb", model, lr=0.1, gates=True)
    model.double()
    torch.autograd.backward(model(torch.randn(2, 1, 3, dtype=torch.float64))[0].sum())
    before = model.weight_hh_l0.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight_hh_l0, before)
    twin, gates = copy.deepcopy((model, [p for p in parameters_by_gate(model) if isinstance(p, Gate)]))
    assert gates[0].packed is twin.weight_ih_l0
    with torch.no_grad():
        gates[0].fill_(7.0)
    assert (twin.weight_ih_l0[:4] == 7.0).all()
    assert not (model.weight_ih_l0[:4] == 7.0).any()


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov"])
def test_sparse_gradients_make_the_updates_of_dense_ones(name: str) -> None:
    ends = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 2)).double()
        optimizer = make_optimizer(name, model, lr=0.1)
        for token in (1, 3, 1):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.tensor([token, token, 2])).square().sum())
            optimizer.step()
        ends.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "weight_decay", "words"),
    [
        *(
            (name, 0.0, rf"embedding '1' are sparse, which '{name}' .*sparse=False")
            for name in ("adam", "lamb", "muon")
        ),
        ("sgd", 0.1, r"'sgd' with a weight decay of 0\.1 does not take"),
    ],
)
def test_sparse_gradients_are_refused_before_any_update(name: str, weight_decay: float, words: str) -> None:
    model = nn.ModuleList([nn.GRU(2, 3), nn.Embedding(4, 2, sparse=True)])
    with pytest.raises(StrettoError, match=words):
        make_optimizer(name, model, lr=0.1, weight_decay=weight_decay)
    model[1].requires_grad_(False)
    make_optimizer(name, model, lr=0.1, weight_decay=weight_decay)
