"""Plots in the style of the page, as pieces of HTML without the plotting library itself, which `page` puts in once."""

import math
from collections.abc import Sequence
from typing import Any, Final

from stretto.extras import optional
from stretto.report.page import Html

BLUE: Final = "#2f5d8a"
AMBER: Final = "#cf8a35"
TEAL: Final = "#3f8f86"
GREY: Final = "#8a94a0"
PALE: Final = "#c3d2e0"
BY_BUCKET: Final = ((0.0, "#a9d3c4"), (0.35, "#4f9fa0"), (0.7, "#2f5d8a"), (1.0, "#2b2350"))

FONT: Final = {"family": "system-ui, sans-serif", "size": 13, "color": "#22303f"}
AXIS: Final = {
    "gridcolor": "rgba(34,48,63,0.1)",
    "zeroline": False,
    "linecolor": "#c6ced6",
    "ticks": "outside",
    "ticklen": 4,
}


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
    """Draw plotly traces on one pair of axes, as wide as there is room.

    `name` is unique on its page, letters and hyphens. `x` and `y` have the `title` of an axis and any other setting of
    a plotly axis; shapes and annotations, lines and words over the traces, are plotly's too. The legend is above.
    """
    drawing = optional("plotly.graph_objects").Figure(
        data=list(traces),
        layout={
            "template": None,
            "height": height,
            "margin": {"l": 64, "r": 16, "t": 36 if legend else 24, "b": 52},
            "font": FONT,
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "xaxis": _axis(x),
            "yaxis": _axis(y),
            "shapes": list(shapes),
            "annotations": list(annotations),
            "showlegend": legend,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
            "hoverlabel": {"font": FONT, "bgcolor": "#ffffff"},
        },
    )
    # Escapes "<", ">" and "/" inside its JSON, so that no text of the data can close the script element.
    div: str = drawing.to_html(
        full_html=False, include_plotlyjs=False, div_id=f"plot-{name}", config={"displayModeBar": False}
    )
    return Html(div)


def _axis(settings: dict[str, Any]) -> dict[str, Any]:
    return AXIS | settings | {"title": {"text": settings["title"], "font": FONT, "standoff": 10}}


def epoch_axis(num_epochs: int) -> dict[str, Any]:
    """Ticks at whole epochs."""
    return {"title": "epoch"} | ({"dtick": 1} if num_epochs <= 12 else {})


def log_axis(title: str, values: Sequence[float]) -> dict[str, Any]:
    """Ticks at 1, 2 and 5 times the powers of ten; plotly's own show bare digits between them."""
    low, high = (math.log10(value) for value in (min(values), max(values)))
    powers = [10.0**power for power in range(math.floor(low), math.ceil(high) + 1)]
    ticks = [power * digit for power in powers for digit in (1, 2, 5)]
    return {"title": title, "type": "log", "tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}
