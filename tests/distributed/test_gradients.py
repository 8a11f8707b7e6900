"""N workers make the gradient that one makes of everything: every task, uneven and empty shares, accumulated steps.

Shape legend: N sequences.
"""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import run_world

from stretto.batching.collate import Batch, collate
from stretto.batching.sampler import BucketSampler
from stretto.data.sequences import SequenceSet
from stretto.data.targets import Labels, Transcripts
from stretto.distributed.world import World
from stretto.tasks.registry import CONFIGS, TASKS
from stretto.training.config import checked
from stretto.training.state import TrainState
from stretto.training.task import AbstractTask
from stretto.training.update import Updater

TASK_NAMES = ["classify", "language-model", "handwriting"]
TOLERANCE = {"float64": 1e-12, "float32": 1e-6}


def _data(name: str) -> SequenceSet:
    rng = np.random.default_rng(3)
    count = 17
    lengths_N = np.where(np.arange(count) % 5 == 0, rng.integers(8, 13, count), rng.integers(3, 6, count))
    common: dict[str, Any] = {"offsets": np.cumsum([0, *lengths_N]), "split_N": np.repeat([0, 1, 2], [11, 3, 3])}
    if name == "language-model":
        return SequenceSet.from_flat(rng.integers(0, 5, lengths_N.sum()), alphabet="abcde", **common)
    features_SF = rng.normal(size=(lengths_N.sum(), 3)).astype(np.float32)
    if name == "classify":
        labels = Labels.check(np.arange(count) % 3, names=None, source="")
        return SequenceSet.from_flat(features_SF, targets=labels, **common)
    return SequenceSet.from_flat(
        features_SF, targets=Transcripts.of(["ab" if n > 5 else "b" for n in lengths_N]), **common
    )


def _task(name: str, *, accumulate: int) -> AbstractTask[Any]:
    values = {
        "epochs": 1,
        "batch_size": 2,
        "hidden_size": 4,
        "num_buckets": 2,
        "dropout": 0.0,
        "accumulate": accumulate,
        "learning_rate": 1e-30,
        "weight_decay": 0.0,
        "clip_norm": 1e30,
        "kernel": "torch",
        **({"stack": 1} if name == "handwriting" else {}),
    }
    return TASKS[name](checked(CONFIGS[name], values, source="the test"), _data(name))


def _as(batch: Batch, dtype: torch.dtype) -> Batch:
    if not batch.features_BTF.is_floating_point():
        return batch
    return dataclasses.replace(batch, features_BTF=batch.features_BTF.to(dtype))


def _largest_error(world: World, name: str, dtype_name: str, accumulate: int) -> dict[str, float]:
    """Of every update of an epoch, against the mean over the same sequences by one worker, relative to the largest."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    task = _task(name, accumulate=accumulate)
    train = task.data.part("train")
    torch.manual_seed(0)
    model = task.build_model().to(dtype)
    sampler = BucketSampler(train.lengths_N, batch_size=2, num_buckets=2, rank=world.rank, world_size=world.size)
    plan, state = sampler.plan, TrainState(model, config=task.config, steps_per_epoch=len(sampler))
    updater = Updater(task, state, world=world, stop=threading.Event())
    worst, empty, updates = 0.0, 0, 0
    for first in range(0, plan.num_steps, accumulate):
        steps = range(first, min(first + accumulate, plan.num_steps))
        updater.begin()
        for step in steps:
            share = plan.share(step, rank=world.rank, world_size=world.size)
            empty += not share
            batch = collate([train[int(index)] for index in share], num_features=train.num_features)
            updater.add(_as(batch, dtype), is_last=step == steps[-1])
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        dealt = [
            index
            for step in steps
            for rank in range(world.size)
            for index in plan.share(step, rank=rank, world_size=world.size)
        ]
        total, count = torch.zeros((), dtype=dtype), 0
        for index in dealt:
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


@pytest.mark.parametrize("size", [2, 3, 4])
def test_workers_make_the_gradient_of_one(size: int, tmp_path: Path) -> None:
    ranks = run_world(size, _all_tasks, tmp_path)
    for result in ranks:
        assert isinstance(result, dict), result
        for case, facts in result.items():
            assert facts["worst"] <= TOLERANCE[case.split()[1]], (case, facts)
            assert facts["updates"] >= 1
    if size == 4:
        assert sum(facts["empty"] for result in ranks for facts in result.values()) > 0


def test_one_worker_makes_it_too() -> None:
    for case, facts in _all_tasks(World()).items():
        assert facts["worst"] <= TOLERANCE[case.split()[1]], (case, facts)
