"""How far a run is, and how it goes on when its batches change."""

import math
from typing import final

from stretto.large_batch import Decision
from stretto.training.batch_tuning import BatchTuning
from stretto.training.config import TrainConfig
from stretto.training.feed import AbstractFeed
from stretto.training.state import TrainState


@final
class Position:
    """The place of a run in its data and in its schedule, which stay in step whatever the batches are.

    Args:
        state: What is trained.
        feed: Deals the batches.
        config: Epochs and rates.
        workers: Those that share the data.
        tuning: Chooses the batch, if it is not given.
    """

    def __init__(
        self, state: TrainState, feed: AbstractFeed, *, config: TrainConfig, workers: int, tuning: BatchTuning | None
    ) -> None:
        self._state, self._feed, self._config = state, feed, config
        self._workers, self._tuning = workers, tuning

    @property
    def accumulate(self) -> int:
        """Batches of one worker that make an update."""
        return self._config.accumulate if self._tuning is None else self._tuning.accumulate

    @property
    def left(self) -> float:
        """The share of the epoch under way that is to come."""
        return self._feed.left * (1 - self._state.used / max(1, len(self._feed)))

    @property
    def updates_left(self) -> int:
        """Updates until the end, if batches stay as they are."""
        epochs_after = self._config.epochs - self._state.epoch - 1
        return self._updates(len(self._feed) - self._state.used) + epochs_after * self._updates(self._feed.whole_epoch)

    def keep_schedule(self) -> None:
        """Let the schedule keep its place, counted in updates of the batches from now on."""
        left = self.updates_left
        progress = (self._state.epoch + 1 - self.left) / self._config.epochs
        self._state.reschedule(
            self._config,
            done=round(left * progress / (1 - progress)),
            remaining=left,
            batch_size=self._feed.batch_size * self._workers * self.accumulate,
        )

    def go_on(self, decision: Decision) -> None:
        """Go on with the batch that was decided on: what is left of the epoch is dealt anew."""
        assert self._tuning is not None
        if not self._state.used:
            self._feed.begin_epoch(self._state.epoch, self._state.model)
        if decision.action != "keep":
            self._feed.resize(self._tuning.rows, used=self._state.used)
            self._state.used = 0
            self.keep_schedule()

    def _updates(self, steps: int) -> int:
        return math.ceil(steps / self.accumulate)
