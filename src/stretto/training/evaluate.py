"""Loss and metrics over a part of the data."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader

from stretto.batching.collate import Batch, collate
from stretto.batching.sampler import BucketSampler
from stretto.data.sequences import SequenceSet
from stretto.distributed.world import World
from stretto.training.divergence import MOST_NAMED, diverged
from stretto.training.task import AbstractTask, Reading, Score

EVALUATION_ROWS: Final = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Mean loss and metrics by name."""

    loss: float
    metrics: dict[str, float]


def evaluate(
    task: AbstractTask[Any],
    model: nn.Module,
    part: SequenceSet,
    *,
    device: str,
    final: bool = False,
    world: World | None = None,
) -> Evaluation:
    """Measure the model on every sequence of `part`, shared out to workers; `final` spends more time on decoding."""
    world = world or World()
    loss, count = 0.0, 0
    scores: dict[str, Score] = {}
    bad: list[int] = []
    with _measuring(model):
        for batch in _batches(part, max_steps=task.config.max_steps, device=device, world=world):
            if not len(batch):
                continue
            output = model(batch)
            summed = task.loss(output, batch)
            total = float(summed.total)
            if not math.isfinite(total):
                bad += [] if batch.indices is None else batch.indices.tolist()
                loss = total
                break
            loss, count = loss + total, count + summed.count
            for name, score in (task.final_score if final else task.score)(output, batch).items():
                scores[name] = scores[name] + score if name in scores else score
    loss, total_count, *_ = world.total([loss, float(count)])
    if not math.isfinite(loss):
        numbers = world.gathered([float(n) for n in (*bad[:MOST_NAMED], *[-1] * (MOST_NAMED - len(bad)))])
        named = [int(number) for row in numbers for number in row if number >= 0]
        raise diverged(named, loss, where=f"in measuring {part.name}, on sequences")
    return Evaluation(loss=loss / max(1.0, total_count), metrics=task.summary(_added_up(scores, world)))


def _added_up(scores: dict[str, Score], world: World) -> dict[str, Score]:
    """Scores of all workers; one without a share knows no names, but has nothing to add either."""
    names = world.told("\n".join(sorted(scores))).splitlines()
    own = [value for name in names for score in [scores.get(name)] for value in _numbers(score)]
    sums = iter(world.total(own))
    return {name: Score(amount=next(sums), count=next(sums)) for name in names}


def _numbers(score: Score | None) -> tuple[float, float]:
    return (0.0, 0.0) if score is None else (score.amount, score.count)


def show_readings(task: AbstractTask[Any], model: nn.Module, part: SequenceSet, *, device: str) -> list[Reading]:
    """What the model makes of every sequence of `part`, for a person to see."""
    with _measuring(model):
        batches = _batches(part, max_steps=task.config.max_steps, device=device, world=World())
        return [reading for batch in batches for reading in task.readings(model(batch), batch)]


def _batches(part: SequenceSet, *, max_steps: int | None, device: str, world: World) -> Iterator[Batch]:
    sampler = BucketSampler(
        part.lengths_N,
        batch_size=EVALUATION_ROWS,
        max_steps=max_steps,
        shuffle=False,
        rank=world.rank,
        world_size=world.size,
    )
    # A generator of its own: a loader draws a seed, and measuring must not move the random state of training.
    for batch in DataLoader(part, batch_sampler=sampler, collate_fn=collate, generator=torch.Generator()):
        yield batch.to(device)


@contextlib.contextmanager
def _measuring(model: nn.Module) -> Iterator[None]:
    """No gradients, dropout off, and the model's mode as it was afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
