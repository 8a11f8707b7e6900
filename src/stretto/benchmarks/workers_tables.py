"""The tables of `stretto bench workers`."""

import statistics

from rich import box
from rich.table import Table

from stretto.benchmarks.workers import GOALS, WorkersBench


def tables(bench: WorkersBench) -> list[Table]:
    """What was measured, and what is predicted from it."""
    return [_measured(bench), _predicted(bench)]


def _measured(bench: WorkersBench) -> Table:
    table = Table(
        title=f"Training {bench.settings['task']}, real steps a second",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption=f"Medians of {bench.settings['rounds']} interleaved turns. Two workers waited for each other "
        f"{bench.waiting:.1%} of the time.",
        caption_justify="left",
    )
    table.add_column("way")
    for name in ("median", "least", "most", "2 workers over it", "goal"):
        table.add_column(name, justify="right")
    for way, values in bench.speeds.items():
        ratio, goal = bench.ratios.get(way), GOALS.get(way)
        table.add_row(
            way,
            *(f"{value:,.0f}" for value in (statistics.median(values), min(values), max(values))),
            "-" if ratio is None else f"{ratio:.2f}",
            "-" if goal is None else f"{goal:.1f}",
        )
    return table


def _predicted(bench: WorkersBench) -> Table:
    model = bench.model
    table = Table(
        title="Predicted for more workers, one thread each",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption=f"An update takes {model.fixed * 1e3:.2f} ms and {model.a_step * 1e6:.2f} us a real step; summing "
        f"gradients over two workers {model.summing(2) * 1e3:.2f} ms. For two workers the prediction is off by "
        f"{bench.off:+.0%}. As many cores as workers, each with memory as fast as here, and data enough for all.",
        caption_justify="left",
    )
    for name in ("workers", "real steps/s", "efficiency", "waiting for the slowest", "summing gradients"):
        table.add_column(name, justify="right")
    for row in bench.predictions:
        table.add_row(
            str(row.workers),
            f"{row.steps_per_second:,.0f}",
            f"{row.efficiency:.0%}",
            f"{row.stragglers:.0%}",
            f"{row.summing:.0%}",
        )
    return table
