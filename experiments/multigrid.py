"""The multigrid experiment: a GRU trained by solvers in time, at ever longer sequences.

After Moon and Cyr, "Parallel training of GRU networks with a multi-grid solver for long sequences" (ICLR 2022), who
train on windows of 128 steps of what phones record of people: the same net, the same batches, step after step, by
multigrid at the published settings, and by multiple shooting, exact and with carried boundaries. Contestants train an
epoch each in turn, so that a change of the machine's load hits all of them.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import torch

from bench.machine import Machine, machine_with
from experiments.multigrid_contestant import SERIAL, WAYS, Contestant, Lesson, chunks_for
from experiments.multigrid_pieces import Course, Recordings, course_of, open_recordings
from experiments.multigrid_settings import WHOLE, Length, MultigridSettings
from stretto.errors import StrettoError
from stretto.files import write_text_atomically


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CourseTold:
    """What was learnt at one length.

    Attributes:
        length: As it was asked for.
        num_train: Training sequences.
        num_test: Test sequences.
        median_steps: Of a training sequence.
        train_steps: Of all training sequences.
        batch_size: Sequences of a batch.
        chunks: Of the longest sequence, for carried boundaries.
        left_out: Sequences that have not the labels they should have: windows with more than one, or with none, or one
            that was not asked for; others without any.
    """

    length: Length
    num_train: int
    num_test: int
    median_steps: int
    train_steps: int
    batch_size: int
    chunks: int
    left_out: int


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MultigridRow:
    """One contestant at one length.

    Attributes:
        length: Of the sequences.
        way: Who walked through time.
        initial_loss: Step after step, on the first batch before the first update.
        median_seconds: Of an epoch's updates.
        least_seconds: The same.
        speed_up: Time of an epoch step after step over this one's: median of the ratios of interleaved epochs.
        loss_gap: The largest relative difference of an epoch's loss from that of step after step.
        epochs: One after another.
    """

    length: Length
    way: str
    initial_loss: float
    median_seconds: float
    least_seconds: float
    speed_up: float
    loss_gap: float
    epochs: tuple[Lesson, ...]

    @property
    def last(self) -> Lesson:
        """The last epoch."""
        return self.epochs[-1]

    @property
    def fell_back(self) -> float:
        """Share of all batches that were walked step after step in the end."""
        return sum(epoch.fell_back for epoch in self.epochs) / sum(epoch.batches for epoch in self.epochs)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MultigridResult:
    """The experiment.

    Attributes:
        data: Its name.
        recordings: Those trained on, and those tested on.
        courses: One a length.
        rows: Every length and contestant, in this order, step after step first.
        threads: torch's.
        machine: Where it ran.
        settings: As used.
    """

    data: str
    recordings: tuple[int, int]
    courses: tuple[CourseTold, ...]
    rows: tuple[MultigridRow, ...]
    threads: int
    machine: Machine
    settings: dict[str, Any]

    def at(self, length: Length) -> tuple[MultigridRow, ...]:
        """The rows of one length."""
        return tuple(row for row in self.rows if row.length == length)

    def to_json(self) -> str:
        """The content of `multigrid.json`."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False) + "\n"


def reproduce_multigrid(settings: MultigridSettings, *, tell: Callable[[str], None] | None = None) -> MultigridResult:
    """Run the experiment and write `multigrid.json`.

    Args:
        settings: What to run.
        tell: If given, called with a line at the start of each length and after every epoch.

    Raises:
        StrettoError: If the data do not fit, or training diverges.
    """
    if not settings.lengths:
        raise StrettoError("there are no lengths", fix="Give some, such as --lengths 128 whole.")
    sizes = settings.tiny() if settings.quick else settings
    tell = tell or (lambda _: None)
    recordings = open_recordings(sizes)
    # All are cut first: a length that has nothing to learn is refused before hours are spent on another.
    courses = [course_of(recordings, length, sizes) for length in _in_order(sizes.lengths)]
    rows: list[MultigridRow] = []
    for course in courses:
        rows += _race(course, recordings, sizes, tell=tell)
    result = MultigridResult(
        data=recordings.name,
        recordings=(len(recordings.train), len(recordings.test)),
        courses=tuple(_told(course, sizes) for course in courses),
        rows=tuple(rows),
        threads=torch.get_num_threads(),
        machine=machine_with(()),
        settings={key: str(v) if isinstance(v, Path) else v for key, v in dataclasses.asdict(sizes).items()},
    )
    write_text_atomically(settings.out / "multigrid.json", result.to_json())
    return result


def _in_order(lengths: Sequence[Length]) -> list[Length]:
    """Each once, from the shortest on."""
    return sorted(set(lengths), key=lambda length: (length == WHOLE, 0 if length == WHOLE else length))


def _race(
    course: Course, recordings: Recordings, settings: MultigridSettings, *, tell: Callable[[str], None]
) -> list[MultigridRow]:
    """An epoch of each contestant in turn."""
    tell(f"length {course.length}: {len(course.train):,} sequences, batches of {course.batch_size}")
    contestants = [Contestant(way, course, recordings, settings) for way in WAYS]
    initial = {contestant.way: contestant.warm_up() for contestant in contestants}
    lessons: dict[str, list[Lesson]] = {way: [] for way in WAYS}
    for number in range(settings.epochs):
        for contestant in contestants:
            lesson = contestant.learn()
            lessons[contestant.way].append(lesson)
            tell(
                f"{course.length:>6}  {contestant.way:<18} epoch {number + 1:>2}  loss {lesson.loss:.4f}  "
                f"{lesson.seconds:6.2f} s  residual {lesson.residual:8.1e}  "
                f"accuracy {lesson.parallel:.1%} by it, {lesson.serial:.1%} serially"
            )
    return [_row(course, way, initial[way], lessons) for way in WAYS]


def _row(course: Course, way: str, initial_loss: float, lessons: dict[str, list[Lesson]]) -> MultigridRow:
    own, base = lessons[way], lessons[SERIAL]
    seconds = [lesson.seconds for lesson in own]
    pairs = list(zip(base, own, strict=True))
    return MultigridRow(
        length=course.length,
        way=way,
        initial_loss=initial_loss,
        median_seconds=statistics.median(seconds),
        least_seconds=min(seconds),
        speed_up=statistics.median(one.seconds / other.seconds for one, other in pairs),
        loss_gap=max(abs(one.loss - other.loss) / one.loss for one, other in pairs),
        epochs=tuple(own),
    )


def _told(course: Course, settings: MultigridSettings) -> CourseTold:
    steps = [len(piece) for piece in course.train]
    return CourseTold(
        length=course.length,
        num_train=len(course.train),
        num_test=len(course.test),
        median_steps=round(statistics.median(steps)),
        train_steps=sum(steps),
        batch_size=course.batch_size,
        chunks=chunks_for(course, settings),
        left_out=course.left_out,
    )
