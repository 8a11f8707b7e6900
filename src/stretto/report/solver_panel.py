"""How the recurrent layers were walked through time: what a solver left over, epoch by epoch, and what that means.

Shape legend: S steps that were recorded.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from stretto.extras import optional
from stretto.report.page import Html, columns, facts, figure, joined, paragraph
from stretto.report.plot import AMBER, BLUE, PALE, log_axis, plot
from stretto.report.record import Event, RunRecord

MEANING: Final = {
    "carried": (
        "Told, not exact. Sequences were cut into chunks of time that all walked at once, each from where its "
        "neighbour had ended when the sequence was last seen, and gradients stopped where chunks meet."
    ),
    "multigrid": (
        "Told, not exact, unless a tolerance was set: coarser and coarser grids of time steps were corrected a fixed "
        "number of times, as published."
    ),
    "shooting": (
        "Exact within the tolerance: chunks of time walked at once until they agreed where they meet; batches for "
        "which that does not pay fell back to step after step."
    ),
    "auto": "Exact within the tolerance: each shape of batch was walked in the way that was expected to be fastest.",
}
RESIDUAL: Final = (
    "The residual is the largest gap that was left between the end of one stretch of time and the start of the next, "
    "relative to states above 1: at 0 the result is that of walking step after step. Validation and test sequences "
    "were always walked step after step."
)
MOST_POINTS: Final = 1500


def solver_html(record: RunRecord) -> Html | None:
    """Words, a plot and a table; None for a run that was walked step after step."""
    epochs = [epoch for epoch in record.epochs if epoch.get("solving")]
    if not epochs:
        return None
    name = str(epochs[-1]["solving"]["solver"])
    parts = [paragraph(f"{MEANING.get(name, '')} {RESIDUAL}".strip())]
    drawn = _residual_figure(record, epochs)
    if drawn is not None:
        parts.append(drawn)
    return joined([*parts, facts(_facts(name, epochs)), _table(epochs)])


def bytes_in_words(count: int) -> str:
    """A size as a person says it."""
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def small(value: float | None) -> str:
    """A residual: 0 as it is, others with two digits."""
    return "-" if value is None else "0" if value == 0 else f"{value:.2g}"


def _residual_figure(record: RunRecord, epochs: Sequence[Event]) -> Html | None:
    """The residual along training; None if it is 0 throughout."""
    draw = optional("plotly.graph_objects").Scatter
    steps = record.steps
    shown_S = np.flatnonzero(steps.residual_S > 0)
    shown_S = shown_S[np.unique(np.linspace(0, len(shown_S) - 1, min(len(shown_S), MOST_POINTS)).astype(np.int64))]
    traces, heights = [], steps.residual_S[shown_S].tolist()
    if heights:
        traces.append(
            draw(
                x=steps.step_S[shown_S],
                y=steps.residual_S[shown_S],
                name="a step",
                mode="markers",
                marker={"color": PALE, "size": 4},
            )
        )
    for key, called, colour in (("residual_mean", "mean of an epoch", BLUE), ("residual_max", "largest", AMBER)):
        points = [(epoch["step"], epoch["solving"][key]) for epoch in epochs if epoch["solving"][key] > 0]
        heights += [value for _, value in points]
        if points:
            at, values = zip(*points, strict=True)
            traces.append(draw(x=at, y=values, name=called, mode="lines+markers", line={"color": colour, "width": 2}))
    if not heights:
        return None
    picture = plot(traces, name="residual", x={"title": "step"}, y=_heights(heights))
    return figure(
        picture,
        title="Residual along training",
        caption="An epoch is drawn at its end; where nothing was left, nothing is drawn.",
        wide=True,
    )


def _heights(values: Sequence[float]) -> dict[str, Any]:
    """A log axis; over many powers of ten with a tick for each of some of them alone."""
    if max(values) / min(values) <= 1e3:
        return log_axis("residual (log scale)", values)
    return {"title": "residual (log scale)", "type": "log", "exponentformat": "power", "dtick": 1}


def _facts(name: str, epochs: Sequence[Event]) -> list[tuple[str, str]]:
    told: Mapping[str, Any] = next((e["solving"] for e in reversed(epochs) if not e["solving"]["exact"]), {})
    rows = [("solver", name)]
    if told.get("reason"):
        rows.append(("in the last batch", str(told["reason"])))
    held = [epoch["solving"]["cache_bytes"] for epoch in epochs]
    if told.get("cache_bytes") is not None:
        rows.append(("memory for where sequences were", bytes_in_words(max(filter(None, held), default=0))))
    exact = sum(bool(epoch["solving"]["exact"]) for epoch in epochs)
    if exact:
        rows.append(("epochs walked step after step at the end", f"{exact}"))
    return rows


def _table(epochs: Sequence[Event]) -> Html:
    header = ["epoch", "residual, mean", "largest", "of gradients, mean", "passes", "batches", "fell back"]
    rows = []
    for epoch in epochs:
        told = epoch["solving"]
        left = ["exact", "exact"] if told["exact"] else [small(told[key]) for key in ("residual_mean", "residual_max")]
        rows.append(
            [
                epoch["epoch"],
                *left,
                small(told["backward_residual_mean"]),
                f"{told['iterations']:.2f}",
                f"{told['batches']:,}",
                f"{told['fell_back']:,}",
            ]
        )
    return columns(header, rows)
