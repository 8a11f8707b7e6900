"""A loss that is NaN on one rank alone."""

import math
from pathlib import Path
from typing import Any

import torch
from tiny_tasks import spoil_loss, tiny_task
from worlds import run_world

from stretto.batching import BucketSampler, collate
from stretto.distributed import World
from stretto.training import TrainState, Updater

BAD = 3


def _train(world: World, on_nan: str) -> dict[str, Any]:
    """An epoch in which one sequence has no loss; what was taken of it, and the weights before and after."""
    task = tiny_task("classify", accumulate=1)
    object.__setattr__(task.config, "on_nan", on_nan)
    object.__setattr__(task.config, "learning_rate", 0.1)
    spoil_loss(task, lambda indices: BAD in indices)
    train = task.data.part("train")
    torch.manual_seed(0)
    model = task.build_model()
    sampler = BucketSampler(train.lengths_N, batch_size=2, num_buckets=2, rank=world.rank, world_size=world.size)
    state = TrainState(model, config=task.config, updates_per_epoch=len(sampler))
    updater = Updater(task, state, world=world)
    skipped = []
    for indices in sampler:
        before = [parameter.clone() for parameter in model.parameters()]
        update = updater.update([collate([train[int(index)] for index in indices], num_features=3)])
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same == update.is_skipped
        skipped.append(same)
    total = sum(float(parameter.detach().sum()) for parameter in model.parameters())
    return {"skipped": skipped, "sum": total, "finite": math.isfinite(total)}


def test_it_stops_all_ranks_and_names_the_sequences(tmp_path: Path) -> None:
    said = run_world(2, _train, tmp_path, "stop")
    assert said[0] == said[1]
    assert said[0].startswith("StrettoError: the loss or gradient is nan at update 1, on training sequences ")
    assert str(BAD) in said[0].partition("sequences ")[2]


def test_or_all_ranks_skip_the_same_update(tmp_path: Path) -> None:
    first, second = run_world(2, _train, tmp_path, "skip")
    assert first == second
    assert first["skipped"].count(True) == 1
    assert first["finite"]
