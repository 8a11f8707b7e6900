"""The tables of `stretto bench training`, for the terminal and the page alike."""

import dataclasses
from typing import Final, final

from rich import box
from rich.table import Table

from bench.training import GOAL, TaskRow, TrainingBench
from bench.training_contest import Course, Reached

WIDE: Final = 118
NOT_REACHED: Final = "not reached"
PERCENT: Final = ("accuracy", "cer")
"""Metrics that are shares."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchTable:
    """A table as text: title, headings, rows and a caption."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str


def bench_tables(bench: TrainingBench) -> list[BenchTable]:
    """Time to the same quality, and how alike both sides began."""
    return [_times(bench), _epochs(bench), _starts(bench)]


def tables(bench: TrainingBench) -> list[Table]:
    """The same for the terminal."""
    return [_shown(table) for table in bench_tables(bench)]


def metric_text(metric: str, value: float) -> str:
    """A value of a metric as a person reads it."""
    return f"{value:.2%}" if metric in PERCENT else f"{value:.2f}"


def ratio_text(row: TaskRow) -> str:
    """A ratio; where Stretto did not get there, what it is smaller than."""
    return f"{'' if row.contest.is_reached else '< '}{row.contest.ratio:.2f}"


def mean_text(bench: TrainingBench) -> str:
    """The geometric mean; where a task did not reach the target, what it is smaller than."""
    return f"{'< ' if bench.not_reached else ''}{bench.geometric_mean:.2f}"


def reached_text(bench: TrainingBench) -> str:
    """How many of the tasks reached the target, and which did not."""
    count = len(bench.rows) - len(bench.not_reached)
    lacking = f"; {NOT_REACHED}: {', '.join(bench.not_reached)}" if bench.not_reached else ""
    return f"{count} of {len(bench.rows)} tasks reached the quality of the plain script{lacking}"


def machine_line(bench: TrainingBench) -> str:
    """Where it ran."""
    return f"{bench.threads} threads; {bench.machine}"


def _shown(table: BenchTable) -> Table:
    shown = Table(
        title=table.title, title_justify="left", caption=table.caption, caption_justify="left", box=box.SIMPLE_HEAD
    )
    for number, heading in enumerate(table.headings):
        shown.add_column(heading, justify="right" if number else "left", no_wrap=not number)
    for row in table.rows:
        shown.add_row(*row)
    return shown


def _times(bench: TrainingBench) -> BenchTable:
    rows = []
    for row in bench.rows:
        contest = row.contest
        rows.append(
            (
                row.task,
                row.metric,
                metric_text(row.metric, contest.target),
                metric_text(row.metric, contest.limit),
                _when(contest.plain_reached),
                _when(contest.stretto_reached),
                ratio_text(row),
            )
        )
    rows.append(("geometric mean", "", "", "", "", "", mean_text(bench)))
    return BenchTable(
        title="Time to the quality of a plain PyTorch script",
        headings=("task", "metric", "target", "counts from", "plain", "stretto", "plain / stretto"),
        rows=tuple(rows),
        caption=f"{reached_text(bench)}. The target is what the plain script had after its last epoch, on the "
        "validation part; the time is that of updates until the end of the first epoch that reached it, epochs of both "
        "in turn. Where stretto did not, the ratio is of all the time that it had, so that the true one is smaller. "
        "Stretto's time includes timing steps to choose the batch. Kernels were built, or found in the cache, before. "
        f"Aim: {GOAL} x.",
    )


def _epochs(bench: TrainingBench) -> BenchTable:
    rows = []
    for row in bench.rows:
        contest = row.contest
        rows.append(
            (
                row.task,
                f"{row.sequences:,}",
                _pace(contest.plain),
                _pace(contest.stretto),
                f"{contest.epoch_ratio:.2f}",
                metric_text(row.metric, contest.stretto.turns[-1].value),
                _batches(contest.stretto),
                f"{sum(turn.probed for turn in contest.stretto.turns):.1f}",
            )
        )
    return BenchTable(
        title="Epochs",
        headings=(
            "task",
            "sequences",
            "plain",
            "stretto",
            "plain / stretto",
            "stretto's last",
            "its batches",
            "choosing, s",
        ),
        rows=tuple(rows),
        caption="Epochs trained, and the median of their seconds, without those that went into timing steps to choose "
        "the batch. The batches are those of the first and the last.",
    )


def _starts(bench: TrainingBench) -> BenchTable:
    return BenchTable(
        title="Before training: the same weights on both sides",
        headings=(
            "task",
            "data",
            "loss, plain",
            "loss, stretto",
            "largest difference",
            "metric, plain",
            "metric, stretto",
        ),
        rows=tuple(
            (
                row.task,
                row.data,
                f"{row.start.plain_loss:.5f}",
                f"{row.start.stretto_loss:.5f}",
                f"{row.start.error:.1e}",
                metric_text(row.metric, row.start.plain_value),
                metric_text(row.metric, row.start.stretto_value),
            )
            for row in bench.rows
        ),
        caption="On one batch, losses and gradients may differ by 1e-4 of the largest value, and on the validation "
        "part the metric by what counts as the same; with more, nothing would have been timed.",
    )


def _when(reached: Reached | None) -> str:
    if reached is None:
        return NOT_REACHED
    return f"{reached.seconds:.1f} s, {reached.epochs} epoch{'s' if reached.epochs > 1 else ''}"


def _pace(course: Course) -> str:
    return f"{len(course.turns)} of {course.median:.2f} s"


def _batches(course: Course) -> str:
    first, last = course.turns[0].batch_size, course.turns[-1].batch_size
    return str(first) if first == last else f"{first} to {last}"
