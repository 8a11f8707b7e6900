"""The norm of each worker's own gradient, read as gradients are exchanged, gives the noise that shares really have."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import run_world

from stretto.distributed import LocalNorm, World, parts_of_ranks, scale_loss, squared_norm
from stretto.large_batch.noise import noise_of

SIZES = [2, 5]


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in SIZES]


def _measured(world: World, adaptive: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if adaptive else None
    replica = DistributedDataParallel(model, process_group=world.group, gradient_as_bucket_view=True)
    local = LocalNorm(replica, optimizer=optimizer)
    batch, found = _batches()[world.rank], {}
    for update in range(2):
        for off in (True, False):
            local.is_on = not off
            model.zero_grad()
            with replica.no_sync():
                torch.autograd.backward(scale_loss(replica(batch[:1]).square().sum(), 1, total=sum(SIZES)))
            rest = scale_loss(replica(batch[1:]).square().sum(), len(batch) - 1, total=sum(SIZES))
            torch.autograd.backward(rest)
            own = local.take()
        mean = squared_norm(model.parameters(), optimizer)
        parts = parts_of_ranks(world, num_sequences=len(batch), square=own, square_of_mean=mean)
        assert parts is not None
        if optimizer is not None and update == 0:
            optimizer.step()
            continue
        noise = noise_of(sizes=parts.sizes, squares=parts.squares, square_of_mean=parts.square_of_mean)
        below = (
            [(optimizer.state[p]["exp_avg_sq"] / 0.001).sqrt() + 1e-8 for p in model.parameters()] if optimizer else []
        )
        xs = [torch.autograd.grad(model(one).square().sum() / len(one), list(model.parameters())) for one in _batches()]
        flat = [
            torch.cat([(g / below[at] if below else g).flatten() for at, g in enumerate(gradients)]) for gradients in xs
        ]
        whole = sum(size * x for size, x in zip(SIZES, flat, strict=True)) / sum(SIZES)
        wanted = noise_of(sizes=SIZES, squares=[float(x @ x) for x in flat], square_of_mean=float(whole @ whole))
        found = {"found": [noise.trace, noise.square], "wanted": [wanted.trace, wanted.square]}
    return found


@pytest.mark.parametrize("adaptive", [False, True])
def test_shares_of_two_workers_tell_the_noise(adaptive: bool, tmp_path: Path) -> None:
    answers = run_world(2, _measured, tmp_path, adaptive)
    assert isinstance(answers[0], dict), answers[0]
    for answer in answers:
        assert answer["found"] == pytest.approx(answer["wanted"], rel=1e-9)
        assert answer == answers[0] or answer["found"] == pytest.approx(answers[0]["found"], rel=1e-12)


def _empty(world: World) -> Any:
    parts = parts_of_ranks(world, num_sequences=3 * world.rank, square=1.0, square_of_mean=1.0)
    return parts is None


def test_a_single_worker_with_sequences_is_no_two_parts(tmp_path: Path) -> None:
    assert run_world(2, _empty, tmp_path) == [True, True]
