"""The histogram of lengths with the bucket edges drawn in.

Shape legend: H bins, K buckets.
"""

from collections.abc import Sequence

import numpy as np

from stretto.extras import optional
from stretto.report.page import Html, figure
from stretto.report.plot import AMBER, BLUE, plot

MOST_LABELS = 14


def lengths_figure(*, bounds: Sequence[float], counts: Sequence[int], edges: Sequence[int], whose: str) -> Html:
    """A bar a bin and a line an edge.

    Args:
        bounds: Where the bins begin, and the end of the last, one more than there are bins. A bin holds its begin
            but not its end; the last reaches at least to the last edge.
        counts: Sequences in each bin.
        edges: Bucket edges; none draws the bars alone.
        whose: Of which sequences, for the caption.
    """
    edges_K = np.asarray(edges, dtype=np.float64)
    low_H = np.ceil(np.asarray(bounds[:-1], dtype=np.float64))
    high_H = np.ceil(np.asarray(bounds[1:], dtype=np.float64)) - 1
    high_H[-1:] = np.maximum(high_H[-1:], edges_K.max(initial=0))
    # Lengths are whole, so a bar spans half a step below its shortest to half a step above its longest.
    bars = optional("plotly.graph_objects").Bar(
        x=(low_H + high_H) / 2,
        y=np.asarray(counts),
        width=high_H - low_H + 1,
        marker={"color": BLUE, "opacity": 0.75, "line": {"width": 0.5, "color": "#ffffff"}},
        customdata=np.stack([low_H, high_H], axis=1),
        hovertemplate="%{customdata[0]} to %{customdata[1]} steps: %{y:,} sequences<extra></extra>",
    )
    lines = [
        {
            "type": "line",
            "x0": edge,
            "x1": edge,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": {"color": AMBER, "width": 1},
        }
        for edge in edges_K + 0.5
    ]
    picture = plot(
        [bars],
        name="lengths",
        x={"title": "steps of a sequence", "rangemode": "tozero"},
        y={"title": "sequences"},
        height=300,
        shapes=lines,
        annotations=_labels(edges_K, span=float(bounds[-1])),
        legend=False,
    )
    caption = f"{sum(counts):,} {whose}."
    if len(edges):
        caption += (
            f" Lines are the {len(edges)} bucket edges: a batch draws all its sequences from between two of them."
            if len(edges) > 1
            else " The line is the edge of the only bucket."
        )
    return figure(picture, title="Lengths and bucket edges", caption=caption, wide=True)


def _labels(edges_K: np.ndarray[tuple[int], np.dtype[np.float64]], *, span: float) -> list[dict[str, object]]:
    """The edges as numbers above their lines, leaving out those that would run into their neighbour."""
    labels: list[dict[str, object]] = []
    free_from = -np.inf
    for edge in edges_K[::-1]:
        if -edge >= free_from:
            labels.append(
                {
                    "x": edge + 0.5,
                    "y": 1,
                    "yref": "paper",
                    "yanchor": "bottom",
                    "text": f"{edge:,.0f}",
                    "showarrow": False,
                    "font": {"size": 11, "color": "#8a5a1c"},
                }
            )
            free_from = -edge + span / (2 * MOST_LABELS)
    return labels
