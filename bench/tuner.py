"""`python -m bench tuner`: the batch size that the tuner chooses against a grid of fixed ones, and its cost."""

import dataclasses
import math
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, final, get_args

from bench.harness import Count, Report, Settings, bench
from bench.task_data import NO_CHECKPOINTS, check_tasks, open_data, take_share
from stretto.data import PARTS, Part, SequenceSet
from stretto.errors import StrettoError
from stretto.tasks import find_task
from stretto.training import AbstractLog, AbstractTask, Trainer, evaluate, validate

TaskName = Literal["digits", "digits-momentum", "digit-images", "language-model", "handwriting"]
TASK_NAMES: Final[tuple[TaskName, ...]] = get_args(TaskName)
BatchSize = int | Literal["auto"]
MULTIPLES: Final = (1, 2, 4, 8, 16)
QUICK_MULTIPLES: Final = (1, 2)
MAX_RATIO: Final = 1.1
"""How much longer than the best of the grid the chosen batch may take."""
SMOOTHED: Final = 3
"""Validation losses whose median is compared with the target."""
SCHEDULE: Final[dict[str, Any]] = {"schedule": "constant", "warmup_epochs": 0.05}
"""A constant rate: the time to a target must not depend on the number of planned epochs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunerSettings(Settings):
    """Train to a target at given batch sizes and at one that the tuner chooses.

    Attributes:
        data: A folder with the data set mnist, of which a part is used for digits and digit-images; left out, drawn
            digits are. The language-model and handwriting train on embedded data.
        tasks: What to train; digits with Adam, and with the momentum of the published experiment.
        seeds: Initial weights and orders of data, one per round over all batch sizes. Updates to a target differ by
            half from one to the other.
        rounds: Rounds of each seed.
    """

    data: Path | None = None
    tasks: tuple[TaskName, ...] = TASK_NAMES
    seeds: Count = 5
    rounds: Count = 1

    def __post_init__(self) -> None:
        check_tasks(self.tasks, TASK_NAMES)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A task as it is trained here, small enough to run many times.

    Rates are those that need the fewest updates at the base batch, with other seeds than the benchmark's; the language
    model has its task's default.
    """

    base_batch_size: int  # that the settings belong to
    target: float  # validation loss
    epochs: int  # at most; a larger batch needs more of them
    sequences: int  # of training, at most
    settings: dict[str, Any]  # others of the task
    valid_sequences: int = 400  # at most
    measure_every: int = 20  # updates of the base batch; larger batches are measured after as many sequences
    embedded: bool = False  # whether the target is for the embedded data, which are then always used
    task: str = ""  # its name, if it is not the case's own

    @property
    def quick(self) -> "Case":
        """A few epochs on little data, to a target that any run reaches."""
        return dataclasses.replace(
            self,
            base_batch_size=4,
            target=1e3,
            epochs=4,
            sequences=160,
            valid_sequences=8,
            settings={**self.settings, "hidden_size": 8},
            measure_every=8,
        )


DIGITS: Final = Case(
    base_batch_size=16,
    target=0.3,
    epochs=24,
    sequences=4000,
    settings={"hidden_size": 64, "row_size": 64, "optimizer": "adam", "learning_rate": 3e-3},
)
CASES: Final[dict[str, Case]] = {
    "digits": DIGITS,
    "digits-momentum": dataclasses.replace(
        DIGITS,
        task="digits",
        settings={"hidden_size": 64, "row_size": 64, "optimizer": "momentum", "learning_rate": 0.03},
    ),
    "digit-images": Case(
        base_batch_size=16,
        target=0.25,
        epochs=40,
        sequences=2600,
        settings={"hidden_size": 64, "learning_rate": 0.04},
    ),
    "language-model": Case(
        base_batch_size=8,
        target=3.2,
        epochs=24,
        sequences=5000,
        valid_sequences=100,
        settings={"hidden_size": 64, "learning_rate": 4e-3},
        embedded=True,
    ),
    "handwriting": Case(
        base_batch_size=4,
        target=1.0,
        epochs=24,
        sequences=1200,
        valid_sequences=100,
        settings={"hidden_size": 48, "learning_rate": 0.02},
        embedded=True,
    ),
}


