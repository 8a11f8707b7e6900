"""The tables of `stretto bench tuner`, for the terminal and the page alike."""

import dataclasses
import math
from typing import Final, final

from rich import box
from rich.table import Table

from bench import tuner_noise, tuner_overhead
from bench.tuner import TunerBench
from bench.tuner_grid import STEPS_WITHIN, WITHIN, Grid
from bench.tuner_many import BYTES_A_SECOND, MESSAGE_SECONDS, WORKERS, Growth
from bench.tuner_run import Run

WIDE: Final = 118
NOT_REACHED: Final = "not reached"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchTable:
    """A table as text: title, headings, rows and a caption."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str


def bench_tables(bench: TunerBench) -> list[BenchTable]:
    """Every question in turn; those without an answer are left out."""
    found = [_choices(bench), _grid(bench), _steps(bench), _many(bench), _overheads(bench), _quadratics(bench)]
    return [table for table in found if table.rows]


def tables(bench: TunerBench) -> list[Table]:
    """The same for the terminal."""
    return [_shown(table) for table in bench_tables(bench)]


def machine_line(bench: TunerBench) -> str:
    """Where it ran."""
    return f"{bench.threads} threads; {bench.machine}; {bench.seconds:.0f} s in all"


def within_text(bench: TunerBench) -> str:
    """On how many tasks the engine chose well, and on which it did not."""
    far = [grid.task for grid in bench.grids if not grid.is_within]
    count = len(bench.grids) - len(far)
    return f"{count} of {len(bench.grids)} tasks within {WITHIN:.0%}" + (f"; not {', '.join(far)}" if far else "")


def _shown(table: BenchTable) -> Table:
    shown = Table(
        title=table.title, title_justify="left", caption=table.caption, caption_justify="left", box=box.SIMPLE_HEAD
    )
    for number, heading in enumerate(table.headings):
        shown.add_column(heading, justify="right" if number else "left")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def _choices(bench: TunerBench) -> BenchTable:
    rows = tuple(
        (
            grid.task,
            str(grid.base_batch_size),
            f"{grid.best}: {_seconds(grid.seconds(grid.best))}",
            ", ".join(str(run.last_batch) for run in grid.auto),
            "-" if grid.batch_ratio is None else _ratio(grid.batch_ratio),
            _seconds(grid.auto_seconds),
            _ratio(grid.run_ratio),
            f"{grid.probe_seconds:.1f} s",
            _yes(grid.is_within),
        )
        for grid in bench.grids
    )
    return BenchTable(
        title="The batch that the engine chose, beside the best of a grid: time to the target",
        headings=(
            "task",
            "first",
            "best of grid",
            "chosen",
            "its time / best",
            "auto",
            "auto / best",
            "probe",
            f"within {WITHIN:.0%}",
        ),
        rows=rows,
        caption=f"{within_text(bench)}. Seconds of updates until the validation loss is down to the target, medians "
        "over rounds, all batches and auto in turn in each. 'Its time' is that of the grid at the batch that the "
        "engine settled on, a number a round under 'chosen' and of these the median; where that is beyond the grid, "
        "auto's own time is judged. Auto has all that the engine does, but for the probe. The best of several medians "
        "is a little better than it really is.",
    )


def _grid(bench: TunerBench) -> BenchTable:
    rows = []
    for grid in bench.grids:
        for size, runs in grid.given.items():
            rows.append(_grid_row(grid, str(size), runs, ratio=grid.seconds(size)))
        rows.append(_grid_row(grid, "auto", grid.auto, ratio=grid.auto_seconds))
    return BenchTable(
        title="Every batch to the target",
        headings=("task", "batch", "seconds", "least", "most", "updates", "time / best", "reached"),
        rows=tuple(rows),
        caption="Medians over rounds, and the extremes. Rates and warm-up follow from the first batch by LargeBatch.",
    )


def _grid_row(grid: Grid, name: str, runs: tuple[Run, ...], *, ratio: float) -> tuple[str, ...]:
    reached = [run for run in runs if run.is_reached]
    seconds, updates = ([getattr(run, what) for run in reached] for what in ("seconds", "updates"))
    best = grid.seconds(grid.best)
    return (
        grid.task,
        name,
        _seconds(ratio),
        f"{min(seconds):.2f}" if seconds else "-",
        f"{max(seconds):.2f}" if seconds else "-",
        ", ".join(f"{count:,}" for count in updates) or "-",
        _ratio(math.nan if math.isinf(best) else ratio / best),
        f"{len(reached)} of {len(runs)}",
    )


def _steps(bench: TunerBench) -> BenchTable:
    rows, near, count = [], 0, 0
    for grid in bench.grids:
        for row in grid.steps:
            near, count = near + row.is_within, count + 1
            rows.append(
                (
                    grid.task,
                    str(row.batch_size),
                    f"{grid.noise_scale:.0f}",
                    _count(row.predicted),
                    _count(row.observed),
                    f"{row.error:+.0%}" if math.isfinite(row.observed) else NOT_REACHED,
                    _yes(row.is_within),
                )
            )
    return BenchTable(
        title="Updates to the target, predicted from the noise at the first batch",
        headings=("task", "batch", "noise scale", "predicted", "observed", "error", f"within {STEPS_WITHIN:.0%}"),
        rows=tuple(rows),
        caption=f"{near} of {count} within {STEPS_WITHIN:.0%}. Steps(B0) (1 + phi/B) / (1 + phi/B0), medians over "
        "rounds. phi is measured in every update of the run at the first batch, until the target, and averaged over "
        "progress: an update counts for 1 / (1 + phi/B0), the share of it that is not lost to noise, since steps(B) is "
        "the sum of 1 + phi/B over progress. Where phi is much larger than the batch that is the harmonic mean.",
    )


def _many(bench: TunerBench) -> BenchTable:
    return BenchTable(
        title=f"Decisions with {WORKERS} workers, simulated, and with one",
        headings=(
            "task",
            "noise scale",
            "1 worker",
            "1, from the best",
            f"{WORKERS} workers",
            "predicted gain",
            "exchange",
        ),
        rows=tuple(
            (
                row.task,
                f"{row.noise_scale:.0f}",
                _path(row.base_batch_size, row.alone),
                _path(row.best, row.from_best),
                _path(row.base_batch_size, row.many),
                f"{row.gain:.1f} x" if row.gain >= 1 else f"{row.gain:.0%}",
                f"{1e3 * row.exchange_seconds:.2f} ms",
            )
            for row in bench.many
        ),
        caption="The noise that was measured, the same all along; seconds of one worker with its share of the batch, "
        f"as measured here, and an exchange over {BYTES_A_SECOND * 8e-9:.0f} Gbit/s with {1e6 * MESSAGE_SECONDS:.0f} "
        "us a message. Data enough that only noise and time decide, until the batch is kept. The gain is over the "
        "first batch on as many workers. One worker that begins with the best batch of the grid should keep it, for "
        "growing does not pay there.",
    )


def _overheads(bench: TunerBench) -> BenchTable:
    return BenchTable(
        title="What measuring costs where the batch stays",
        headings=("task", "batch", "given, ms", "watched, ms", "overhead", "before that", "goal met"),
        rows=tuple(
            (
                row.task,
                str(row.batch_size),
                f"{1e3 * sorted(row.given)[len(row.given) // 2] / tuner_overhead.BLOCK:.3f}",
                f"{1e3 * sorted(row.watched)[len(row.watched) // 2] / tuner_overhead.BLOCK:.3f}",
                f"{row.share:+.1%}",
                f"{row.first:+.1%}",
                _yes(row.share < tuner_overhead.GOAL),
            )
            for row in bench.overheads
        ),
        caption=f"Turns of {tuner_overhead.BLOCK} updates, {tuner_overhead.CHUNK} of each side by turns, the median "
        "over them: noise every 32nd update, curvature every 256th for SGD, the guard in all. Before that, in the "
        f"first {tuner_overhead.WARM_UP * tuner_overhead.BLOCK}, it is every fourth update until 16 were taken apart "
        f"and every eighth until 64 were. Goal: under {tuner_overhead.GOAL:.0%}.",
    )


def _quadratics(bench: TunerBench) -> BenchTable:
    worst = max(abs(row.error) for row in bench.quadratics)
    return BenchTable(
        title="The noise meter on a quadratic with known noise",
        headings=("dimension", "parts", "dtype", "true", "measured", "error"),
        rows=tuple(
            (
                str(row.dimension),
                str(row.parts),
                row.dtype,
                f"{row.true:.2f}",
                f"{row.measured:.2f}",
                f"{row.error:+.1%}",
            )
            for row in bench.quadratics
        ),
        caption=f"Parts of 8 sequences. At most {worst:.1%} off; goal: {tuner_noise.GOAL:.0%}.",
    )


def _path(first: int, decisions: tuple[Growth, ...]) -> str:
    """The batches one after the other."""
    sizes = [first, *(decision.batch_size for decision in decisions if decision.action != "keep")]
    return " > ".join(f"{size:,}" for size in sizes) if len(sizes) > 1 else f"keeps {first}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if math.isfinite(value) else NOT_REACHED


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else NOT_REACHED


def _ratio(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else NOT_REACHED


def _yes(value: bool) -> str:
    return "yes" if value else "no"
