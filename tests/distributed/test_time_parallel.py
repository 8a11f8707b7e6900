"""Time over the ranks of real processes, beside the same net on one: outputs, states, gradients, rounds and refusals.

Starting processes is what takes time, so that one world of three ranks serves most checks.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from worlds import compile_quickly, run_world

import stretto
from stretto.distributed import TimeMesh, World, scale_loss
from stretto.errors import StrettoError
from stretto.state import flatten, unflatten

F, H = 3, 7
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
OWN_TOLERANCE = {"float64": 1e-13, "float32": 1e-7}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A net and a batch; `memory` scales recurrent weights: small forgets, large remembers."""

    cell: str = "GRU"
    dtype: str = "float64"
    lengths: tuple[int, ...] = (17, 17)
    padding: int = 0
    layers: int = 1
    both_ways: bool = False
    memory: float = 0.3
    segment_steps: int = 4
    hidden: int = H
    backend: str = "eager"

    @property
    def name(self) -> str:
        """Of the case, in results."""
        return str(dataclasses.astuple(self))


FORGETS = Case(lengths=(240, 240), memory=0.1, segment_steps=8, hidden=8)
REMEMBERS = Case(lengths=(60, 60), memory=8.0, segment_steps=8, hidden=8)
# One of each kind, without a compiler, for every run of the tests.
QUICK_CASES = [
    FORGETS,
    REMEMBERS,
    Case(lengths=(33, 5, 20, 33, 1), layers=2, both_ways=True),
    Case(cell="LSTM", lengths=(30, 17, 24), memory=3.0, both_ways=True, hidden=16),
    Case(dtype="float32", lengths=(24,) * 10, hidden=20, layers=2, memory=1.0),
    Case(lengths=(2, 1, 0), padding=2, layers=2),
    Case(lengths=(0, 0)),
    Case(cell="Counting", lengths=(11, 8)),
]
ALL_CASES = [
    *(
        Case(cell=cell, dtype=dtype, layers=layers, both_ways=both, lengths=(33, 5, 20, 33, 1), backend="cpp")
        for cell in ("GRU", "LSTM")
        for dtype in TOLERANCE
        for layers, both in ((1, False), (2, True))
    ),
    *(
        Case(lengths=(T, T, T), both_ways=True, backend="cpp", segment_steps=p)
        for T in (1, 2, 8, 17, 64)
        for p in (3, 1000)
    ),
    *(
        Case(lengths=lengths, padding=2, layers=2, backend="cpp")
        for lengths in ((2, 1, 0), (0, 0), (0, 9, 3, 9, 8), (1,))
    ),
    # What it remembers is longer than a block: more rounds, and as exact.
    *(Case(cell=cell, lengths=(30, 17, 24), memory=3.0, both_ways=True, hidden=16) for cell in ("GRU", "LSTM")),
    Case(cell="IndRNN", lengths=(40, 31), memory=1.0),
    Case(cell="Clockwork", lengths=(21, 9), layers=2),
    Case(cell="LSTM", lengths=(12, 7, 12), layers=2, both_ways=True),
    # The sizes of TorchBraid's layer tests: T = 24, H = 20, batch 10; backward T = 27, batch 8.
    *(Case(dtype=dtype, lengths=(24,) * 10, hidden=20, layers=2, memory=1.0) for dtype in TOLERANCE),
    *(Case(dtype=dtype, lengths=(27,) * 8, hidden=20, layers=2, memory=1.0) for dtype in TOLERANCE),
]


