"""The multigrid experiment as a page with plots."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from experiments.multigrid import CourseTold, MultigridResult, MultigridRow
from experiments.multigrid_contestant import CARRIED, EXACT, MULTIGRID, SERIAL, WAYS
from experiments.multigrid_figure import COLOURS, length_name
from experiments.multigrid_pieces import WINDOW
from experiments.multigrid_settings import WHOLE, Length
from experiments.multigrid_table import HEADER, MEANING, cells, small, title
from stretto.extras import optional
from stretto.files import write_text_atomically
from stretto.report import (
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
    sentence,
)

PUBLISHED: Final = ((1, 53, 51), (2, 71, 67), (3, 81, 75), (4, 87, 84))
"""Accuracy in per cent after each epoch with the parallel forward pass and with the serial one."""
PUBLISHED_FACTS: Final = (
    "Published: the log that comes with the authors' program, on UCI-HAR, which is made of the same people and "
    "recordings as hapt, filtered: windows of 128 steps, 9 channels, two layers of 100 implicit units, batches of 100, "
    "4 processes.",
    "Published: over these epochs the residual of the forward pass grew from 53 to between 84 and 93. It is a norm "
    "over all states, and not to be compared with residuals here, which are of the worst boundary.",
    "Published: a test window took 0.85 to 0.92 ms by 4 processes and 0.66 to 0.69 ms serially, so that nothing was "
    "gained at 128 steps. The paper reports up to 6.5 times its own serial code, for long sequences of video.",
)


def write_multigrid_page(result: MultigridResult, path: Path) -> None:
    """Table and plots on one self-contained page."""
    plots = [_times(result)]
    for course in result.courses:
        plots += [_residuals(result, course.length), _accuracies(result, course.length)]
    header = ("sequences and solver", *HEADER[2:], "loss off")
    text = page(
        title="Solvers in time",
        subtitle=f"{title(result)}; {result.machine}, threads: {result.threads}",
        top=[headline(_numbers(result))],
        sections=[
            Section(title="Time, residual and accuracy", body=grid(plots)),
            Section(
                title="All contestants",
                body=joined(
                    [
                        columns(header, map(_wide_cells, result.rows)),
                        paragraph(
                            f"{MEANING}; loss off: the largest relative difference of an epoch's training loss from "
                            "that of step after step."
                        ),
                    ]
                ),
            ),
            Section(title="As published", body=_published()),
            Section(title="What was learnt", body=_courses(result)),
            Section(title="How it was measured", body=_measured(result)),
        ],
        footer="Made by stretto reproduce multigrid, after Moon and Cyr (2022).",
    )
    write_text_atomically(path, text)


def _wide_cells(row: MultigridRow) -> tuple[str, ...]:
    return (f"{length_name(row.length)}: {row.way}", *cells(row)[2:], small(row.loss_gap))


def _numbers(result: MultigridResult) -> Iterator[BigNumber]:
    """At the longest length what each solver is worth, and at the shortest how far multigrid is off."""
    longest = {row.way: row for row in result.at(result.courses[-1].length)}
    for way in (MULTIGRID, EXACT, CARRIED):
        row, other = longest[way], longest[SERIAL]
        yield BigNumber(
            label=f"{way}, {length_name(row.length)}",
            value=f"{row.speed_up:.2f} x",
            detail=f"serial's speed; accuracy {row.last.serial:.1%}, serial's {other.last.serial:.1%}",
        )
    first = next(row for row in result.at(result.courses[0].length) if row.way == MULTIGRID)
    yield BigNumber(
        label=f"gap of multigrid, {length_name(first.length)}",
        value=f"{100 * (first.last.parallel - first.last.serial):+.1f} points",
        detail=f"{first.last.parallel:.1%} by it, {first.last.serial:.1%} serially",
    )


def _times(result: MultigridResult) -> Html:
    draw = optional("plotly.graph_objects").Scatter
    places = ["whole" if course.length == WHOLE else f"{course.length:,}" for course in result.courses]
    traces = [
        draw(
            x=places,
            y=[row.median_seconds for row in result.rows if row.way == way],
            name=way,
            mode="lines+markers",
            line={"color": COLOURS[way], "width": 2},
        )
        for way in WAYS
    ]
    drawn = plot(
        traces,
        name="times",
        x={"title": "steps of a sequence", "type": "category"},
        y={"title": "seconds an epoch", "rangemode": "tozero"},
        height=340,
    )
    caption = (
        "Median of the epochs' updates, testing left out. An epoch has about as many steps at any length; windows of "
        f"{WINDOW} overlap by half."
    )
    return figure(drawn, title="Time of an epoch against length", caption=caption, wide=True)


def _residuals(result: MultigridResult, length: Length) -> Html:
    draw = optional("plotly.graph_objects").Scatter
    rows = {row.way: row for row in result.at(length)}
    traces = [
        draw(
            x=list(range(1, len(row.epochs) + 1)),
            y=[epoch.residual for epoch in row.epochs],
            name=way,
            mode="lines+markers",
            line={"color": COLOURS[way], "width": 2},
        )
        for way, row in rows.items()
    ]
    drawn = plot(
        traces,
        name=f"residual-{length}",
        x=_epochs_axis(result),
        y={"title": "residual", "rangemode": "tozero"},
    )
    most = max(epoch.residual for epoch in rows[EXACT].epochs)
    caption = f"Mean over batches of an epoch. Serial is 0; {EXACT} at most {small(most)}."
    return figure(drawn, title=f"{sentence(length_name(length))}: residual along training", caption=caption)


def _accuracies(result: MultigridResult, length: Length) -> Html:
    draw = optional("plotly.graph_objects").Scatter
    rows = result.at(length)
    traces = [
        draw(
            x=list(range(1, len(row.epochs) + 1)),
            y=[100 * getattr(epoch, kind) for epoch in row.epochs],
            name=row.way,
            mode="lines+markers",
            showlegend=kind == "serial",
            line={"color": COLOURS[row.way], "width": 2, "dash": "solid" if kind == "serial" else "dot"},
        )
        for row in rows
        for kind in ("serial", "parallel")
        if kind == "serial" or row.way != SERIAL
    ]
    drawn = plot(traces, name=f"accuracy-{length}", x=_epochs_axis(result), y={"title": "test accuracy, %"})
    caption = "Colour: the solver of training. Solid: tested step after step; dotted: with the solver in use."
    return figure(drawn, title=f"{sentence(length_name(length))}: accuracy", caption=caption)


def _epochs_axis(result: MultigridResult) -> dict[str, object]:
    return {"title": "epoch", "dtick": max(1, len(result.rows[0].epochs) // 10)}


def _published() -> Html:
    header = ("epoch", "by multigrid", "serially", "gap, points")
    rows = ((epoch, f"{parallel} %", f"{serial} %", f"+{parallel - serial}") for epoch, parallel, serial in PUBLISHED)
    return joined([columns(header, rows), *map(paragraph, PUBLISHED_FACTS)])


def _courses(result: MultigridResult) -> Html:
    header = ("sequences", "label", "training", "test", "left out", "steps", "median", "in a batch", "chunks")
    embedded = result.settings["data"] is None
    rule = "the label of their last step" if embedded else "one label throughout"
    return joined(
        [
            columns(header, (_course_cells(course) for course in result.courses)),
            paragraph(
                f"{result.recordings[0]} recordings to learn from and {result.recordings[1]} to test on. Windows of "
                f"{WINDOW} steps begin 64 apart, have {rule}, of 1 to {result.settings['window_labels']}, and are "
                "classified at their last step. Left out: windows without such a label and other sequences without "
                "any; steps without a label are neither learnt nor measured. Steps: of all training sequences, and of "
                "the median one. Chunks: of the longest sequence, for carried boundaries."
            ),
        ]
    )


def _course_cells(course: CourseTold) -> tuple[object, ...]:
    return (
        length_name(course.length),
        "window" if course.length == WINDOW else "step",
        f"{course.num_train:,}",
        f"{course.num_test:,}",
        f"{course.left_out:,}",
        f"{course.train_steps:,}",
        f"{course.median_steps:,}",
        course.batch_size,
        course.chunks,
    )


def _measured(result: MultigridResult) -> Html:
    turns = (
        "All contestants have the same weights at first and see the same batches in the same order; they train an "
        f"epoch each in turn, by Adam at {result.settings['learning_rate']:g}. Seconds are those of the updates: "
        "batches are laid out before, kernels are built before, and testing is left out."
    )
    residual = (
        "The residual is the largest gap between the end of one stretch of time and the start of the next, relative to "
        "states above 1. Of several layers the worst counts."
    )
    testing = (
        "Test sequences have not been seen before: with carried boundaries in use, an eighth of a chunk is walked "
        "before each to begin it, and then one sweep is made. Such a net is meant to be used step after step."
    )
    said = [f"{row.way}, {length_name(row.length)}: {row.last.reason}" for row in result.rows if row.last.reason]
    return joined(
        [
            paragraph(turns),
            paragraph(residual),
            paragraph(testing),
            bullets(f"{way}: {meaning}." for way, meaning in WAYS.items()),
            paragraph("What solvers said of the last batch:"),
            bullets(said),
        ]
    )
