"""The norm of each rank's own gradient, read during the all-reduce, gives the noise between the ranks' shares."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import run_world

from stretto.distributed import World, scale_loss
from stretto.large_batch import SplitByRank, SplitNorms, noise_of

SIZES = [2, 5]


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in SIZES]


def _measure(world: World, *, adaptive: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if adaptive else None
    replica = DistributedDataParallel(model, process_group=world.group, gradient_as_bucket_view=True)
    split = SplitByRank(replica, world=world, optimizer=optimizer)
    batch, found = _batches()[world.rank], {}
    for update in range(2):
        for off in (True, False):
            split.begin(is_on=not off)
            model.zero_grad()
            with replica.no_sync():
                torch.autograd.backward(scale_loss(replica(batch[:1]).square().sum(), 1, total=sum(SIZES)))
            rest = scale_loss(replica(batch[1:]).square().sum(), len(batch) - 1, total=sum(SIZES))
            torch.autograd.backward(rest)
            split.add(len(batch))
            norms = split.take()
            assert (norms is None) is off
        if optimizer is not None and update == 0:
            optimizer.step()
            continue
        noise = noise_of(norms)
        below = (
            [(optimizer.state[p]["exp_avg_sq"] / 0.001).sqrt() + 1e-8 for p in model.parameters()] if optimizer else []
        )
        xs = [torch.autograd.grad(model(one).square().sum() / len(one), list(model.parameters())) for one in _batches()]
        flat = [
            torch.cat([(g / below[at] if below else g).flatten() for at, g in enumerate(gradients)]) for gradients in xs
        ]
        whole = sum(size * x for size, x in zip(SIZES, flat, strict=True)) / sum(SIZES)
        squares = [float(x @ x) for x in flat]
        wanted = noise_of(SplitNorms(sizes=SIZES, squares=squares, square_of_mean=float(whole @ whole)))
        found = {"found": [noise.trace, noise.square], "wanted": [wanted.trace, wanted.square]}
    return found


def _measure_all(world: World) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    split = SplitByRank(DistributedDataParallel(model, process_group=world.group), world=world)
    torch.autograd.backward(model(torch.ones(1, 2)).sum())
    split.add(3 * world.rank)
    return {
        "plain": _measure(world, adaptive=False),
        "adaptive": _measure(world, adaptive=True),
        "one rank empty": split.take() is None,
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(2, _measure_all, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("kind", ["plain", "adaptive"])
def test_shares_of_two_ranks_give_the_noise(kind: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank[kind]["found"] == pytest.approx(rank[kind]["wanted"], rel=1e-9)
        assert rank[kind]["found"] == pytest.approx(ranks[0][kind]["found"], rel=1e-12)


def test_one_rank_with_sequences_does_not_make_two_parts(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["one rank empty"] for rank in ranks)
