"""Time laid over real processes, beside the same net on one: outputs, states, all gradients; and what is refused.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from worlds import run_world

import stretto
from stretto.distributed import TimeMesh, World
from stretto.kernels import compiler
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
    piece: int = 4
    hidden: int = H
    backend: str = "eager"

    @property
    def name(self) -> str:
        """Of the case, in results."""
        return str(dataclasses.astuple(self))


CASES = [
    *(
        Case(cell=cell, dtype=dtype, layers=layers, both_ways=both, lengths=(33, 5, 20, 33, 1), backend="cpp")
        for cell in ("GRU", "LSTM")
        for dtype in TOLERANCE
        for layers, both in ((1, False), (2, True))
    ),
    *(Case(lengths=(T, T, T), both_ways=True, backend="cpp", piece=p) for T in (1, 2, 8, 17, 64) for p in (3, 1000)),
    *(
        Case(lengths=lengths, padding=2, layers=2, backend="cpp")
        for lengths in ((2, 1, 0), (0, 0), (0, 9, 3, 9, 8), (1,))
    ),
    # What it remembers is longer than a block: more rounds, and as exact.
    *(Case(cell=cell, lengths=(30, 17, 24), memory=3.0, both_ways=True, hidden=16) for cell in ("GRU", "LSTM")),
    Case(cell="IndRNN", lengths=(40, 31), memory=1.0),
    Case(cell="Clockwork", lengths=(21, 9), layers=2),
    Case(cell="Counting", lengths=(11, 8)),
    Case(cell="LSTM", lengths=(12, 7, 12), layers=2, both_ways=True),
    # TorchBraid's layer tests: T = 24, H = 20, batch 10; backward T = 27, batch 8.
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
class Drawn:
    """A batch, a state before it, and what outputs and final states count in the loss."""

    x_BTF: torch.Tensor
    states: list[torch.Tensor]
    structure: Any
    weights: list[torch.Tensor]


def _drawn(case: Case, net: stretto.RNN) -> Drawn:
    generator = torch.Generator().manual_seed(5)
    dtype = getattr(torch, case.dtype)

    def draw(shape: Any) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x_BTF = draw((len(case.lengths), max(1, max(case.lengths) + case.padding), F))
    structure = net.initial_state(len(case.lengths))
    # Counts stay as they are.
    states = [draw(part.shape) if part.dim() > 1 and part.shape[1] > 1 else part for part in flatten(structure)]
    with torch.no_grad():
        y_BTH, after = net(x_BTF, lengths=case.lengths)
    return Drawn(
        x_BTF=x_BTF,
        states=states,
        structure=structure,
        weights=[draw(part.shape) for part in (y_BTH, *flatten(after))],
    )


def _serial(case: Case, net: stretto.RNN, drawn: Drawn) -> dict[str, torch.Tensor]:
    x_BTF, *states = _leaves([drawn.x_BTF, *drawn.states])
    y_BTH, after = net(x_BTF, unflatten(drawn.structure, states), lengths=case.lengths)
    parts = [y_BTH, *flatten(after)]
    sum((part * w).sum() for part, w in zip(parts, drawn.weights, strict=True)).backward()  # type: ignore[union-attr]
    found = {"y": y_BTH, "dx": x_BTF.grad}
    found |= {f"final {n}": part for n, part in enumerate(parts[1:])}
    found |= {f"d state {n}": state.grad for n, state in enumerate(states) if state.is_floating_point()}
    found |= {name: p.grad for name, p in net.named_parameters()}
    return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}


def _worst(mesh: TimeMesh, case: Case) -> dict[str, Any]:
    """The largest error of this rank against the whole batch on one, by what it is an error of, and how it went."""
    serial = _net(case)
    net = copy.deepcopy(serial)
    drawn = _drawn(case, serial)
    wanted = _serial(case, serial, drawn)
    net.solver = mesh.solver(tolerance=OWN_TOLERANCE[case.dtype], piece=case.piece)
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


def _all_cases(world: World) -> dict[str, Any]:
    mesh = TimeMesh(time=world.size)
    return {case.name: _worst(mesh, case) for case in CASES}


def _compile_quickly(rank: int) -> None:
    """Code that is compiled quickly rather than well, in a process of a world."""
    compiler.BASE_FLAGS = tuple("-O0" if flag == "-O3" else flag for flag in compiler.BASE_FLAGS)  # type: ignore[misc]


def _assert_equal(told: dict[str, Any], *, ranks: int) -> None:
    for case in CASES:
        one = told[case.name]
        for name, worst in one["worst"].items():
            assert worst <= TOLERANCE[case.dtype], (case, name, worst, one)
        assert one["iterations"] <= ranks
        assert one["backward_iterations"] <= ranks
        assert one["residual"] <= OWN_TOLERANCE[case.dtype]


def test_one_rank_alone(quick_compiler: None) -> None:
    _assert_equal(_all_cases(World()), ranks=1)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_equal_one(size: int, tmp_path: Path) -> None:
    for told in run_world(size, _all_cases, tmp_path, prepare=_compile_quickly):
        assert isinstance(told, dict), told
        _assert_equal(told, ranks=size)
