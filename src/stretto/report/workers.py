"""How each of several workers fared: real steps a second, and time spent waiting for the slowest."""

from collections.abc import Callable, Sequence

from stretto.extras import optional
from stretto.report.page import Html, columns, figure, grid, joined, paragraph
from stretto.report.plot import AMBER, BLUE, GREY, TEAL, plot
from stretto.report.record import Event

SHADES = (BLUE, AMBER, TEAL, GREY)


def workers_html(epochs: Sequence[Event]) -> Html:
    """A table over all epochs and two plots, a line for each worker."""
    num_ranks = max(len(event["steps_real"]) for event in epochs)
    whole = [event for event in epochs if len(event["steps_real"]) == num_ranks]
    rows = []
    for rank in range(num_ranks):
        steps = sum(event["steps_real"][rank] for event in whole)
        seconds = sum(event["seconds"][rank] for event in whole)
        waited = sum(event["waited"][rank] for event in whole)
        rows.append([rank, f"{steps:,}", f"{steps / max(seconds, 1e-9):,.0f}", f"{waited / max(seconds, 1e-9):.1%}"])
    told = columns(["rank", "real steps", "real steps a second", "of the time waiting for others"], rows)
    changed = sorted({len(event["steps_real"]) for event in epochs} - {num_ranks})
    note = f"Some epochs ended with {', '.join(map(str, changed))} workers; they are left out here." if changed else ""
    speeds = _lines(whole, lambda event, rank: event["steps_real"][rank] / max(event["seconds"][rank], 1e-9))
    waits = _lines(whole, lambda event, rank: event["waited"][rank] / max(event["seconds"][rank], 1e-9))
    pictures = [
        figure(
            plot(speeds, name="rank-speed", x={"title": "epoch"}, y={"title": "real steps a second"}),
            title="Speed of each worker",
            caption="Its own sequences, padding left out.",
        ),
        figure(
            plot(waits, name="rank-wait", x={"title": "epoch"}, y={"title": "share of time", "tickformat": ".0%"}),
            title="Waiting for the slowest",
            caption="Time between a worker's own gradients and their sum over all of them.",
        ),
    ]
    return joined([told, *([paragraph(note)] if note else []), grid(pictures)])


def _lines(epochs: Sequence[Event], value: Callable[[Event, int], float]) -> list[object]:
    draw = optional("plotly.graph_objects").Scatter
    at = [event["epoch"] for event in epochs]
    return [
        draw(
            x=at,
            y=[value(event, rank) for event in epochs],
            name=f"rank {rank}",
            mode="lines+markers",
            line={"color": SHADES[rank % len(SHADES)], "width": 2},
        )
        for rank in range(len(epochs[0]["steps_real"]))
    ]
