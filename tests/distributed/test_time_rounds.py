"""How many rounds time over ranks takes and how much is walked twice; what is no number; gradients in other ways.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from worlds import run_world

import stretto
from stretto.distributed import TimeMesh, World, scale_loss
from stretto.solvers.ranks.leg import gap, size

F, H = 3, 8


def _net(memory: float) -> stretto.RNN:
    torch.manual_seed(1)
    net = stretto.RNN(stretto.cells.GRU(F, H).double(), backend="eager")
    with torch.no_grad():
        net.cells[0].weight_hh.mul_(memory)  # type: ignore[operator]
    return net


def _told(mesh: TimeMesh, *, memory: float, x_BTF: torch.Tensor) -> dict[str, Any]:
    """How it went, and the largest error of outputs and of gradients of the weights."""
    serial, net = _net(memory), _net(memory)
    net.solver = mesh.solver(tolerance=1e-12, piece=8)
    lengths = [x_BTF.shape[1]] * len(x_BTF)
    block = mesh.block(x_BTF.shape[1], lengths)
    y_BTH, _ = net(block.of(x_BTF), lengths=block.lengths)
    expected_BTH, _ = serial(x_BTF)
    y_BTH.square().sum().backward()
    expected_BTH.square().sum().backward()
    worst = float((y_BTH - block.of(expected_BTH)).detach().abs().max())
    weight, expected = net.cells[0].weight_hh.grad, serial.cells[0].weight_hh.grad
    assert isinstance(weight, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    distributed.all_reduce(weight, group=mesh.time.group)
    solution = net.solution
    return {
        "worst": worst,
        "weights": float((weight - expected).abs().max() / expected.abs().max()),
        "iterations": solution.iterations,
        "backward": solution.backward_iterations,
        "work": solution.work,
        "reason": solution.reason,
        "fell_back": solution.fell_back,
    }


def _rounds(world: World) -> dict[str, Any]:
    mesh = TimeMesh(time=world.size)
    x_BTF = torch.randn(2, 240, F, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    forgets = _told(mesh, memory=0.1, x_BTF=x_BTF)
    remembers = _told(mesh, memory=8.0, x_BTF=x_BTF[:, :60])
    return {"forgets": forgets, "remembers": remembers}


def test_a_net_that_forgets_walks_little_again_and_one_that_remembers_all(tmp_path: Path) -> None:
    ranks = run_world(3, _rounds, tmp_path)
    for rank, told in enumerate(ranks):
        assert isinstance(told, dict), told
        forgets, remembers = told["forgets"], told["remembers"]
        assert forgets["worst"] <= 1e-11
        assert forgets["weights"] <= 1e-11
        assert forgets["iterations"] == 2
        assert forgets["backward"] == 2
        assert forgets["work"] == 1.0 if rank == 0 else 1.0 < forgets["work"] <= 1.8
        assert forgets["reason"] == "3 ranks of 80 steps"
        assert remembers["worst"] <= 1e-10
        assert remembers["weights"] <= 1e-10
        assert remembers["iterations"] == 3
        assert remembers["work"] == rank + 1.0
        assert not remembers["fell_back"]


class Started(stretto.Cell):
    """A cell with an initial state that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.start_F = torch.nn.Parameter(torch.randn(F))
        self.weight_FF = torch.nn.Parameter(torch.randn(F, F) / 3)

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return self.start_F.expand(batch_size, F)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BF = torch.tanh(x_t + state @ self.weight_FF)
        return h_BF, h_BF


