"""The result of `stretto bench time` as one page with plots, and as a picture."""

import itertools
import math
from pathlib import Path
from typing import Final

from bench.kernels_tables import shown
from bench.time_contest import NO_GOAL
from bench.time_model import ManyRanks, Prediction
from bench.time_solvers import TimeBench
from bench.time_tables import bench_tables, machine_line
from bench.time_training import Training
from stretto.extras import optional
from stretto.files import write_text_atomically
from stretto.report import (
    AMBER,
    BLUE,
    GREY,
    PALE,
    TEAL,
    BigNumber,
    Html,
    Line,
    Section,
    bullets,
    columns,
    figure,
    grid,
    headline,
    joined,
    line_chart,
    log_axis,
    page,
    paragraph,
    plot,
)

GATE: Final = (
    "Before any clock ran, results were compared: who promises to be exact has the outputs and gradients of step after "
    "step within 1e-5 of the largest value, else there would be no page; carried boundaries and multigrid as published "
    "tell what they are off. Contestants take turns in one run; ratios are of least times, of auto's of means."
)
COLOURS: Final = (BLUE, AMBER, TEAL, GREY)


def write_time_page(bench: TimeBench, path: Path) -> None:
    """All tables and plots on one self-contained page."""
    plots = []
    if bench.many is not None and bench.many.predictions:
        plots += [_speed_ups(bench.many), _works(bench.many)]
    if bench.training is not None:
        plots.append(_accuracies(bench.training))
    sections = [Section(title="Plots", body=grid(plots))] if plots else []
    for table in bench_tables(bench):
        body = [columns(table.headings, table.rows), bullets(table.caption.splitlines())]
        sections.append(Section(title=table.title, body=joined(body)))
    if bench.missing:
        sections.append(Section(title="Left out", body=bullets(bench.missing)))
    text = page(
        title="Ways through time",
        subtitle=machine_line(bench),
        top=[headline(_numbers(bench)), paragraph(GATE)],
        sections=sections,
        footer="Made by stretto bench time.",
        scripted=bool(plots),
    )
    write_text_atomically(path, text)


def write_time_figure(many: ManyRanks, path: Path) -> None:
    """Predicted speed-up against the number of ranks as SVG, in powers of two."""
    lines = [
        Line(name=name, values=tuple(math.log2(row.speed_up) for row in rows)) for name, rows in _lines(many).items()
    ]
    most = max((line.values for line in lines), key=len)
    low = min(0, *(math.floor(value) for line in lines for value in line.values))
    high = max(low + 1, *(math.ceil(value) for line in lines for value in line.values))
    chart = line_chart(
        lines,
        places=[str(2 ** (place + 1)) for place in range(len(most))],
        across="ranks",
        up="times faster than step after step",
        ticks=[(float(power), f"{2.0**power:g}") for power in range(low, high + 1)],
    )
    write_text_atomically(path, chart)


def _numbers(bench: TimeBench) -> list[BigNumber]:
    """Everything that has a goal."""
    numbers = []
    for row in bench.rows:
        if row.goal == NO_GOAL:
            continue
        over = [] if row.over_torch is None else [f"{shown(row.over_torch)} x nn.GRU"]
        goals = [f"{goal:g}" for goal in (row.goal.over_torch, row.goal.over_serial) if goal is not None]
        numbers.append(
            BigNumber(
                label=f"{row.way}: T {row.num_steps:,}, H {row.hidden_size}",
                value=f"{row.over_serial:.2f} x",
                detail="; ".join(["of step after step", *over, f"goals {', '.join(reversed(goals))}"]),
            )
        )
    numbers += [
        BigNumber(
            label=f"2 ranks over 1, H {run.hidden_size}", value=f"{run.ratio:.2f} x", detail=f"goal {run.goal:g} x"
        )
        for run in bench.ranks
        if run.goal is not None
    ]
    if bench.training is not None and bench.training.best.over_serial is not None:
        best = bench.training.best
        numbers.append(
            BigNumber(label=f"Training, {best.way}", value=f"{best.over_serial:.2f} x", detail="of step after step")
        )
    predictions = () if bench.many is None else bench.many.predictions
    numbers += [
        BigNumber(
            label=f"{row.ranks} ranks, T {row.num_steps:,}, H {row.hidden_size}",
            value=f"{shown(row.speed_up)} x",
            detail=f"predicted; goal {row.goal:g} x",
        )
        for row in predictions
        if row.goal is not None
    ]
    judged = bench.judged
    if judged:
        numbers.append(BigNumber(label="Goals met", value=f"{sum(judged)} of {len(judged)}"))
    return numbers


