"""Plots: interactive ones for pages, drawn by plotly, and a static chart of lines as SVG for documents.

A plot is a piece of HTML without the plotting library itself, which `page` puts in once.
"""

import dataclasses
import html
import itertools
import math
from collections.abc import Sequence
from typing import Any, Final, final

from stretto.extras import optional
from stretto.report.page import Html

BLUE: Final = "#2f5d8a"
AMBER: Final = "#cf8a35"
TEAL: Final = "#3f8f86"
GREY: Final = "#8a94a0"
PALE: Final = "#c3d2e0"
BY_BUCKET: Final = ((0.0, "#a9d3c4"), (0.35, "#4f9fa0"), (0.7, "#2f5d8a"), (1.0, "#2b2350"))

CHART_WIDTH: Final = 680
CHART_HEIGHT: Final = 320
LEFT, RIGHT, TOP, BOTTOM = 64, 176, 20, 48
CHART_COLOURS: Final = (BLUE, AMBER, TEAL, GREY)

FONT: Final = {"family": "system-ui, sans-serif", "size": 13, "color": "#22303f"}
AXIS: Final = {"gridcolor": "#e9edf0", "zeroline": False, "linecolor": "#c6ced6", "ticks": "outside", "ticklen": 4}


def line(x: Any, y: Any, *, colour: str, name: str = "", width: int = 2, markers: bool = False, **style: Any) -> Any:
    """A plotly trace of a line, with a marker at each point if asked for; `style` has more settings of the line."""
    mode = "lines+markers" if markers else "lines"
    return points(x, y, name=name, mode=mode, line={"color": colour, "width": width, **style})


def points(x: Any, y: Any, *, mode: str = "markers", **settings: Any) -> Any:
    """A plotly trace of points; `settings` are plotly's."""
    return optional("plotly.graph_objects").Scatter(x=x, y=y, mode=mode, **settings)


def plot(
    traces: Sequence[Any],
    *,
    name: str,
    x: dict[str, Any],
    y: dict[str, Any],
    height: int = 320,
    shapes: Sequence[dict[str, Any]] = (),
    annotations: Sequence[dict[str, Any]] = (),
    legend: bool = True,
) -> Html:
    """Draw traces on one pair of axes.

    Args:
        traces: Plotly traces.
        name: Tells the plots of one page apart; letters and hyphens.
        x: The horizontal axis: `title` and any other setting of a plotly axis.
        y: The vertical axis.
        height: Of the plot, in pixels; it is as wide as there is room.
        shapes: Lines drawn over the traces.
        annotations: Words drawn over the traces.
        legend: Whether to name the traces above the plot.
    """
    drawing = optional("plotly.graph_objects").Figure(
        data=list(traces),
        layout={
            "template": None,
            "height": height,
            "margin": {"l": 64, "r": 16, "t": 36 if legend else 24, "b": 52},
            "font": FONT,
            "paper_bgcolor": "#ffffff",
            "plot_bgcolor": "#ffffff",
            "xaxis": _axis(x),
            "yaxis": _axis(y),
            "shapes": list(shapes),
            "annotations": list(annotations),
            "showlegend": legend,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
            "hoverlabel": {"font": FONT},
        },
    )
    # Escapes "<", ">" and "/" inside its JSON, so that no text of the data can close the script element.
    div: str = drawing.to_html(
        full_html=False, include_plotlyjs=False, div_id=f"plot-{name}", config={"displayModeBar": False}
    )
    return Html(div)


def _axis(settings: dict[str, Any]) -> dict[str, Any]:
    return AXIS | settings | {"title": {"text": settings["title"], "font": FONT, "standoff": 10}}


def log_axis(title: str, values: Sequence[float]) -> dict[str, Any]:
    """Ticks at 1, 2 and 5 times the powers of ten; plotly's own show bare digits between them."""
    low, high = (math.log10(value) for value in (min(values), max(values)))
    powers = [10.0**power for power in range(math.floor(low), math.ceil(high) + 1)]
    ticks = [power * digit for power in powers for digit in (1, 2, 5)]
    return {"title": title, "type": "log", "tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: its name, and a height at each place of the horizontal axis, from the first on."""

    name: str
    values: tuple[float, ...]


def line_chart(
    lines: Sequence[Line], *, places: Sequence[str], across: str, up: str, ticks: Sequence[tuple[float, str]]
) -> str:
    """Draw lines over places that are equally far apart.

    Args:
        lines: Drawn in this order, each with its name at its end.
        places: The labels of the horizontal axis.
        across: What the horizontal axis shows.
        up: What the vertical axis shows.
        ticks: Heights with their labels, from the lowest to the highest, which bound the picture.
    """
    low, high = ticks[0][0], ticks[-1][0]
    apart = (CHART_WIDTH - LEFT - RIGHT) / max(1, len(places) - 1)

    def down(value: float) -> float:
        return TOP + (CHART_HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    parts = []
    for height, label in ticks:
        y = down(height)
        parts.append(f'<line x1="{LEFT}" x2="{CHART_WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eceff2"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{html.escape(label)}</text>')
    for number, label in enumerate(places):
        x = LEFT + apart * number
        parts.append(
            f'<text x="{x:.1f}" y="{CHART_HEIGHT - BOTTOM + 18}" text-anchor="middle">{html.escape(label)}</text>'
        )
    heights = _spread([down(each.values[-1]) for each in lines])
    for number, (drawn, label_y) in enumerate(zip(lines, heights, strict=True)):
        colour = CHART_COLOURS[number % len(CHART_COLOURS)]
        points = [(LEFT + apart * place, down(value)) for place, value in enumerate(drawn.values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in points]
        x = points[-1][0] + 8
        parts.append(f'<text x="{x:.1f}" y="{label_y + 4:.1f}" fill="{colour}">{html.escape(drawn.name)}</text>')
    middle, half = (LEFT + CHART_WIDTH - RIGHT) / 2, (TOP + CHART_HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{middle}" y="{CHART_HEIGHT - 8}" text-anchor="middle">{html.escape(across)}</text>')
    parts.append(f'<text transform="translate(16 {half}) rotate(-90)" text-anchor="middle">{html.escape(up)}</text>')
    size = f'viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" width="{CHART_WIDTH}" height="{CHART_HEIGHT}"'
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" {size}'
    style = 'font-family="system-ui, sans-serif" font-size="13" fill="#55606c"'
    background = f'<rect width="{CHART_WIDTH}" height="{CHART_HEIGHT}" fill="#ffffff"/>'
    return "\n".join([f"{frame} {style}>", background, *parts, "</svg>"]) + "\n"


def _spread(heights: Sequence[float], *, least: float = 16.0) -> list[float]:
    """The same heights, moved down where two are so close that their words would touch."""
    placed = list(heights)
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    for above, below in itertools.pairwise(order):
        placed[below] = max(placed[below], placed[above] + least)
    return placed
