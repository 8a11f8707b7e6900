"""The tables of `stretto bench workers`, for the terminal and the page alike."""

import dataclasses
import statistics
from typing import final

from rich import box
from rich.table import Table

from bench.workers import APART, GOALS, TWO, WorkersBench


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchTable:
    """A table as text: title, headings, rows and a caption."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str


def bench_tables(bench: WorkersBench) -> list[BenchTable]:
    """What was measured, what waiting costs, and what is predicted from it."""
    return [_measured(bench), _stragglers(bench), _predicted(bench)]


def tables(bench: WorkersBench) -> list[Table]:
    """The same for the terminal."""
    return [_shown(table) for table in bench_tables(bench)]


def _shown(table: BenchTable) -> Table:
    shown = Table(
        title=table.title, title_justify="left", caption=table.caption, caption_justify="left", box=box.SIMPLE_HEAD
    )
    for number, heading in enumerate(table.headings):
        shown.add_column(heading, justify="right" if number else "left")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def _measured(bench: WorkersBench) -> BenchTable:
    rows, waiting = [], bench.waiting
    for way, values in bench.speeds.items():
        ratio, goal = bench.ratios.get(way), GOALS.get(way)
        speeds = (f"{value:,.0f}" for value in (statistics.median(values), min(values), max(values)))
        rows.append((way, *speeds, "-" if ratio is None else f"{ratio:.2f}", "-" if goal is None else f"{goal:.1f}"))
    return BenchTable(
        title=f"Training {bench.settings['task']}, real steps a second",
        headings=("way", "median", "least", "most", "2 workers over it", "goal"),
        rows=tuple(rows),
        caption=f"Medians of {bench.settings['rounds']} interleaved turns. {APART.capitalize()} show what two cores of "
        f"this machine give: {TWO} reach {bench.ratios[APART]:.0%} of it. Waiting took {waiting.total:.1%} of their "
        f"time: {waiting.summing:.1%} summing gradients, {waiting.shares:.1%} by shares of unequal size and "
        f"{waiting.uneven:.1%} by cores that are not equally fast from one update to the next.",
    )


def _stragglers(bench: WorkersBench) -> BenchTable:
    worlds = sorted({size for row in bench.stragglers for size in row.simulated})
    return BenchTable(
        title="Waiting for the slowest worker",
        headings=("batches of", "real steps/s", "waiting, measured", *(f"simulated, {size}" for size in worlds)),
        rows=tuple(
            (
                row.sampler,
                f"{row.steps_per_second:,.0f}",
                f"{row.waiting:.1%}",
                *(f"{row.simulated[size]:.1%}" for size in worlds),
            )
            for row in bench.stragglers
        ),
        caption="Two workers, all with the same cap on the slots of a batch; sums of gradients count as waiting. The "
        "share of the time in which a worker waits is simulated for more of them, without the sums.",
    )


def _predicted(bench: WorkersBench) -> BenchTable:
    model = bench.model
    return BenchTable(
        title="Predicted for more workers, one thread each",
        headings=("workers", "real steps/s", "efficiency", "waiting for the slowest", "summing gradients"),
        rows=tuple(
            (
                str(row.workers),
                f"{row.steps_per_second:,.0f}",
                f"{row.efficiency:.0%}",
                f"{row.stragglers:.0%}",
                f"{row.summing:.0%}",
            )
            for row in bench.predictions
        ),
        caption=f"An update takes {model.fixed * 1e3:.2f} ms and {model.a_step * 1e6:.2f} us a real step; summing "
        f"gradients over two workers {model.summing(2) * 1e3:.2f} ms. For two workers the prediction is off by "
        f"{bench.off:+.0%}, and by {bench.off_apart:+.0%} when what two cores of this machine give is allowed for. As "
        "many cores as workers, each with memory as fast as here, and data enough for all.",
    )
