"""One training run until a target is reached: how many updates it took, and how many seconds of updates."""

import dataclasses
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

from stretto.errors import StrettoError
from stretto.training import AbstractLog, AbstractTask, Trainer, evaluate

SMOOTHED: Final = 3
"""Measurements of the validation loss whose median is held against the target."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """When training is done.

    Attributes:
        loss: Of the validation part: where its median over three measurements is no higher, the target is reached.
        every: Training sequences between measurements.
    """

    loss: float
    every: int


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A measurement on the way.

    Attributes:
        updates: Done.
        seconds: Of updates so far, without probing.
        loss: Smoothed, of the validation part.
    """

    updates: int
    seconds: float
    loss: float


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a run went.

    Attributes:
        first_batch: Sequences of an update at the beginning.
        last_batch: The same at the end.
        is_reached: Whether the target was.
        updates: Until then, or all that were made.
        seconds: Of these updates, with all that choosing a batch costs but the probe; measuring is not counted.
        probe_seconds: Of the probe.
        points: On the way.
        decisions: On the batch, one an epoch: what was done, the batch, and the noise scale, None where it was not
            known.
        table: What the probe found, as `ThroughputTable.to_dict`; None without one.
        fault: What ended it before its time; empty if nothing did.
    """

    first_batch: int
    last_batch: int
    is_reached: bool
    updates: int
    seconds: float
    probe_seconds: float = 0.0
    points: tuple[Point, ...] = ()
    decisions: tuple[tuple[str, int, float | None], ...] = ()
    table: dict[str, Any] | None = None
    fault: str = ""


class _ReachedError(Exception):
    """Ends a run at its target, from within the loop."""


@final
class _Watch(AbstractLog):
    """Stops the clock after each update, and now and then measures while it stands.

    Args:
        measure: Gives the validation loss.
        aim: When to end the run.
    """

    def __init__(self, measure: Callable[[], float], aim: Aim) -> None:
        self._measure, self._aim = measure, aim
        self._recent: deque[float] = deque(maxlen=SMOOTHED)
        self._since, self._mark = 0, time.perf_counter()
        self.updates, self.seconds, self.probe_seconds = 0, 0.0, 0.0
        self.points: list[Point] = []
        self.decisions: list[tuple[str, int, float | None]] = []
        self.table: dict[str, Any] | None = None

    def start(self) -> None:
        """Let the clock run."""
        self._mark = time.perf_counter()

    def emit(self, kind: str, **values: Any) -> None:
        """Note an event; raises where the target is reached."""
        passed = time.perf_counter() - self._mark
        if kind == "probe":
            self.probe_seconds += passed
            self.table = values["table"]
        elif kind == "batch":
            self.decisions.append((values["action"], values["batch_size"], values["noise_scale"]))
            if values["action"] == "roll-back":
                self.seconds += passed
        elif kind == "step":
            self.updates += 1
            self.seconds += passed
            self._since += values["rows"]
            if self._since >= self._aim.every:
                self._since = 0
                self._look()
        elif kind == "warning":
            self.seconds += passed
        # After an epoch the loop measures and saves, and the clock is started anew for the next.
        self.start()

    def close(self) -> None:
        """Nothing is held."""

    def _look(self) -> None:
        self._recent.append(self._measure())
        loss = statistics.median(self._recent)
        self.points.append(Point(updates=self.updates, seconds=self.seconds, loss=loss))
        if len(self._recent) == SMOOTHED and loss <= self._aim.loss:
            raise _ReachedError


def run_to_target(task: AbstractTask[Any], aim: Aim) -> Run:
    """Train by Stretto's own loop until the target is reached, or all epochs are done.

    The clock runs from the beginning of an epoch to the end of its last update. Measuring the validation loss, within
    an epoch and after it, and saving are not counted.

    Args:
        task: Model, loss, data and settings.
        aim: When it is done.
    """
    part = task.data.part("valid")

    def measure() -> float:
        return evaluate(task, trainer.state.model, part, device=task.config.device).loss

    watch = _Watch(measure, aim)
    is_reached, fault = False, ""
    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        trainer = Trainer(task, run=Path(place), log=watch, resume=False)
        first = trainer.state.batch_size
        try:
            for _ in range(task.config.epochs):
                watch.start()
                trainer.train_epoch()
        except _ReachedError:
            is_reached = True
        except StrettoError as error:
            fault = error.problem
    return Run(
        first_batch=first,
        last_batch=trainer.state.batch_size,
        is_reached=is_reached,
        updates=watch.updates,
        seconds=watch.seconds,
        probe_seconds=watch.probe_seconds,
        points=tuple(watch.points),
        decisions=tuple(watch.decisions),
        table=watch.table,
        fault=fault,
    )
