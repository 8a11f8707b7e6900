"""Loss and metrics over a part of the data."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from stretto.batching import Batch
from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.nn import fresh_state
from stretto.training.feeds import eval_batches
from stretto.training.solver import run_serially
from stretto.training.task import AbstractTask, Confusion, Sample, Score
from stretto.training.update import MAX_NAMED_SEQUENCES, diverged, gather_sequences

MAX_CONFUSED_CLASSES: Final = 512
"""Ranks add up the square of this many numbers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Mean loss and metrics by name; how classes were confused, if it is final and the task has 2 to 512 of them."""

    loss: float
    metrics: dict[str, float]
    confusion: Confusion | None = None


def evaluate(
    task: AbstractTask[Any],
    model: nn.Module,
    part: SequenceSet,
    *,
    device: str,
    final: bool = False,
    world: World | None = None,
    by_solver: bool = False,
    loss_only: bool = False,
) -> Evaluation:
    """Loss and metrics of the model on every sequence of `part`, divided among the ranks.

    `final` takes the task's `final_score`, for which more time may be spent. `by_solver` runs through time with the
    solver of training, instead of sequentially. `loss_only` leaves the metrics out, which may need much more time.
    """
    world = world or World()
    loss, count = 0.0, 0
    scores: dict[str, Score] = {}
    bad: list[int] = []
    confused = _ConfusionCounter(task) if final and not loss_only else None
    with evaluation_mode(model, by_solver=by_solver):
        for batch in task.eval_batches(part, world=world, device=device):
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
            if loss_only:
                continue
            if confused is not None:
                confused.add(output, batch)
            for name, score in (task.final_score if final else task.score)(output, batch).items():
                scores[name] = scores[name] + score if name in scores else score
    loss, total_count, *_ = world.all_reduce_sum([loss, float(count)])
    if not math.isfinite(loss):
        named = gather_sequences(bad, world, most=MAX_NAMED_SEQUENCES)
        raise diverged(named, loss, where=f"in the evaluation of {part.name}, on sequences")
    metrics = {} if loss_only else task.summary(_sum_scores(scores, world))
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise StrettoError(
                f"the metric {name!r} of the task {task.name!r} is {value} in the evaluation of {part.name}",
                fix=f"Let score and summary of {type(task).__name__} return finite numbers, also where nothing counts.",
            )
    return Evaluation(
        loss=loss / max(1.0, total_count),
        metrics=metrics,
        confusion=None if confused is None else confused.over(world),
    )


class _ConfusionCounter:
    """Counts of true and found classes; nothing where a task has none, or too many."""

    def __init__(self, task: AbstractTask[Any]) -> None:
        has_classes = type(task).classes is not AbstractTask.classes
        self._task, self._names = task, tuple(task.class_names) if has_classes else ()
        if not 2 <= len(self._names) <= MAX_CONFUSED_CLASSES:
            self._names = ()
        self._counts = torch.zeros(len(self._names) ** 2, dtype=torch.int64)
        self._has_unknown = False

    def add(self, output: torch.Tensor, batch: Batch) -> None:
        """Count what a batch has."""
        if self._names:
            true_P, found_P = self._task.classes(output, batch)
            size = len(self._names)
            if not all(bool(((numbers_P >= 0) & (numbers_P < size)).all()) for numbers_P in (true_P, found_P)):
                # An error here and now would leave the other ranks waiting for this one.
                self._has_unknown = True
                return
            self._counts += torch.bincount((true_P * size + found_P).cpu(), minlength=size**2)

    def over(self, world: World) -> Confusion | None:
        """Summed over ranks."""
        if not self._names:
            return None
        size = len(self._names)
        unknown, *counts = world.all_reduce_sum([float(self._has_unknown), *self._counts.double().tolist()])
        if unknown:
            raise StrettoError(
                f"the task {self._task.name!r} has {size} class names and found a class with another number",
                fix=f"Let {type(self._task).__name__}.classes return integers from 0 to {size - 1}.",
            )
        pairs = ((at // size, at % size, int(count)) for at, count in enumerate(counts) if count)
        return Confusion(names=self._names, pairs=tuple(pairs))


def _sum_scores(scores: dict[str, Score], world: World) -> dict[str, Score]:
    """Scores summed over ranks; a rank without sequences has none to add."""
    names = _gather_score_names(scores, world)
    own = [scores.get(name, Score(amount=0.0, count=0.0)) for name in names]
    sums = iter(world.all_reduce_sum([value for score in own for value in (score.amount, score.count)]))
    return {name: Score(amount=next(sums), count=next(sums)) for name in names}


def _gather_score_names(scores: dict[str, Score], world: World) -> list[str]:
    """The names of all ranks' scores: rank 0 may have no sequences, and so no names."""
    letters = list("\n".join(scores).encode())
    room = int(max(row[0] for row in world.all_gather([float(len(letters))])))
    found = world.all_gather([*map(float, letters), *[float(ord("\n"))] * (room - len(letters))])
    return sorted({name for row in found for name in bytes(map(int, row)).decode().splitlines() if name})


def sample_predictions(task: AbstractTask[Any], model: nn.Module, part: SequenceSet, *, device: str) -> list[Sample]:
    """Targets and predictions of every sequence of `part`, for the report."""
    with evaluation_mode(model):
        batches = eval_batches(
            part,
            max_padded_steps=task.config.max_padded_steps,
            device=device,
            world=World(),
            lengths=task.bucket_lengths(part),
        )
        return [sample for batch in batches for sample in task.samples(model(batch), batch)]


@contextlib.contextmanager
def evaluation_mode(model: nn.Module, *, by_solver: bool = False) -> Iterator[None]:
    """No gradients, dropout off, nothing carried, sequential; afterwards the model is as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), fresh_state(model), contextlib.nullcontext() if by_solver else run_serially(model):
            yield
    finally:
        model.train(was_training)
