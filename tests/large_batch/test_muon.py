"""Muon: against singular values and torch's Adam, a gate at a time; what takes which rule; its state; bad input."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stretto
from stretto.cells import AttentionCell, LayerNormLSTM, MinimalGatedUnit, ProjectedLSTM
from stretto.errors import StrettoError
from stretto.large_batch import Muon, SplitByMicroBatch, make_optimizer, orthogonalise, squared_norm
from stretto.large_batch.muon import POLYNOMIALS


def _by_singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """What `orthogonalise` makes of a matrix, from its singular values."""
    left, sizes, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    sizes = sizes / sizes.pow(8).sum().pow(1 / 8).clamp(min=1e-300)
    for a, b, c in POLYNOMIALS:
        sizes = a * sizes + b * sizes**3 + c * sizes**5
    return (left * sizes) @ right


@settings(max_examples=50)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(0, 20)),
    seed=st.integers(0, 9999),
    spread=st.floats(0, 4),
    log_size=st.integers(-12, 12),
)
def test_a_stack_is_made_orthogonal_matrix_by_matrix(
    shape: tuple[int, int, int], seed: int, spread: float, log_size: int
) -> None:
    torch.manual_seed(seed)
    count, rows, more = shape
    stack = torch.randn(count, rows, rows + more, dtype=torch.float64)
    stack *= 10.0**log_size * torch.logspace(0, -spread, rows, dtype=torch.float64)[:, None]
    expected = torch.stack([_by_singular_values(matrix) for matrix in stack])
    torch.testing.assert_close(orthogonalise(stack), expected, rtol=1e-10, atol=1e-10)
    single = orthogonalise(stack.float())
    assert single.dtype == torch.float32
    # Small singular values are multiplied by hundreds, and so is their rounding.
    torch.testing.assert_close(single.double(), expected, rtol=1e-5, atol=2e-4)


def test_singular_values_end_near_one_unless_they_are_tiny() -> None:
    sizes = torch.logspace(0, -6, 200, dtype=torch.float64)
    raised = orthogonalise(torch.diag(sizes)[None])[0].diagonal()
    # The bound of the largest is at most this many times larger.
    slack = float(sizes.pow(8).sum().pow(1 / 8))
    assert (raised[sizes > 0.01 * slack] - 1).abs().max() < 0.27
    assert (raised > sizes.clamp(max=0.73)).all()
    assert (raised < 1.27).all()
    assert not orthogonalise(torch.zeros(2, 3, 4)).any()
    assert orthogonalise(torch.ones(2, 0, 4)).shape == (2, 0, 4)


class _Own(stretto.Cell):
    """A cell of the user's own, whose matrices are one matrix each."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.inward, self.around = nn.Linear(input_size, 2 * hidden_size), nn.Linear(hidden_size, 2 * hidden_size)

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        new, gate = (self.inward(x_t) + self.around(state)).chunk(2, dim=1)
        state = torch.lerp(state, new.tanh(), gate.sigmoid())
        return state, state


class _Net(nn.Module):
    def __init__(self, rnn: nn.Module, size: int = 4) -> None:
        super().__init__()
        self.embed, self.rnn, self.norm, self.read = nn.Embedding(7, 3), rnn, nn.LayerNorm(size), nn.Linear(size, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.read(self.norm(self.rnn(self.embed(tokens))[0]))
        return scores


def _rnn(cell: stretto.Cell) -> nn.Module:
    return stretto.RNN(cell, backend="eager")


FULL_RATE = ("embed.weight", "read.weight")
"""What Adam updates at the rate itself, whatever its share."""
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "LSTM": (
        lambda: _Net(nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True), 8),
        {f"rnn.weight_{i}h_l{n}{back}": 4 for i in "ih" for n in range(2) for back in ("", "_reverse")},
    ),
    "projected": (
        lambda: _Net(nn.LSTM(3, 4, batch_first=True, proj_size=2), 2),
        {"rnn.weight_ih_l0": 4, "rnn.weight_hh_l0": 4, "rnn.weight_hr_l0": 1},
    ),
    "accelerated": (
        lambda: stretto.accelerate(_Net(nn.GRU(3, 4, batch_first=True)), backend="torch"),
        {"rnn.weight_ih_l0": 3, "rnn.weight_hh_l0": 3},
    ),
    "one unit": (lambda: _Net(nn.RNN(3, 1, batch_first=True), 1), {"rnn.weight_ih_l0": 1, "rnn.weight_hh_l0": 1}),
    "own gates": (
        lambda: _Net(_rnn(MinimalGatedUnit(3, 4))),
        {"rnn.cells.0.weight_ih": 2, "rnn.cells.0.weight_hh": 2},
    ),
    "own projection": (
        lambda: _Net(_rnn(ProjectedLSTM(3, 4, proj_size=2)), 2),
        {"rnn.cells.0.weight_ih": 4, "rnn.cells.0.weight_hh": 4, "rnn.cells.0.weight_hr": 1},
    ),
    "own layer norm": (
        lambda: _Net(_rnn(LayerNormLSTM(3, 4))),
        {"rnn.cells.0.weight_ih": 4, "rnn.cells.0.weight_hh": 4},
    ),
    "user's own": (lambda: _Net(_rnn(_Own(3, 4))), {"rnn.cells.0.inward.weight": 1, "rnn.cells.0.around.weight": 1}),
}


