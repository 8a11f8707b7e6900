"""The result of `stretto bench training` as one page with plots."""

import itertools
from pathlib import Path
from typing import Any

from bench.training import GOAL, TaskRow, TrainingBench
from bench.training_contest import Course
from bench.training_tables import (
    NOT_REACHED,
    PERCENT,
    bench_tables,
    machine_line,
    mean_text,
    metric_text,
    ratio_text,
)
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


def write_training_page(bench: TrainingBench, path: Path) -> None:
    """All tables and plots on one self-contained page."""
    sections = []
    for table in bench_tables(bench):
        body = joined([columns(table.headings, table.rows), paragraph(table.caption)])
        sections.append(Section(title=table.title, body=body))
    sections.insert(1, Section(title="Quality over time", body=grid([_quality(row) for row in bench.rows])))
    decided = [f"{row.task}: {decision}" for row in bench.rows for decision in row.decisions]
    for title, lines in (("Batches that were chosen", decided), ("Not as asked for", bench.missing)):
        if lines:
            sections.append(Section(title=title, body=bullets(lines)))
    numbers = [BigNumber(label="Geometric mean", value=f"{mean_text(bench)} x", detail=f"aim {GOAL} x")]
    numbers += [
        BigNumber(
            label=row.task,
            value=f"{ratio_text(row)} x",
            detail=f"to {row.metric} {metric_text(row.metric, row.contest.limit)}"
            + ("" if row.contest.is_reached else f": {NOT_REACHED}"),
        )
        for row in bench.rows
    ]
    text = page(
        title="Training, beside a plain PyTorch script",
        subtitle=machine_line(bench),
        top=[headline(numbers)],
        sections=sections,
        footer="Made by stretto bench training.",
    )
    write_text_atomically(path, text)


def _quality(row: TaskRow) -> Html:
    contest = row.contest
    scale = 100.0 if row.metric in PERCENT else 1.0
    sides = (("plain script", AMBER, contest.plain), ("stretto", BLUE, contest.stretto))
    traces = [_line(name, colour, course, scale=scale) for name, colour, course in sides]
    longest = max(contest.plain.seconds, contest.stretto.seconds)
    limit = {
        "type": "line",
        "x0": 0,
        "x1": longest,
        "y0": scale * contest.limit,
        "y1": scale * contest.limit,
        "line": {"color": GREY, "width": 1, "dash": "dot"},
    }
    y: dict[str, Any] = {"title": row.metric + (", %" if scale > 1 else "")}
    if row.metric == "perplexity":
        y["type"] = "log"
    drawn = plot(
        traces,
        name=f"quality-{row.task}",
        x={"title": "seconds of updates", "rangemode": "tozero"},
        y=y,
        shapes=[limit],
    )
    return figure(drawn, title=row.task, caption=f"{row.data}; dotted: what counts as the plain script's quality.")


def _line(name: str, colour: str, course: Course, *, scale: float) -> Any:
    return optional("plotly.graph_objects").Scatter(
        x=list(itertools.accumulate(turn.seconds for turn in course.turns)),
        y=[scale * turn.value for turn in course.turns],
        name=name,
        mode="lines+markers",
        line={"color": colour, "width": 2},
    )