def _lines(many: ManyRanks) -> dict[str, list[Prediction]]:
    def of(row: Prediction) -> str:
        return f"T {row.num_steps:,}, H {row.hidden_size}"

    return {name: list(rows) for name, rows in itertools.groupby(many.predictions, key=of)}


def _speed_ups(many: ManyRanks) -> Html:
    draw = optional("plotly.graph_objects").Scatter
    traces = [
        draw(
            x=[row.ranks for row in rows],
            y=[row.speed_up for row in rows],
            name=name,
            mode="lines+markers",
            line={"color": colour, "width": 2},
        )
        for (name, rows), colour in zip(_lines(many).items(), itertools.cycle(COLOURS), strict=False)
    ]
    worlds = sorted({row.ranks for row in many.predictions})
    traces.append(draw(x=worlds, y=worlds, name="ranks", mode="lines", line={"color": PALE, "dash": "dot"}))
    goals = {row.goal for row in many.predictions if row.goal is not None}
    ends = [worlds[0], worlds[-1]]
    traces += [
        draw(x=ends, y=[goal, goal], name=f"goal: {goal:g}", mode="lines", line={"color": PALE, "dash": "dash"})
        for goal in goals
    ]
    drawn = plot(
        traces,
        name="speed-ups",
        x=_ranks_axis(worlds),
        y=log_axis("times faster", [1.0, *worlds, *(row.speed_up for row in many.predictions)]),
    )
    caption = "Exact, forward and backward, over our own kernel on one rank with one thread."
    return figure(drawn, title="Predicted speed-up of many ranks", caption=caption)


def _works(many: ManyRanks) -> Html:
    draw = optional("plotly.graph_objects").Scatter
    rows = sorted((row for row in many.predictions if row.memories is not None), key=lambda row: row.memories or 0.0)
    traces = [
        draw(
            x=[row.memories for row in rows],
            y=[getattr(row, kind) for row in rows],
            name=name,
            mode="markers",
            marker={"color": colour, "size": 8},
        )
        for name, kind, colour in (("forwards", "work", BLUE), ("backwards", "backward_work", AMBER))
    ]
    drawn = plot(
        traces,
        name="works",
        x=log_axis(
            "steps of a block over those that the net remembers", [row.memories or 1.0 for row in rows] or [1.0]
        ),
        y={"title": "walks of a block", "rangemode": "tozero"},
    )
    caption = "Counted on the nets themselves, of the busiest rank: 1 is once, as step after step."
    return figure(drawn, title="What a rank walks", caption=caption)


def _accuracies(training: Training) -> Html:
    draw = optional("plotly.graph_objects").Scatter
    traces = [
        draw(
            x=list(itertools.accumulate(epoch.seconds for epoch in run.epochs)),
            y=[100 * epoch.accuracy for epoch in run.epochs],
            name=run.way,
            mode="lines+markers",
            line={"color": colour, "width": 2},
        )
        for run, colour in zip(training.runs, COLOURS, strict=False)
    ]
    drawn = plot(
        traces,
        name="accuracies",
        x={"title": "seconds of training", "rangemode": "tozero"},
        y={"title": "test accuracy, %"},
        shapes=[
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": 100 * training.aim,
                "y1": 100 * training.aim,
                "line": {"color": PALE, "dash": "dot"},
            }
        ],
    )
    caption = (
        f"After each epoch, by walking step after step; dotted: {100 * training.aim:.1f} %, which counts as there."
    )
    return figure(drawn, title="Accuracy against time", caption=caption)


def _ranks_axis(worlds: list[int]) -> dict[str, object]:
    return {"title": "ranks", "type": "log", "tickvals": worlds, "ticktext": [str(size) for size in worlds]}