def _reference(
    before: dict[str, torch.Tensor],
    gradients: list[dict[str, torch.Tensor]],
    gates: dict[str, int],
    *,
    adam_rates: dict[str, float],
) -> Any:
    """Updates written out: a gate at a time by its singular values, and torch's Adam for all else."""
    weights = {name: nn.Parameter(weight.clone()) for name, weight in before.items()}
    momenta = {name: torch.zeros_like(weight) for name, weight in before.items()}
    others = [
        {"params": [w], "weight_decay": 0.1 * (w.dim() >= 2), "lr": adam_rates[n]}
        for n, w in weights.items()
        if n not in gates
    ]
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95))
    for given_ in gradients:
        for name, weight in weights.items():
            weight.grad = given_[name]
        adam.step()
        for name, count in gates.items():
            momenta[name] = 0.95 * momenta[name] + 0.05 * given_[name]
            ahead = 0.05 * given_[name] + 0.95 * momenta[name]
            for gate, direction in zip(weights[name].data.chunk(count), ahead.chunk(count), strict=True):
                move = 0.2 * math.sqrt(max(direction.shape)) * _by_singular_values(direction)
                gate.mul_(1 - 0.02 * 0.1).sub_(0.02 * move)
    return weights


@pytest.mark.parametrize("share", [1.0, 0.1])
@pytest.mark.parametrize("kind", MODELS)
def test_updates_are_those_of_each_gate_alone(kind: str, share: float) -> None:
    torch.manual_seed(0)
    make, gates = MODELS[kind]
    model = make().double()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer("muon", model, lr=0.02, weight_decay=0.1, adam_share=share)
    gradients = []
    for _ in range(4):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.randint(0, 7, (3, 5))).square().sum())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    rates = {name: 0.02 if name in FULL_RATE else share * 0.02 for name in before}
    expected = _reference(before, gradients, gates, adam_rates=rates)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name].detach(), rtol=1e-9, atol=1e-10, msg=name)