class Labeller(torch.nn.Module):
    """A net with a layer above it, which sees outputs of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = stretto.RNN([Started(), Started()], num_layers=2, backend="eager")
        self.above = torch.nn.Linear(F, 1)

    def forward(self, x_BTF: torch.Tensor, **words: Any) -> torch.Tensor:
        y_BTF, _ = self.rnn(x_BTF, **words)
        return self.above(y_BTF).square()  # type: ignore[no-any-return]


def _one_step(world: World, time: int, lengths: list[int]) -> dict[str, Any]:
    """One step of an optimiser on all ranks, each with its share of the sequences and its block of steps, and alone."""
    mesh = TimeMesh(time=time)
    torch.manual_seed(3)
    alone = Labeller().double()
    shared = copy.deepcopy(alone)
    shared.rnn.solver = mesh.solver(tolerance=1e-13)
    x_BTF = torch.randn(len(lengths), max(lengths), F, dtype=torch.float64)
    replica = DistributedDataParallel(shared)
    own = list(range(mesh.data.rank, len(lengths), mesh.data.size))
    block = mesh.block(max(lengths), [lengths[n] for n in own])
    mask_BT1 = (torch.arange(len(block.steps)) < block.lengths[:, None])[..., None]
    y_BT1 = replica(block.of(x_BTF[own]), lengths=block.lengths, sample_ids=block.sample_ids)
    scale_loss((y_BT1 * mask_BT1).sum(), int(block.lengths.sum())).backward()
    y_BT1 = alone(x_BTF, lengths=lengths)
    mask_BT1 = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])[..., None]
    ((y_BT1 * mask_BT1).sum() / sum(lengths)).backward()
    errors = {}
    for net in (shared, alone):
        torch.optim.SGD(net.parameters(), lr=0.5).step()
    for (name, one), other in zip(shared.named_parameters(), alone.parameters(), strict=True):
        assert other.grad is not None
        assert float(other.grad.abs().max()) > 0
        errors[name] = float((one - other).detach().abs().max())
    assert mesh.devices is not None
    return {
        "errors": errors,
        "names": mesh.devices.mesh_dim_names,
        "grid": mesh.devices.mesh.tolist(),
        "place": [mesh.data.rank, mesh.time.rank],
    }


@pytest.mark.parametrize(
    ("time", "size", "lengths"), [(2, 4, [19, 4, 11, 7]), (3, 3, [2, 1, 0]), (1, 2, [5, 3])], ids=str
)
def test_one_step_of_an_optimiser_is_that_of_one_rank(time: int, size: int, lengths: list[int], tmp_path: Path) -> None:
    for rank, told in enumerate(run_world(size, _one_step, tmp_path, time, lengths)):
        assert isinstance(told, dict), told
        assert max(told["errors"].values()) <= 1e-12, told
        assert told["names"] == ["data", "time"]
        assert told["grid"] == torch.arange(size).reshape(-1, time).tolist()
        assert told["place"] == [rank // time, rank % time]


def _odd_ways(world: World) -> dict[str, bool]:
    mesh = TimeMesh(time=world.size)
    serial, net = _net(0.3), _net(0.3)
    net.solver = mesh.solver(tolerance=1e-13, piece=5)
    x_BTF = torch.randn(2, 31, F, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    # Blocks of the caller's own choice.
    first, last = [(0, 20), (20, 20), (20, 31)][world.rank]
    expected_BTH, _ = serial(x_BTF)
    with torch.no_grad():
        y_BTH, _ = net(x_BTF[:, first:last])
    checks = {"without gradients": torch.allclose(y_BTH, expected_BTH[:, first:last], atol=1e-11)}
    y_BTH, _ = net(x_BTF[:, first:last])
    loss = y_BTH.square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    weight = net.cells[0].weight_hh.grad
    assert isinstance(weight, torch.Tensor)
    distributed.all_reduce(weight)
    (2 * expected_BTH.square().sum()).backward()
    checks["asked for twice"] = torch.allclose(weight, serial.cells[0].weight_hh.grad, atol=1e-10)  # type: ignore[arg-type]
    twin = copy.deepcopy(net)
    checks["copied"] = torch.equal(twin(x_BTF[:, first:last])[0], y_BTH)
    net.cells[0].weight_hh.requires_grad_(False)  # type: ignore[operator]
    net.cells[0].weight_hh.grad = None
    net(x_BTF[:, first:last])[0].sum().backward()
    checks["frozen"] = net.cells[0].weight_hh.grad is None
    # What is no number spreads as it does on one rank, to all that follows and no further.
    x_BTF = x_BTF.clone()
    x_BTF[0, 3] = math.nan
    expected_BTH, _ = serial(x_BTF)
    y_BTH, _ = net(x_BTF[:, first:last])
    checks["no number"] = torch.allclose(y_BTH, expected_BTH[:, first:last], atol=1e-11, equal_nan=True)
    checks["is told"] = "a state is no number" in net.solution.reason
    x_BTF = x_BTF.nan_to_num(nan=0.0).requires_grad_()
    y_BTH, _ = net(x_BTF[:, first:last])
    weights_TH = torch.ones(31, H, dtype=torch.float64)
    weights_TH[25] = math.nan
    (y_BTH * weights_TH[first:last]).sum().backward()
    assert x_BTF.grad is not None
    nans_T = x_BTF.grad[0].isnan().any(dim=1)[first:last]
    checks["gradients that are no numbers"] = torch.equal(nans_T, torch.arange(first, last) <= 25)
    return checks


def test_odd_ways_of_calling_it(tmp_path: Path) -> None:
    for told in run_world(3, _odd_ways, tmp_path):
        assert isinstance(told, dict), told
        assert all(told.values()), told


def test_how_far_states_are_apart() -> None:
    one = torch.tensor([1.0, 200.0, math.nan, math.inf])
    assert gap([one], [one.clone()]) == 0.0
    assert gap([one], [one + torch.tensor([0.0, 2.0, 0.0, 0.0])]) == pytest.approx(0.01)
    assert gap([one[:1]], [one[:1] + 0.5]) == pytest.approx(0.5)
    assert gap([one], [torch.zeros(4)]) == math.inf
    assert gap([torch.tensor([3])], [torch.tensor([4])]) == math.inf
    assert gap([torch.tensor([True])], [torch.tensor([True])]) == 0.0
    assert gap([torch.zeros(0, 2)], [torch.zeros(0, 2)]) == 0.0
    assert size([torch.tensor([-3.0, 2.0]), torch.zeros(0)]) == 3.0
    assert size([torch.tensor([-3.0, math.nan])]) == math.inf
    assert size([]) == 0.0