@bench("tuner", title="The batch size that the tuner chooses, against a grid")
def run(settings: TunerSettings, report: Report) -> None:
    """Train every task over the grid and with the tuner."""
    if settings.quick:
        settings = dataclasses.replace(settings, seeds=1, rounds=1)
    rows: list[tuple[str | int | float | bool | None, ...]] = []
    for name in settings.tasks:
        case = CASES[name].quick if settings.quick else CASES[name]
        data = cut_data(name, case, folder=settings.data)
        multiples = QUICK_MULTIPLES if settings.quick else MULTIPLES
        grid = run_grid(name, case, data, multiples, settings, progress=report.progress)
        faults = [run.fault for runs in (*grid.given.values(), grid.tuned) for run in runs if run.fault]
        for fault in dict.fromkeys(faults):
            report.note(f"{name}: a run ended early: {fault}")
        rows.append(
            (
                *(f"{name}, {case.base_batch_size}", case.target),
                " ".join(f"{size}: {grid.seconds(size):.3g}" for size in grid.given),
                *(grid.best, grid.chosen, grid.batch_ratio, grid.run_ratio, grid.overhead),
                " ".join(f"{size}: {median_to_target(runs, 'updates'):g}" for size, runs in grid.given.items()),
            )
        )
        if not settings.quick:
            report.goal(f"{name}: chosen batch over the best", grid.chosen_ratio, at_most=MAX_RATIO)
        # After each task, so that an interrupted run keeps what it has.
        report.table(
            title="Time to the target",
            columns=(
                *("task, base batch", "target loss", "s to the target by batch", "best", "chosen"),
                *("chosen / best", "tuned run / best", "overhead %", "updates by batch"),
            ),
            rows=rows,
            caption=f"Medians over {settings.seeds * settings.rounds} rounds, all batches in turn; inf: not "
            "reached. chosen / best: time at the chosen batch, given from the start, over that at the best of the "
            "grid; none if it is not in the grid. tuned run / best: the run that chose its batch, without the "
            "probe. overhead: the probe, as a fraction of that run.",
        )


# One run -------------------------------------------------------------------------------------------------------------


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a run went."""

    last_batch: int  # sequences per update at the end
    is_reached: bool  # whether the target was
    updates: int  # until then, or all
    seconds: float  # of these updates, with everything that choosing a batch costs but the probe, without measuring
    probe_seconds: float = 0.0
    fault: str = ""  # the error that ended it early, if any


class _TargetReachedError(Exception):
    """Ends a run at its target, from within the training loop."""


@final
class _Clock(AbstractLog):
    """Counts the seconds of updates, and measures after `every` sequences while the clock stands still.

    It ends the run when the median of three losses is no higher than the target.
    """

    def __init__(self, measure: Callable[[], float], *, target: float, every: int) -> None:
        self._measure, self._target, self._every = measure, target, every
        self._recent: deque[float] = deque(maxlen=SMOOTHED)
        self._sequences, self._mark = 0, time.perf_counter()
        self.updates, self.seconds, self.probe_seconds = 0, 0.0, 0.0

    def start(self) -> None:
        """Let the clock run."""
        self._mark = time.perf_counter()

    def emit(self, kind: str, **values: Any) -> None:
        """Note an event; raises when the target is reached."""
        elapsed = time.perf_counter() - self._mark
        if kind == "probe":
            self.probe_seconds += elapsed
        elif kind == "warning" or (kind == "batch" and values["action"] == "roll-back"):
            self.seconds += elapsed
        elif kind == "update":
            self.updates += 1
            self.seconds += elapsed
            self._sequences += values["rows"]
            if self._sequences >= self._every:
                self._sequences = 0
                self._recent.append(self._measure())
                if len(self._recent) == SMOOTHED and statistics.median(self._recent) <= self._target:
                    raise _TargetReachedError
        # After an epoch the loop measures and saves; the clock starts again with the next.
        self.start()


def run_to_target(task: AbstractTask[Any], *, target: float, every: int) -> Run:
    """Train by Stretto's own loop until the target is reached, or all epochs are done."""
    part = task.data.part("valid")

    def measure() -> float:
        return evaluate(task, trainer.model, part, device=task.config.device).loss

    clock = _Clock(measure, target=target, every=every)
    is_reached, fault = False, ""
    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        trainer = Trainer(task, run=Path(place), log=clock, resume=False)
        try:
            for _ in range(task.config.epochs):
                clock.start()
                trainer.train_epoch()
        except _TargetReachedError:
            is_reached = True
        except StrettoError as error:
            fault = error.problem
    return Run(
        last_batch=trainer.state.batch_size,
        is_reached=is_reached,
        updates=clock.updates,
        seconds=clock.seconds,
        probe_seconds=clock.probe_seconds,
        fault=fault,
    )