def test_an_update_has_the_size_of_adams() -> None:
    model = nn.LSTM(30, 40)
    before = copy.deepcopy(model)
    optimizer = make_optimizer("muon", model, lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for name, weight in model.named_parameters():
        moved = (weight - before.get_parameter(name)).square().mean().sqrt().item()
        assert moved == pytest.approx(0.01 if weight.dim() == 1 else 0.2 * 0.01, rel=0.3), name


def test_explain_says_what_each_parameter_is_and_its_rule() -> None:
    cell = AttentionCell(3, 4, memory_size=2)
    model = nn.ModuleDict(
        {"embed": nn.Embedding(7, 3), "conv": nn.Conv1d(3, 3, 2), "rnn": _rnn(cell), "gru": nn.GRU(4, 6)}
    )
    model["norm"], model["read"] = nn.LayerNorm(6), nn.Linear(6, 7)
    model["read"].weight = nn.Parameter(torch.ones(7, 6))
    model.register_parameter("scale", nn.Parameter(torch.ones(2, 2, 2)))
    optimizer = make_optimizer("muon", model, lr=0.01)
    assert isinstance(optimizer, Muon)
    header, *lines = optimizer.explain().splitlines()
    assert header.split() == ["parameter", "shape", "kind", "rule"]
    table = {line.split("  ")[0]: [part.strip() for part in line.split("  ")[1:] if part] for line in lines}
    assert table.keys() == dict(model.named_parameters()).keys()
    expected = {
        "embed.weight": ["7 x 3", "embedding", "Adam"],
        "conv.weight": ["3 x 3 x 2", "convolution", "Adam"],
        "conv.bias": ["3", "bias", "Adam"],
        "rnn.cells.0.weight_hh": ["12 x 4", "recurrent", "Muon, 3 gates of 4 x 4"],
        "gru.weight_ih_l0": ["18 x 4", "input", "Muon, 3 gates of 6 x 4"],
        "gru.bias_hh_l0": ["18", "bias", "Adam"],
        "norm.weight": ["6", "gain", "Adam"],
        "read.weight": ["7 x 6", "output", "Adam"],
        "scale": ["2 x 2 x 2", "other", "Adam"],
    }
    assert {name: table[name] for name in expected} == expected


def test_what_has_a_share_of_the_rate_is_decided_by_what_it_is() -> None:
    def kinds(model: nn.Module) -> dict[str, tuple[str, str]]:
        return {name: (kind, rule) for name, _, kind, rule in Muon(model, lr=0.1, adam_share=0.1).rules()}

    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "before": nn.Linear(3, 4), "rnn": nn.GRU(4, 5)})
    tied = kinds(model)
    assert tied["embed.weight"] == ("tied", "Adam at 0.1 of the rate")
    assert tied["before.weight"] == ("linear", "Adam at 0.1 of the rate")
    model["read"] = nn.Linear(5, 7)
    found = kinds(model)
    assert found["embed.weight"] == ("embedding", "Adam")
    assert found["read.weight"] == ("output", "Adam")
    assert found["rnn.weight_hh_l0"] == ("recurrent", "Muon, 3 gates of 5 x 5")
    for name in ("before.weight", "before.bias", "rnn.bias_ih_l0", "read.bias"):
        assert found[name][1] == "Adam at 0.1 of the rate", name
    model["read"].weight = nn.Parameter(torch.ones(7, 5), requires_grad=False)
    assert kinds(model)["embed.weight"][0] == "embedding"
    # Tied as usual: one parameter, which is found where it comes first.
    also_tied = nn.ModuleDict({"embed": nn.Embedding(7, 5), "rnn": nn.GRU(5, 5), "read": nn.Linear(5, 7)})
    also_tied["read"].weight = also_tied["embed"].weight
    assert kinds(also_tied)["embed.weight"] == ("tied", "Adam at 0.1 of the rate")


def test_what_was_saved_without_shares_goes_on_with_the_whole_rate() -> None:
    model = nn.GRU(2, 3)
    optimizer = Muon(model, lr=0.1, adam_share=0.5)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["lr_share"]
    optimizer.load_state_dict(state)
    before = model.bias_ih_l0.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.bias_ih_l0.detach(), before - 0.1)


def test_what_is_frozen_stays() -> None:
    torch.manual_seed(0)
    model = _Net(nn.GRU(3, 4, batch_first=True))
    model.embed.requires_grad_(False)
    weight = model.rnn.get_parameter("weight_hh_l0")
    weight.register_hook(lambda gradient: torch.cat([torch.zeros(4, 4), gradient[4:]]))
    before = copy.deepcopy(model)
    optimizer = make_optimizer("muon", model, lr=0.1)
    split = SplitByMicroBatch(model.parameters(), optimizer=optimizer)
    for update in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            torch.autograd.backward(model(torch.randint(0, 7, (3, 5))).square().sum())
            split.add(3)
        norms = split.take()
        assert norms is not None
        assert math.isfinite(norms.square_of_mean) is (update > 0)
        optimizer.step()
    assert torch.equal(model.embed.weight, before.embed.weight)
    assert torch.equal(weight[:4], before.rnn.get_parameter("weight_hh_l0")[:4])
    assert not torch.equal(weight[4:], before.rnn.get_parameter("weight_hh_l0")[4:])


def test_noise_is_measured_against_the_momentum_of_each_gate() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(3, 4).double()
    optimizer = make_optimizer("muon", model, lr=0.01)
    torch.autograd.backward(model(torch.randn(5, 7, 3).double())[0].square().mean())
    assert math.isnan(squared_norm(model.parameters(), optimizer))
    optimizer.step()
    wanted = 0.0
    for parameter in model.parameters():
        assert parameter.grad is not None
        state = optimizer.state[parameter]
        if parameter.dim() == 1:
            wanted += float((parameter.grad / ((state["exp_avg_sq"] / 0.05).sqrt() + 1e-8)).square().sum())
        else:
            for gate, momentum in zip(parameter.grad.chunk(4), state["momentum_buffer"].chunk(4), strict=True):
                wanted += float(gate.square().sum() / momentum.square().mean())
    assert squared_norm(model.parameters(), optimizer) == pytest.approx(wanted, rel=1e-9)


