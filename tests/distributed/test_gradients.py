"""N ranks make the gradient that one makes of everything: every task, uneven and empty shares, accumulation.

Shape legend: N sequences.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny_tasks import tiny_task
from worlds import run_world

from stretto.batching import Batch, BucketSampler, collate
from stretto.distributed import World
from stretto.training import TrainState, Updater

TASK_NAMES = ["classify", "language-model", "handwriting"]
TOLERANCE = {"float64": 1e-12, "float32": 1e-6}


def _as(batch: Batch, dtype: torch.dtype) -> Batch:
    if not batch.features_BTF.is_floating_point():
        return batch
    return dataclasses.replace(batch, features_BTF=batch.features_BTF.to(dtype))


def _largest_error(world: World, name: str, dtype_name: str, accumulate: int) -> dict[str, float]:
    """Of every update of an epoch, against the mean over the same sequences by one process, relative to the largest."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    task = tiny_task(name, accumulate=accumulate)
    train = task.data.part("train")
    torch.manual_seed(0)
    model = task.build_model().to(dtype)
    sampler = BucketSampler(train.lengths_N, batch_size=2, num_buckets=2, rank=world.rank, world_size=world.size)
    plan, state = sampler.plan, TrainState(model, config=task.config, updates_per_epoch=len(sampler))
    updater = Updater(task, state, world=world)
    worst, empty, updates = 0.0, 0, 0
    for first in range(0, plan.num_batches, accumulate):
        steps = range(first, min(first + accumulate, plan.num_batches))
        batches = []
        for step in steps:
            share = plan.share(step, rank=world.rank, world_size=world.size)
            empty += not share
            batch = collate([train[int(index)] for index in share], num_features=train.num_features)
            batches.append(_as(batch, dtype))
        updater.update(batches)
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        members = [
            index
            for step in steps
            for rank in range(world.size)
            for index in plan.share(step, rank=rank, world_size=world.size)
        ]
        total, count = torch.zeros((), dtype=dtype), 0
        for index in members:
            one = _as(collate([train[int(index)]]), dtype)
            loss = task.loss(model(one), one)
            total, count = total + loss.total, count + loss.count
        torch.autograd.backward(total / count)
        wanted = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        scale = max(float(gradient.abs().max()) for gradient in wanted)
        errors = [float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)]
        worst, updates = max(worst, *(error / scale for error in errors)), updates + 1
    return {"worst": worst, "empty": empty, "updates": updates}


def _all_tasks(world: World) -> dict[str, dict[str, float]]:
    return {
        f"{name} {dtype} {accumulate}": _largest_error(world, name, dtype, accumulate)
        for name in TASK_NAMES
        for dtype in TOLERANCE
        for accumulate in (1, 3)
    }


SLOW = pytest.mark.slow


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=SLOW), pytest.param(4, marks=SLOW)])
def test_ranks_make_the_gradient_of_one(size: int, tmp_path: Path) -> None:
    ranks = run_world(size, _all_tasks, tmp_path)
    for result in ranks:
        assert isinstance(result, dict), result
        for case, facts in result.items():
            assert facts["worst"] <= TOLERANCE[case.split()[1]], (case, facts)
            assert facts["updates"] >= 1
    if size == 4:
        assert sum(facts["empty"] for result in ranks for facts in result.values()) > 0


def test_one_process_makes_it_too() -> None:
    for case, facts in _all_tasks(World()).items():
        assert facts["worst"] <= TOLERANCE[case.split()[1]], (case, facts)