class Counting(stretto.Cell):
    """A cell that counts its steps in whole numbers, and does something else at every third."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_hh = torch.nn.Parameter(torch.randn(F, F) / 2)

    def initial_state(self, batch_size: int) -> Any:
        return torch.zeros(batch_size, F, dtype=self.weight_hh.dtype), torch.zeros(batch_size, dtype=torch.int64)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BF, count_B = state
        turn_B1 = torch.where(count_B % 3 == 0, 1.0, -0.5).to(x_t)[:, None]
        h_BF = torch.tanh(x_t + turn_B1 * (h_BF @ self.weight_hh))
        return h_BF, (h_BF, count_B + 1)


def _cell(case: Case) -> stretto.Cell:
    kinds = {
        "GRU": lambda: stretto.cells.GRU(F, case.hidden),
        "LSTM": lambda: stretto.cells.LSTM(F, case.hidden),
        "IndRNN": lambda: stretto.cells.IndRNN(F, case.hidden),
        "Clockwork": lambda: stretto.cells.Clockwork(F, 8, periods=(1, 4)),
        "Counting": Counting,
    }
    return kinds[case.cell]()


def _net(case: Case) -> stretto.RNN:
    torch.manual_seed(4)
    net = stretto.RNN(_cell(case), case.layers, case.both_ways, backend=case.backend)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "hh" in name:
                parameter.mul_(case.memory)
    return net.to(getattr(torch, case.dtype))


def _leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors]


@dataclasses.dataclass(kw_only=True)
class Expected:
    """A batch, a state before it, what outputs and final states count in the loss, and all that one rank finds."""

    x_BTF: torch.Tensor
    states: list[torch.Tensor]
    structure: Any
    weights: list[torch.Tensor]
    found: dict[str, torch.Tensor]


def _on_one_rank(case: Case, net: stretto.RNN) -> Expected:
    generator = torch.Generator().manual_seed(5)
    dtype = getattr(torch, case.dtype)

    def draw(shape: Any) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x_BTF = draw((len(case.lengths), max(1, max(case.lengths) + case.padding), F)).requires_grad_()
    structure = net.initial_state(len(case.lengths))
    # Counts stay as they are.
    states = _leaves([draw(s.shape) if s.dim() > 1 and s.shape[1] > 1 else s for s in flatten(structure)])
    y_BTH, after = net(x_BTF, unflatten(structure, states), lengths=case.lengths)
    parts = [y_BTH, *flatten(after)]
    weights = [draw(part.shape) for part in parts]
    sum((part * w).sum() for part, w in zip(parts, weights, strict=True)).backward()  # type: ignore[union-attr]
    found = {"y": y_BTH, "dx": x_BTF.grad}
    found |= {f"final {n}": part for n, part in enumerate(parts[1:])}
    found |= {f"d state {n}": state.grad for n, state in enumerate(states) if state.is_floating_point()}
    found |= {name: p.grad for name, p in net.named_parameters()}
    detached = {name: tensor.detach() for name, tensor in found.items() if tensor is not None}
    return Expected(x_BTF=x_BTF, states=states, structure=structure, weights=weights, found=detached)


def _worst(mesh: TimeMesh, case: Case) -> dict[str, Any]:
    """The largest error of this rank against the whole batch on one, by what it is an error of, and how it went."""
    serial = _net(case)
    net = copy.deepcopy(serial)
    drawn = _on_one_rank(case, serial)
    wanted = drawn.found
    net.solver = mesh.solver(tolerance=OWN_TOLERANCE[case.dtype], segment_steps=case.segment_steps)
    block = mesh.block(drawn.x_BTF.shape[1], case.lengths)
    x_BTF, *states = _leaves([block.of(drawn.x_BTF), *drawn.states])
    # In an order that differs from rank to rank: sequences are known by their numbers.
    order = torch.roll(torch.arange(len(case.lengths)), mesh.time.rank)
    y_BTH, after = net(
        x_BTF[order],
        unflatten(drawn.structure, [state[order] for state in states]),
        lengths=block.lengths[order],
        sample_ids=[block.sample_ids[n] for n in order.tolist()],
    )
    back = torch.argsort(order)
    parts = [y_BTH[back], *(part[back] for part in flatten(after))]
    last, each = mesh.time.size - 1, len(drawn.states) // len(net.cells)

    def ends_here(number: int, place: int) -> bool:
        backwards = case.both_ways and number // each % 2
        return mesh.time.rank == (last - place if backwards else place)

    counted = [block.of(drawn.weights[0])] + [
        w * ends_here(n, last) for n, w in enumerate(drawn.weights[1:]) if w is not None
    ]
    sum((part * w).sum() for part, w in zip(parts, counted, strict=True)).backward()  # type: ignore[union-attr]
    found: dict[str, Any] = {"y": parts[0], "dx": x_BTF.grad}
    expected = wanted | {"y": block.of(wanted["y"]), "dx": block.of(wanted["dx"])}
    whole = flatten(mesh.final_state(net, unflatten(after, parts[1:])))
    for number, (part, state) in enumerate(zip(whole, states, strict=True)):
        found[f"final {number}"] = part
        if ends_here(number, last):
            assert torch.equal(part, parts[1 + number])
        if state.is_floating_point():
            found[f"d state {number}"] = state.grad
            if not ends_here(number, 0):
                expected[f"d state {number}"] = torch.zeros_like(state)
    for name, parameter in net.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        if mesh.time.size > 1:
            distributed.all_reduce(gradient, group=mesh.time.group)
        found[name] = gradient
    worst = {}
    for name, value in found.items():
        scale = max(1e-3, float(wanted[name].abs().max())) if wanted[name].numel() else 1.0
        worst[name] = float((value - expected[name]).detach().abs().max()) / scale if value.numel() else 0.0
    solution = net.solution
    return {
        "worst": worst,
        "iterations": max(s.iterations for s in net.solutions),
        "backward_iterations": max(s.backward_iterations or 1 for s in net.solutions),
        "residual": max(solution.residual, solution.backward_residual or 0.0),
        "work": max(s.work for s in net.solutions),
        "reason": solution.reason,
    }


def _assert_equal(found: dict[str, Any], cases: list[Case], *, ranks: int) -> None:
    for case in cases:
        one = found[case.name]
        for name, worst in one["worst"].items():
            assert worst <= TOLERANCE[case.dtype], (case, name, worst, one)
        assert one["iterations"] <= ranks
        assert one["backward_iterations"] <= ranks
        assert one["residual"] <= OWN_TOLERANCE[case.dtype]


def _assert_same_update(found: dict[str, Any], *, rank: int, time: int, size: int) -> None:
    assert max(found["errors"].values()) <= 1e-12, found
    assert found["names"] == ["data", "time"]
    assert found["grid"] == torch.arange(size).reshape(-1, time).tolist()
    assert found["place"] == [rank // time, rank % time]


def _simple_net(memory: float) -> stretto.RNN:
    torch.manual_seed(1)
    net = stretto.RNN(stretto.cells.GRU(F, 8).double(), backend="eager")
    with torch.no_grad():
        net.cells[0].weight_hh.mul_(memory)  # type: ignore[operator]
    return net


class Started(stretto.Cell):
    """A cell with an initial state that is a parameter."""

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


def _one_update(time: int, lengths: list[int]) -> dict[str, Any]:
    """One update on all ranks, each with its share of the sequences and its block of steps, and alone."""
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


def _unusual_calls(world: World, mesh: TimeMesh) -> dict[str, bool]:
    serial, net = _simple_net(0.3), _simple_net(0.3)
    net.solver = mesh.solver(tolerance=1e-13, segment_steps=5)
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
    # NaN spreads as it does on one rank, to all that follows and no further.
    x_BTF = x_BTF.clone()
    x_BTF[0, 3] = math.nan
    expected_BTH, _ = serial(x_BTF)
    y_BTH, _ = net(x_BTF[:, first:last])
    checks["NaN"] = torch.allclose(y_BTH, expected_BTH[:, first:last], atol=1e-11, equal_nan=True)
    checks["reported"] = "a state is NaN or inf" in net.solution.reason
    x_BTF = x_BTF.nan_to_num(nan=0.0).requires_grad_()
    y_BTH, _ = net(x_BTF[:, first:last])
    weights_TH = torch.ones(31, 8, dtype=torch.float64)
    weights_TH[25] = math.nan
    (y_BTH * weights_TH[first:last]).sum().backward()
    assert x_BTF.grad is not None
    nans_T = x_BTF.grad[0].isnan().any(dim=1)[first:last]
    checks["gradients that are NaN"] = torch.equal(nans_T, torch.arange(first, last) <= 25)
    return checks


def _caught(work: Callable[[], Any]) -> str:
    try:
        work()
    except StrettoError as error:
        return str(error)
    return "nothing was refused"


def _refusals(world: World, mesh: TimeMesh) -> list[tuple[str, str]]:
    """The error that each call should lead to, and what was said."""
    odd = int(world.rank == 1)

    def net(hidden: int = H, **words: Any) -> stretto.RNN:
        return stretto.RNN(stretto.cells.GRU(F, hidden), backend="eager", solver=mesh.solver(**words))

    def frozen(x_BTF: torch.Tensor) -> None:
        with torch.set_grad_enabled(not odd):
            net()(x_BTF)

    def out_of_step() -> None:
        one = net()
        early = one(x_BTF)[0].sum() if not odd else None
        late = one(x_BTF)[0].sum()
        (late if early is None else early).backward()

    x_BTF, ragged = torch.randn(3, 5, F), [5, 2, 5]
    differs = "of rank 1 differs from that of rank 0"
    calls: list[tuple[str, Callable[[], Any]]] = [
        (f"the number of sequences {differs}", lambda: net()(torch.randn(2 + odd, 5, F))),
        (f"the state {differs}", lambda: net().double()(x_BTF.double()) if odd else net()(x_BTF)),
        (f"the state {differs}", lambda: net(H + odd)(x_BTF)),
        (f"whether gradients are asked for {differs}", lambda: frozen(x_BTF)),
        (f"the tolerance {differs}", lambda: net(tolerance=1e-3 if odd else 1e-4)(x_BTF)),
        ("sequences have unequal lengths and no ids", lambda: net()(x_BTF, lengths=ragged if odd else None)),
        (f"sample_ids {differs}", lambda: net()(x_BTF, sample_ids=[1, 2, 3 + odd])),
        (f"sample_ids {differs}", lambda: net()(x_BTF, sample_ids=[1, 2, 3] if odd else None)),
        ("two sequences of a batch have the same sample_ids", lambda: net()(x_BTF, sample_ids=[1, 2, 2])),
        (f"the number of steps, or the lengths, {differs}", lambda: mesh.block(10 + odd, [10])),
        (f"the number of steps, or the lengths, {differs}", lambda: mesh.block(10, [10 - odd])),
        ("a length is 11 and the batch has 10 steps", lambda: mesh.block(10, [11])),
        (f"the pass {differs}", out_of_step),
        ("steps cannot be divided over 2 ranks each: there are 3 ranks", lambda: TimeMesh(time=2)),
        ("steps cannot be divided over 6 ranks each: there are 3 ranks", lambda: TimeMesh(time=6)),
        ("steps cannot be divided over 0 ranks each: there are 3 ranks", lambda: TimeMesh(time=0)),
        ("nothing was refused", lambda: net()(x_BTF)),
    ]
    return [(expected, _caught(call)) for expected, call in calls]


def _left_alone(world: World, gave_up: Path) -> str:
    """The error of rank 0 when rank 1, still alive, never takes part in its backward pass."""
    mesh = TimeMesh(time=world.size, minutes=0.2)
    net, x_BTF = stretto.RNN(stretto.cells.GRU(F, H), backend="eager"), torch.randn(2, 6, F)
    net(x_BTF)
    world.barrier()
    net.solver = mesh.solver()
    y_BTH, _ = net(x_BTF)
    if world.rank == 1:
        # It leaves only after rank 0 has given up: without a timeout neither would, and the launch would hang.
        while not gave_up.exists():
            time.sleep(0.05)
        return ""
    try:
        y_BTH.sum().backward()
    except RuntimeError as error:
        gave_up.touch()
        return str(error)
    return "nobody was missed"


def _three_ranks(world: World) -> dict[str, Any]:
    mesh = TimeMesh(time=world.size)
    return {
        "cases": {case.name: _worst(mesh, case) for case in QUICK_CASES},
        "update": _one_update(3, [2, 1, 0]),
        "unusual": _unusual_calls(world, mesh),
        "refusals": _refusals(world, mesh),
    }


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three ranks found."""
    found = run_world(3, _three_ranks, tmp_path_factory.mktemp("three"))
    assert all(isinstance(item, dict) for item in found), found
    return found


