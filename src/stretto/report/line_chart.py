"""Lines on one pair of axes as a small SVG picture, for places where a page with scripts cannot go."""

import dataclasses
import html
import itertools
from collections.abc import Sequence
from typing import Final, final

WIDTH: Final = 680
HEIGHT: Final = 320
LEFT, RIGHT, TOP, BOTTOM = 64, 176, 20, 48
COLOURS: Final = ("#2f5d8a", "#cf8a35", "#3f8f86", "#8a94a0")


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
    apart = (WIDTH - LEFT - RIGHT) / max(1, len(places) - 1)

    def down(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    parts = []
    for height, label in ticks:
        y = down(height)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eceff2"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{html.escape(label)}</text>')
    for number, label in enumerate(places):
        x = LEFT + apart * number
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{html.escape(label)}</text>')
    heights = _spread([down(line.values[-1]) for line in lines])
    for number, (line, label_y) in enumerate(zip(lines, heights, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        points = [(LEFT + apart * place, down(value)) for place, value in enumerate(line.values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in points]
        x = points[-1][0] + 8
        parts.append(f'<text x="{x:.1f}" y="{label_y + 4:.1f}" fill="{colour}">{html.escape(line.name)}</text>')
    middle, half = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(across)}</text>')
    parts.append(f'<text transform="translate(16 {half}) rotate(-90)" text-anchor="middle">{html.escape(up)}</text>')
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    style = 'font-family="system-ui, sans-serif" font-size="13" fill="#55606c"'
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    return "\n".join([f"{frame} {style}>", background, *parts, "</svg>"]) + "\n"


def _spread(heights: Sequence[float], *, least: float = 16.0) -> list[float]:
    """The same heights, moved down where two are so close that their words would touch."""
    placed = list(heights)
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    for above, below in itertools.pairwise(order):
        placed[below] = max(placed[below], placed[above] + least)
    return placed
