"""The result of `stretto bench tuner` as one page with plots."""

import math
from pathlib import Path
from typing import Any

from bench import tuner_overhead
from bench.tuner import TunerBench
from bench.tuner_grid import WITHIN, Grid
from bench.tuner_tables import bench_tables, machine_line, within_text
from stretto.extras import optional
from stretto.files import write_text_atomically
from stretto.report import (
    AMBER,
    BLUE,
    GREY,
    BigNumber,
    Html,
    Section,
    bullets,
    columns,
    figure,
    grid,
    headline,
    joined,
    page,
    paragraph,
    plot,
)


def write_tuner_page(bench: TunerBench, path: Path) -> None:
    """All tables and plots on one self-contained page."""
    plots = grid([drawn for each in bench.grids for drawn in (_times(each), _noise(each)) if drawn is not None])
    sections = []
    for table in bench_tables(bench):
        body = joined([columns(table.headings, table.rows), paragraph(table.caption)])
        sections.append(Section(title=table.title, body=body))
    sections.insert(1, Section(title="Time to the target, and noise on the way", body=plots))
    if bench.missing:
        sections.append(Section(title="Not as asked for", body=bullets(bench.missing)))
    numbers = [
        BigNumber(
            label=each.task,
            value=_ratio_text(each),
            detail=f"batch {each.chosen} over {each.best}, the best; goal {1 + WITHIN:.2f} x",
        )
        for each in bench.grids
    ]
    numbers += [
        BigNumber(
            label=f"Measuring, {each.task}",
            value=f"{each.share:+.1%}",
            detail=f"goal under {tuner_overhead.GOAL:.0%}",
        )
        for each in bench.overheads
    ]
    text = page(
        title="The engine's choice of a batch",
        subtitle=f"{within_text(bench)}; {machine_line(bench)}",
        top=[headline(numbers)],
        sections=sections,
        footer="Made by stretto bench tuner.",
    )
    write_text_atomically(path, text)


def _ratio_text(each: Grid) -> str:
    ratio = each.run_ratio if each.batch_ratio is None else each.batch_ratio
    return f"{ratio:.2f} x" if math.isfinite(ratio) else "-"


def _times(each: Grid) -> Html:
    """Seconds to the target against the batch; the chosen one is marked."""
    graph_objects = optional("plotly.graph_objects")
    sizes = [size for size in each.given if math.isfinite(each.seconds(size))]
    traces: list[Any] = [
        graph_objects.Scatter(
            x=[str(size) for size in sizes],
            y=[each.seconds(size) for size in sizes],
            name="given",
            mode="lines+markers",
            line={"color": BLUE, "width": 2},
        )
    ]
    if math.isfinite(each.auto_seconds):
        traces.append(
            graph_objects.Scatter(
                x=[str(each.chosen)],
                y=[each.auto_seconds],
                name="auto",
                mode="markers",
                marker={"color": AMBER, "size": 11},
            )
        )
    drawn = plot(
        traces,
        name=f"times-{each.task}",
        x={"title": "batch", "type": "category"},
        y={"title": "seconds to the target", "rangemode": "tozero"},
    )
    return figure(drawn, title=each.task, caption=f"{each.data}; down to a validation loss of {each.loss:g}.")


def _noise(each: Grid) -> Html | None:
    """The noise scale along the runs at the base batch."""
    graph_objects = optional("plotly.graph_objects")
    traces = [
        graph_objects.Scatter(
            x=[*range(1, len(along.scales) + 1)],
            y=list(along.scales),
            name=f"round {number}",
            line={"color": GREY if number > 1 else BLUE, "width": 1.5},
        )
        for number, along in enumerate(each.noise, start=1)
        if along is not None
    ]
    if not traces:
        return None
    drawn = plot(
        traces,
        name=f"noise-{each.task}",
        x={"title": "updates"},
        y={"title": "noise scale, sequences", "type": "log"},
    )
    return figure(drawn, title=f"{each.task}: noise", caption=f"At the first batch of {each.base_batch_size}.")
