"""Gates with trust ratios of their own: against nets whose gates really are separate parameters."""

import copy
import json
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call

import stretto
from stretto.cells import GRU, LSTM, AttentionCell, CoupledLSTM, Elman, LayerNormLSTM, MinimalGatedUnit, ProjectedLSTM
from stretto.large_batch import LargeBatch, make_optimizer
from stretto.large_batch.gates import Gate, parameters_by_gate


class _Own(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.rnn = stretto.RNN(cell, backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rnn(x)[0]
        return y


class _Torch(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rnn(x)[0]
        return y


def _accelerated() -> nn.Module:
    return stretto.accelerate(_Torch(nn.GRU(3, 4, batch_first=True)), backend="torch")


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "LSTM": (lambda: _Torch(nn.LSTM(3, 4, batch_first=True)), 4),
    "two layers, both directions": (lambda: _Torch(nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)), 4),
    "projected": (lambda: _Torch(nn.LSTM(3, 4, proj_size=2, batch_first=True)), 4),
    "GRU": (lambda: _Torch(nn.GRU(3, 4, batch_first=True)), 3),
    "accelerated": (_accelerated, 3),
    "own LSTM": (lambda: _Own(LSTM(3, 4)), 4),
    "own GRU": (lambda: _Own(GRU(3, 4)), 3),
    "own coupled": (lambda: _Own(CoupledLSTM(3, 4)), 3),
    "own minimal": (lambda: _Own(MinimalGatedUnit(3, 4)), 2),
    "own attention": (lambda: _Own(AttentionCell(3, 4, memory_size=2)), 3),
    "own layer norm": (lambda: _Own(LayerNormLSTM(3, 4)), 4),
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


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_the_state_of_gates_goes_through_json_and_tensors(name: str) -> None:
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.LSTM(3, 4)
        recipe = LargeBatch(base_batch_size=4, base_lr=0.1, batch_size=16)
        built = recipe.build(model, optimizer=name, steps_per_epoch=3, gates=True)  # type: ignore[arg-type]
        return model, built.optimizer

    def walk(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(step))
            torch.autograd.backward(model(x)[0].square().sum())
            optimizer.step()

    model, optimizer = made(0)
    walk(model, optimizer, range(3))
    state = optimizer.state_dict()
    groups = json.loads(json.dumps(state["param_groups"], allow_nan=False))
    for group in groups:
        group.update({"betas": tuple(group["betas"])} if "betas" in group else {})
    tensors = {n: {key: torch.as_tensor(v).clone() for key, v in e.items()} for n, e in state["state"].items()}
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    walk(model, optimizer, range(3, 6))
    other, again = made(1)
    other.load_state_dict(weights)
    again.load_state_dict({"state": tensors, "param_groups": groups})
    walk(other, again, range(3, 6))
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key