def test_a_saved_optimiser_goes_on_to_the_bit(tmp_path: Path) -> None:
    def updates(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.randint(0, 7, (3, 5))).square().sum())
            optimizer.step()

    torch.manual_seed(0)
    model = _Net(nn.LSTM(3, 4, batch_first=True))
    optimizer = make_optimizer("muon", model, lr=0.02, weight_decay=0.1)
    updates(model, optimizer, 3)
    torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()], tmp_path / "saved.pt")
    copied, its_optimizer = copy.deepcopy((model, optimizer))
    torch.manual_seed(1)
    updates(model, optimizer, 3)
    torch.manual_seed(1)
    updates(copied, its_optimizer, 3)
    weights, state, _ = torch.load(tmp_path / "saved.pt")
    restored = _Net(nn.LSTM(3, 4, batch_first=True))
    again = make_optimizer("muon", restored, lr=0.5)
    restored.load_state_dict(weights)
    again.load_state_dict(state)
    torch.manual_seed(1)
    updates(restored, again, 3)
    for name, weight in model.named_parameters():
        assert torch.equal(restored.get_parameter(name), weight), name
        assert torch.equal(copied.get_parameter(name), weight), name


def test_half_precision_is_made_orthogonal_in_single() -> None:
    torch.manual_seed(0)
    model = nn.GRU(5, 6).bfloat16()
    before = copy.deepcopy(model)
    optimizer = make_optimizer("muon", model, lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            assert weight.grad is not None
            moves = [_by_singular_values(gradient.float()) for gradient in weight.grad.chunk(3)]
            expected = before.get_parameter(name) - 0.5 * 0.2 * math.sqrt(6) * torch.cat(moves)
            torch.testing.assert_close(weight.detach().double(), expected, rtol=0.02, atol=0.02)


def test_one_cycle_leaves_its_momenta_alone() -> None:
    model = nn.GRU(2, 3)
    recipe = stretto.LargeBatch(base_batch_size=8, base_lr=0.01, base_warmup_epochs=0.5, batch_size=8, epochs=4)
    optimizer, schedule = recipe.build(model, optimizer="muon", decay="one-cycle", updates_per_epoch=5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(8):
        optimizer.step()
        schedule.step()
    assert {group.get("momentum", 0.95) for group in optimizer.param_groups} == {0.95}
    assert {tuple(group.get("betas", (0.9, 0.95))) for group in optimizer.param_groups} == {(0.9, 0.95)}


def _sparse() -> None:
    model = nn.ModuleList([nn.GRU(2, 3), nn.Embedding(4, 2, sparse=True)])
    optimizer = Muon(model, lr=0.1)
    torch.autograd.backward(model[0](model[1](torch.tensor([1, 2])))[0].sum())
    before = copy.deepcopy(model.state_dict())
    try:
        optimizer.step()
    finally:
        # Nothing was updated before the error.
        assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: make_optimizer("muon", nn.LSTM(2, 2).parameters(), lr=0.1), r"parameters.*Give the model"),
        (lambda: make_optimizer("muon", nn.LSTM(2, 2), lr=0.1, gates=True), r"gates=True.*always"),
        (lambda: make_optimizer("muon", nn.LSTM(2, 2), lr=0.1, decay_biases=True), r"decay_biases=True.*always"),
        (lambda: make_optimizer("muon", nn.Linear(2, 2), lr=0.1), r"no matrix of a recurrent layer .* Linear.*'adam'"),
        (lambda: make_optimizer("muon", nn.GRU(2, 2).requires_grad_(False), lr=0.1), r"no matrix of a recurrent layer"),
        (lambda: make_optimizer("muon", nn.RNN(2, 2, dtype=torch.complex64), lr=0.1), r"weight_ih_l0 of .*complex64"),
        (lambda: Muon(nn.GRU(2, 2), lr=-0.1), r"lr=-0.1"),
        (lambda: Muon(nn.GRU(2, 2), lr=math.nan), r"lr=nan"),
        (lambda: Muon(nn.GRU(2, 2), lr=0.1, adam_share=0.0), r"adam_share=0.0"),
        (lambda: make_optimizer("adam", nn.GRU(2, 2), lr=0.1, adam_share=0.5), r"adam_share=0.5 .*'adam'.*'muon'"),
        (lambda: Muon(nn.GRU(2, 2), lr=0.1, weight_decay=-1.0), r"weight_decay=-1.0"),
        (lambda: Muon(nn.GRU(2, 2), lr=0.1, momentum=1.0), r"momentum=1.0"),
        (lambda: Muon(nn.GRU(2, 2), lr=0.1, betas=(0.9, 1.0)), r"betas\[1\]"),
        (_sparse, r"sparse gradient of 1.weight.*sparse=False"),
    ],
)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(StrettoError, match=words):
        call()