def cut_data(name: str, case: Case, *, folder: Path | None) -> SequenceSet:
    """The part of the task's data that is used."""
    data, _ = open_data(case.task or name, None if case.embedded else folder)
    wanted: tuple[tuple[Part, int], ...] = (("train", case.sequences), ("valid", case.valid_sequences))
    for part, most in wanted:
        count = int((data.split_N == PARTS.index(part)).sum())
        if count > most:
            data = take_share(data, part=part, share=most / count, seed=0)
    return data


def make_task(name: str, case: Case, data: SequenceSet, *, batch_size: BatchSize, seed: int) -> AbstractTask[Any]:
    """The task with a batch that is given, or "auto"; rate and warm-up follow from the base batch."""
    values = {
        **case.settings,
        **SCHEDULE,
        "epochs": case.epochs,
        "batch_size": batch_size,
        "base_batch_size": case.base_batch_size,
        "seed": seed,
        "checkpoint_minutes": NO_CHECKPOINTS,
    }
    kind = case.task or name
    return find_task(kind)(validate(find_task(kind).Config, values, source="the benchmark"), data)


# The grid ------------------------------------------------------------------------------------------------------------


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """All runs of one task: those of given batch sizes, and those that chose theirs, one per round."""

    given: dict[int, tuple[Run, ...]]
    tuned: tuple[Run, ...]

    def seconds(self, batch_size: int) -> float:
        """To the target, the median over rounds; infinite if most did not reach it."""
        return median_to_target(self.given[batch_size], "seconds")

    @property
    def best(self) -> int:
        """The fastest batch size of the grid."""
        return min(self.given, key=lambda size: (self.seconds(size), size))

    @property
    def chosen(self) -> int:
        """The batch size that the tuner ended with, the lower median over rounds."""
        return statistics.median_low(run.last_batch for run in self.tuned)

    @property
    def batch_ratio(self) -> float | None:
        """Time to the target at the chosen batch over that at the best, both given; None outside the grid."""
        return _ratio(self.seconds(self.chosen), self.seconds(self.best)) if self.chosen in self.given else None

    @property
    def run_ratio(self) -> float:
        """Time to the target of the run that chose its batch, without the probe, over the best of the grid."""
        return _ratio(median_to_target(self.tuned, "seconds"), self.seconds(self.best))

    @property
    def chosen_ratio(self) -> float:
        """`batch_ratio`, or outside the grid `run_ratio`."""
        return self.run_ratio if self.batch_ratio is None else self.batch_ratio

    @property
    def overhead(self) -> float:
        """The probe in percent of the run that chose its batch, the median over rounds."""
        return statistics.median(100 * run.probe_seconds / max(1e-9, run.seconds) for run in self.tuned)


def median_to_target(runs: Sequence[Run], what: Literal["seconds", "updates"]) -> float:
    """Seconds or updates to the target, the upper median; a run that did not reach it counts as infinite."""
    return float(statistics.median_high(float(getattr(run, what)) if run.is_reached else math.inf for run in runs))


def _ratio(seconds: float, best: float) -> float:
    return math.nan if math.isinf(best) else seconds / best


def run_grid(
    name: str,
    case: Case,
    data: SequenceSet,
    multiples: Sequence[int],
    settings: TunerSettings,
    *,
    progress: Callable[[str], None],
) -> Grid:
    """Train at every multiple of the base batch, and with the tuner, all in turn, round after round."""
    sizes = [case.base_batch_size * multiple for multiple in multiples]
    contenders: list[BatchSize] = [*sizes, "auto"]
    runs: dict[BatchSize, list[Run]] = {size: [] for size in contenders}
    # Kernels are compiled, or found in the cache, before anything is timed.
    warm_up = make_task(name, case, data, batch_size=sizes[0], seed=0)
    run_to_target(warm_up, target=math.inf, every=1)
    num_rounds = settings.seeds * settings.rounds
    for number in range(num_rounds):
        first = number % len(contenders)
        # Another one is first in each round.
        for size in contenders[first:] + contenders[:first]:
            progress(f"{name}: round {number + 1} of {num_rounds}, batch {size}")
            task = make_task(name, case, data, batch_size=size, seed=number % settings.seeds)
            every = case.measure_every * case.base_batch_size
            runs[size].append(run_to_target(task, target=case.target, every=every))
    return Grid(given={size: tuple(runs[size]) for size in sizes}, tuned=tuple(runs["auto"]))
