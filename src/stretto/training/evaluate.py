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
from stretto.training.divergence import diverged
from stretto.training.task import AbstractTask, Reading, Score

EVALUATION_ROWS: Final = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Mean loss and metrics by name."""

    loss: float
    metrics: dict[str, float]


def evaluate(
    task: AbstractTask[Any], model: nn.Module, part: SequenceSet, *, device: str, final: bool = False
) -> Evaluation:
    """Measure the model on every sequence of `part`; `final` spends more time on decoding."""
    loss, count = 0.0, 0
    scores: dict[str, Score] = {}
    with _measuring(model):
        for batch in _batches(part, max_steps=task.config.max_steps, device=device):
            output = model(batch)
            summed = task.loss(output, batch)
            total = float(summed.total)
            if not math.isfinite(total):
                raise diverged(batch, total, where=f"in measuring {part.name}, on sequences")
            loss, count = loss + total, count + summed.count
            for name, score in (task.final_score if final else task.score)(output, batch).items():
                scores[name] = scores[name] + score if name in scores else score
    return Evaluation(loss=loss / max(1, count), metrics=task.summary(scores))


def show_readings(task: AbstractTask[Any], model: nn.Module, part: SequenceSet, *, device: str) -> list[Reading]:
    """What the model makes of every sequence of `part`, for a person to see."""
    with _measuring(model):
        batches = _batches(part, max_steps=task.config.max_steps, device=device)
        return [reading for batch in batches for reading in task.readings(model(batch), batch)]


def _batches(part: SequenceSet, *, max_steps: int | None, device: str) -> Iterator[Batch]:
    sampler = BucketSampler(part.lengths_N, batch_size=EVALUATION_ROWS, max_steps=max_steps, shuffle=False)
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