def test_ranks_equal_one(three_ranks: list[dict[str, Any]]) -> None:
    for found in three_ranks:
        _assert_equal(found["cases"], QUICK_CASES, ranks=3)


def test_a_net_that_forgets_runs_little_again_and_one_that_remembers_everything(
    three_ranks: list[dict[str, Any]],
) -> None:
    for rank, found in enumerate(three_ranks):
        forgets, remembers = (found["cases"][case.name] for case in (FORGETS, REMEMBERS))
        assert forgets["iterations"] == 2
        assert forgets["backward_iterations"] == 2
        assert forgets["work"] == 1.0 if rank == 0 else 1.0 < forgets["work"] <= 1.8
        assert forgets["reason"] == "3 ranks of 80 steps"
        assert remembers["iterations"] == 3
        assert remembers["work"] == rank + 1.0


def test_an_update_equals_that_of_one_rank(three_ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(three_ranks):
        _assert_same_update(found["update"], rank=rank, time=3, size=3)


def test_unusual_calls(three_ranks: list[dict[str, Any]]) -> None:
    for found in three_ranks:
        assert all(found["unusual"].values()), found["unusual"]


def test_differences_are_refused_on_every_rank(three_ranks: list[dict[str, Any]]) -> None:
    for found in three_ranks:
        for expected, said in found["refusals"]:
            assert said.startswith(expected), (expected, said)


def test_one_rank_runs_sequentially() -> None:
    mesh = TimeMesh(time=1)
    net = stretto.RNN(stretto.cells.GRU(F, H), backend="eager", solver=mesh.solver(tolerance=1e-4))
    x_BTF = torch.randn(2, 6, F)
    y_BTH, state = net(x_BTF)
    assert net.solution.reason == "there is only one rank"
    net.solver = "serial"
    assert torch.equal(y_BTH, net(x_BTF)[0])
    assert torch.equal(mesh.final_state(net, state), state)
    assert mesh.steps(6) == range(6)
    assert mesh.devices is None
    with pytest.raises(StrettoError, match="there are 1 ranks"):
        TimeMesh(time=2)


def _two_ranks(world: World, folder: str) -> dict[str, Any]:
    mesh = TimeMesh(time=world.size)
    return {
        "cases": {case.name: _worst(mesh, case) for case in ALL_CASES},
        "update": _one_update(1, [5, 3]),
        # The last: its group is of no use afterwards.
        "left alone": _left_alone(world, Path(folder, "gave-up")),
    }


@pytest.mark.slow
def test_two_ranks_equal_one_and_do_not_wait_for_ever(tmp_path: Path) -> None:
    found = run_world(2, _two_ranks, tmp_path, str(tmp_path), prepare=compile_quickly)
    for rank, item in enumerate(found):
        assert isinstance(item, dict), item
        _assert_equal(item["cases"], ALL_CASES, ranks=2)
        _assert_same_update(item["update"], rank=rank, time=1, size=2)
    assert "imed out" in found[0]["left alone"]


def _four_ranks(world: World) -> dict[str, Any]:
    return _one_update(2, [19, 4, 11, 7])


@pytest.mark.slow
def test_an_update_of_ranks_that_share_sequences_and_steps_equals_that_of_one(tmp_path: Path) -> None:
    for rank, found in enumerate(run_world(4, _four_ranks, tmp_path)):
        assert isinstance(found, dict), found
        _assert_same_update(found, rank=rank, time=2, size=4)
