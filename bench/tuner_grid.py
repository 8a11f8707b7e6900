"""Batches that are given, each to the same target, beside the batch that the engine chooses: times and updates."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Final, Literal, final

from bench.tuner_cases import BatchSize, Case, made_task
from bench.tuner_noise import NoiseAlong, noise_along, predicted_updates
from bench.tuner_run import Aim, Run, run_to_target
from stretto.data import SequenceSet

MULTIPLES: Final = (1, 2, 4, 8, 16)
QUICK_MULTIPLES: Final = (1, 2)
WITHIN: Final = 0.10
"""How much longer than the best of the grid the engine's batch may take."""
STEPS_WITHIN: Final = 0.35
"""How far off predicted updates may be."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepsRow:
    """Updates to the target at one batch.

    Attributes:
        batch_size: Sequences an update.
        predicted: From the base batch and the noise that was measured there, the median over rounds.
        observed: The median over rounds; infinite where the target was not reached in most.
    """

    batch_size: int
    predicted: float
    observed: float

    @property
    def error(self) -> float:
        """How far off the prediction is, relative to what was observed; -1 where the target was not reached."""
        return self.predicted / self.observed - 1.0

    @property
    def is_within(self) -> bool:
        """Whether it is as near as it should be."""
        return abs(self.error) <= STEPS_WITHIN


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """All runs of one task.

    Attributes:
        task: Its name.
        data: What it was trained on.
        sequences: Of training.
        base_batch_size: The batch that the settings belong to.
        loss: The target.
        given: Runs by the batch that they were given, one a round.
        auto: Runs that chose their batch, one a round.
        noise: Along the run at the base batch, one a round; None where it could not be told.
    """

    task: str
    data: str
    sequences: int
    base_batch_size: int
    loss: float
    given: dict[int, tuple[Run, ...]]
    auto: tuple[Run, ...]
    noise: tuple[NoiseAlong | None, ...]

    def seconds(self, batch_size: int) -> float:
        """To the target, the median over rounds; infinite where most did not reach it."""
        return median_to_target(self.given[batch_size], "seconds")

    @property
    def auto_seconds(self) -> float:
        """The same where the batch was chosen, without the probe."""
        return median_to_target(self.auto, "seconds")

    @property
    def probe_seconds(self) -> float:
        """Of the probe, the median over rounds."""
        return statistics.median(run.probe_seconds for run in self.auto)

    @property
    def best(self) -> int:
        """The batch of the grid that was fastest."""
        return min(self.given, key=lambda size: (self.seconds(size), size))

    @property
    def chosen(self) -> int:
        """The batch that the engine settled on, the lower median over rounds."""
        return statistics.median_low(run.last_batch for run in self.auto)

    @property
    def has_grown(self) -> bool:
        """Whether that is more than the base batch."""
        return self.chosen > self.base_batch_size

    @property
    def batch_ratio(self) -> float | None:
        """Time to the target at the chosen batch over that at the best, both given; None if it is not in the grid."""
        if self.chosen not in self.given:
            return None
        return _over(self.seconds(self.chosen), self.seconds(self.best))

    @property
    def run_ratio(self) -> float:
        """Time to the target of the run that chose its batch over the best of the grid, without the probe."""
        return _over(self.auto_seconds, self.seconds(self.best))

    @property
    def is_within(self) -> bool:
        """Whether the engine's batch is as near to the best as it should be; beyond the grid, its own run counts."""
        ratio = self.run_ratio if self.batch_ratio is None else self.batch_ratio
        return ratio <= 1.0 + WITHIN

    @property
    def noise_scale(self) -> float | None:
        """Along the run at the base batch, the median over rounds; None if it could not be told."""
        known = [along.mean for along in self.noise if along is not None]
        return statistics.median(known) if known else None

    @property
    def steps(self) -> tuple[StepsRow, ...]:
        """Updates to the target, predicted and observed; empty if noise could not be told."""
        pairs = [
            (run.updates if run.is_reached else math.inf, along.mean)
            for run, along in zip(self.given[self.base_batch_size], self.noise, strict=True)
            if along is not None
        ]
        if not pairs:
            return ()
        return tuple(
            StepsRow(
                batch_size=size,
                predicted=statistics.median(
                    predicted_updates(updates, noise_scale=phi, base_batch_size=self.base_batch_size, batch_size=size)
                    for updates, phi in pairs
                ),
                observed=median_to_target(runs, "updates"),
            )
            for size, runs in self.given.items()
            if size != self.base_batch_size
        )


def median_to_target(runs: Sequence[Run], what: Literal["seconds", "updates"]) -> float:
    """Seconds or updates to the target, the upper median; one that did not reach it counts as never."""
    return float(statistics.median_high(float(getattr(run, what)) if run.is_reached else math.inf for run in runs))


def _over(seconds: float, best: float) -> float:
    """A ratio of times; not a number where nothing has reached the target."""
    return math.nan if math.isinf(best) else seconds / best


def run_grid(
    name: str,
    case: Case,
    data: SequenceSet,
    *,
    multiples: Sequence[int],
    seeds: int,
    rounds: int,
    tell: Callable[[str], None],
) -> Grid:
    """Train at every batch of the grid, and at a batch that is chosen, all in turn, round after round.

    Args:
        name: The task.
        case: Its settings.
        data: What it is trained on.
        multiples: Of the base batch, the grid.
        seeds: First weights and orders of data, one a round.
        rounds: Of each seed.
        tell: Called with how far it is.
    """
    base = case.base_batch_size
    sizes = [base * multiple for multiple in multiples]
    contestants: list[BatchSize] = [*sizes, "auto"]
    runs: dict[BatchSize, list[Run]] = {size: [] for size in contestants}
    noise: list[NoiseAlong | None] = []
    # Kernels are built, or found in the cache, before anything is timed.
    run_to_target(made_task(name, case, data, batch_size=base, seed=0), Aim(loss=math.inf, every=1))
    for number in range(seeds * rounds):
        seed, turned = number % seeds, number % len(contestants)
        # Another one is first in each round.
        for size in contestants[turned:] + contestants[:turned]:
            tell(f"round {number + 1} of {seeds * rounds}, batch {size}")
            runs[size].append(run_to_target(made_task(name, case, data, batch_size=size, seed=seed), case.aim))
        tell(f"round {number + 1} of {seeds * rounds}, noise along the way")
        given = made_task(name, case, data, batch_size=base, seed=seed)
        noise.append(noise_along(given, updates=runs[base][-1].updates))
    return Grid(
        task=name,
        data=data.name,
        sequences=len(data.part("train")),
        base_batch_size=base,
        loss=case.loss,
        given={size: tuple(runs[size]) for size in sizes},
        auto=tuple(runs["auto"]),
        noise=tuple(noise),
    )
