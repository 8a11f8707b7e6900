"""What choosing costs while it changes nothing: updates that are watched beside updates that are not, in turn."""

import dataclasses
import math
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, final

import torch

from stretto.batching import Batch
from stretto.distributed import World
from stretto.large_batch import ThroughputTable
from stretto.training import AbstractTask, BatchTuning, TrainState, Updater

BLOCK: Final = 256
"""Updates of a turn: as many as from one look at the curvature to the next."""
CHUNK: Final = 8
"""Updates of one side before the other's: what else the machine does meanwhile meets both alike."""
WARM_UP: Final = 3
"""Turns that are not counted: at first more updates are taken apart, to know the noise soon."""
GOAL: Final = 0.05


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Seconds of turns of 256 updates.

    Attributes:
        task: Its name.
        batch_size: Sequences an update.
        given: Turns with the batch given.
        watched: The same turns with noise, curvature and guard, at the same batch, eight updates of each by turns.
        first: How much longer the three turns before these take, in which noise is measured more often; relative.
    """

    task: str
    batch_size: int
    given: tuple[float, ...]
    watched: tuple[float, ...]
    first: float

    @property
    def share(self) -> float:
        """How much longer watched updates take than those between them, the median over turns."""
        return statistics.median(ours / theirs for ours, theirs in zip(self.watched, self.given, strict=True)) - 1.0


@final
class _Lane:
    """Updates of a task, one after the other, epoch after epoch.

    Args:
        task: With a batch that is given, or to be chosen; then by a table under which it stays.
    """

    def __init__(self, task: AbstractTask[Any]) -> None:
        config = task.config
        self._device, self._epochs = config.device, config.epochs
        self._feed = task.feed(world=World())
        torch.manual_seed(config.seed)
        model = task.build_model().to(config.device)
        self.state = TrainState(model, config=config, steps_per_epoch=len(self._feed), batch_size=self._feed.batch_size)
        self._tuning: BatchTuning | None = None
        if config.batch_size == "auto":
            self._tuning = BatchTuning(task, self.state, self._feed, world=World())
            # One size alone: a larger batch would be accumulated, and take as many times as long.
            table = ThroughputTable.of({self._feed.batch_size: 1.0})
            self._tuning.load_state_dict({**self._tuning.state_dict(), "table": table.to_dict()})
        self._updater = Updater(
            task, self.state, world=World(), stop=threading.Event(), measures_noise=self._tuning is not None
        )
        self._batches = self._dealt()
        model.train()

    def run(self, updates: int) -> float:
        """Make so many updates; their seconds."""
        begun = time.perf_counter()
        for _ in range(updates):
            self._update(next(self._batches))
        return time.perf_counter() - begun

    def _dealt(self) -> Iterator[Batch]:
        while True:
            self._feed.begin_epoch(self.state.epoch, self.state.model)
            self._updater.weigh(self._feed)
            yield from self._feed
            self.state.epoch += 1
            if self._tuning is not None and self.state.epoch < self._epochs:
                self._tuning.decide(self.state.epoch, clipped=0.0)

    def _update(self, batch: Batch) -> None:
        tuning, state = self._tuning, self.state
        self._updater.begin(measured=tuning is not None and tuning.is_measured(state.step))
        self._updater.add(batch.to(self._device), is_last=True)
        state.step += 1
        if tuning is not None:
            tuning.observe(self._updater, batch)


def measure_overhead(given: AbstractTask[Any], watched: AbstractTask[Any], *, turns: int) -> Overhead:
    """Time updates with and without all that the engine measures, in turn.

    Args:
        given: A task with the batch given.
        watched: The same with the batch to be chosen, from the same one on.
        turns: Of each, 256 updates a turn.
    """
    earlier = torch.get_rng_state()
    try:
        lanes = _Lane(given), _Lane(watched)
        taken = [_turn(lanes) for _ in range(turns + WARM_UP)]
    finally:
        torch.set_rng_state(earlier)
    counted = taken[WARM_UP:]
    theirs, ours = (math.fsum(turn[side] for turn in taken[:WARM_UP]) for side in (0, 1))
    return Overhead(
        task=given.name,
        batch_size=lanes[0].state.batch_size,
        given=tuple(given for given, _ in counted),
        watched=tuple(watched for _, watched in counted),
        first=ours / theirs - 1.0,
    )


def _turn(lanes: tuple[_Lane, _Lane]) -> list[float]:
    """Seconds of 256 updates of each."""
    seconds = [0.0, 0.0]
    for number, begun in enumerate(range(0, BLOCK, CHUNK)):
        # Each is first as often as the other.
        for side in (0, 1) if number % 2 else (1, 0):
            seconds[side] += lanes[side].run(min(CHUNK, BLOCK - begun))
    return seconds
