"""A loop of the user's own: accumulation without exchange, and torch's hooks that compress what is exchanged.

Shape legend: B sequences, T steps, F features.
"""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from worlds import run_world

import stretto
from stretto.distributed import World, global_count, scale_loss
from stretto.large_batch import make_optimizer

LENGTHS = (3, 9, 1, 4, 7, 2, 5, 6, 8)
SHARES = {0: (0, 1, 2, 3, 4, 5), 1: (6, 7), 2: (8,), 3: ()}
"""Uneven, and nothing for one of four."""


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = stretto.RNN(stretto.cells.GRU(3, 16), backend="eager"), torch.nn.Linear(16, 32)

    def forward(self, x_BTF: torch.Tensor, lengths: list[int]) -> Any:
        return self.out(self.rnn(x_BTF, lengths=lengths)[1])


def _losses(model: torch.nn.Module, numbers: tuple[int, ...]) -> torch.Tensor:
    """The summed loss of some sequences; zero, through the model, of none."""
    generator = torch.Generator().manual_seed(1)
    x_BTF = torch.randn(len(LENGTHS), max(LENGTHS), 3, generator=generator, dtype=torch.float64)
    chosen = list(numbers) or [0]
    total: torch.Tensor = model(x_BTF[chosen], [LENGTHS[n] for n in chosen]).square().sum()
    return total if numbers else 0.0 * total


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return _Net().double()


def _expected() -> list[torch.Tensor]:
    model = _model()
    (_losses(model, tuple(range(len(LENGTHS)))) / len(LENGTHS)).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _error(model: torch.nn.Module) -> float:
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    wanted = _expected()
    scale = max(float(gradient.abs().max()) for gradient in wanted)
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) / scale


def _muon(world: World | None) -> list[list[float]]:
    """The weights after three updates; without ranks, those of one process."""
    model = _model()
    replica = model if world is None else DistributedDataParallel(model)
    share = tuple(range(len(LENGTHS))) if world is None else _share(world)
    optimizer = make_optimizer("muon", model, lr=0.02)
    for _ in range(3):
        optimizer.zero_grad()
        loss = _losses(replica, share)
        (loss / len(LENGTHS) if world is None else scale_loss(loss, len(share))).backward()
        optimizer.step()
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def test_muon_makes_the_same_updates_on_all_ranks_as_one_process_does(tmp_path: Path) -> None:
    first, second = run_world(2, _muon, tmp_path)
    assert first == second
    for found, wanted in zip(first, _muon(None), strict=True):
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-11)


def _share(world: World) -> tuple[int, ...]:
    if world.size == 4:
        return SHARES[world.rank]
    return tuple(range(world.rank, len(LENGTHS), world.size))


def _accumulate(world: World) -> float:
    """One sequence at a time, exchanged with the last of each rank."""
    model = DistributedDataParallel(_model())
    share = _share(world)
    total = global_count(len(share))
    parts = [(number,) for number in share] or [()]
    for part in parts:
        with contextlib.nullcontext() if part == parts[-1] else model.no_sync():
            scale_loss(_losses(model, part), len(part), total=total).backward()
    return _error(model)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_accumulated_steps_make_the_gradient_of_all(tmp_path: Path, size: int) -> None:
    assert max(run_world(size, _accumulate, tmp_path)) < 1e-12


def _with_a_hook(world: World, name: str) -> float:
    model = DistributedDataParallel(_model())
    if name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=1
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    share = _share(world)
    for _ in range(6):
        model.zero_grad()
        scale_loss(_losses(model, share), len(share)).backward()
    return _error(model)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("fp16", 0.002), ("PowerSGD", 0.8)])
def test_hooks_that_compress_gradients_work_and_lose_what_they_lose(tmp_path: Path, name: str, most: float) -> None:
    """The hook for bf16 is the one for fp16 with another type; torch refuses it without a GPU."""
    errors = run_world(2, _with_a_hook, tmp_path, name)
    assert errors[0] == errors[1]
    assert 1e-5 < errors[0] < most
