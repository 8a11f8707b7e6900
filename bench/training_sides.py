"""The two sides of `stretto bench training`: a plain script, and the whole of Stretto on the same task."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, final

from torch import nn
from torch.optim.lr_scheduler import ConstantLR

from bench.training_contest import AbstractSide, Turn
from stretto.training import AbstractLog, AbstractTask, Trainer, evaluate

AFTER_UPDATES: Final = ("step", "warning")
"""Events that come right after an update."""


class PlainScript(Protocol):
    """What a plain script has."""

    @property
    def model(self) -> nn.Module:
        """The net."""

    def epoch(self) -> None:
        """Train one epoch."""

    def quality(self) -> float:
        """The metric on the validation part."""


@final
class PlainSide(AbstractSide):
    """A plain script.

    Args:
        script: What trains.
        batch_size: Of its batches.
    """

    def __init__(self, script: PlainScript, *, batch_size: int) -> None:
        self._script, self._batch_size = script, batch_size

    def turn(self) -> Turn:
        """Train one epoch and measure."""
        begun = time.perf_counter()
        self._script.epoch()
        seconds = time.perf_counter() - begun
        return Turn(seconds=seconds, value=self._script.quality(), batch_size=self._batch_size)


@final
class Stopwatch(AbstractLog):
    """Notes when the last update was done, and what was decided on batches.

    Args:
        batch_in_force: Tells the size of the batch that is trained with.

    Attributes:
        updated: By the clock, the end of the last update.
        batch_size: Of the epoch that ended last.
        probed: Seconds that went into timing steps before the first.
        decisions: On the batch, in words, those to keep it left out.
    """

    def __init__(self, batch_in_force: Callable[[], int]) -> None:
        self._batch_in_force = batch_in_force
        self.updated = time.perf_counter()
        self.batch_size = 0
        self.probed = 0.0
        self.decisions: list[str] = []

    def emit(self, kind: str, **values: Any) -> None:
        """Note an event."""
        if kind in AFTER_UPDATES:
            self.updated = time.perf_counter()
        elif kind == "epoch":
            # What is decided for the next epoch comes later.
            self.batch_size = self._batch_in_force()
        elif kind == "probe":
            self.probed += float(values["seconds"])
        elif kind == "batch" and values["action"] != "keep":
            self.decisions.append(f"after epoch {values['epoch']}, {values['action']} to {values['batch_size']}")

    def close(self) -> None:
        """Nothing is held."""


@final
class StrettoSide(AbstractSide):
    """A task trained by Stretto's own loop, as `stretto train` does.

    The clock runs from the beginning of an epoch to the end of its last update: probing for the batch, measuring the
    noise of gradients and epochs that were given up are counted; measuring quality and saving after the epoch are not.

    Args:
        task: Model, loss, metric and settings.
        run: A folder for checkpoints.

    Attributes:
        watch: What the loop told.
    """

    def __init__(self, task: AbstractTask[Any], *, run: Path) -> None:
        self._task = task
        self.watch = Stopwatch(lambda: self._trainer.state.batch_size)
        self._trainer = Trainer(task, run=run, log=self.watch, resume=False)
        self._is_over = False

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        return self._trainer.state.model

    def turn(self) -> Turn:
        """Train one epoch and measure; beyond the last that was planned, at the rate that the schedule ended with."""
        state = self._trainer.state
        if state.epoch >= self._task.config.epochs and not self._is_over:
            state.schedule = ConstantLR(state.optimizer, factor=1.0, total_iters=1)
            self._is_over = True
        begun, probed = time.perf_counter(), self.watch.probed
        record = self._trainer.train_epoch()
        return Turn(
            seconds=self.watch.updated - begun,
            value=record.value,
            batch_size=self.watch.batch_size,
            probed=self.watch.probed - probed,
        )

    def quality(self) -> float:
        """The metric on the validation part."""
        task = self._task
        found = evaluate(task, self.model, task.data.part("valid"), device=task.config.device)
        return found.metrics[task.metric]
