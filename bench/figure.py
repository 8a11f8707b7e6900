"""Panels of lines under one legend, as static SVG: for documents, and for pages without scripts.

legend      -- serial   -- multigrid   x diverged
panels     +-----------+ +-----------+
           | title     | |           |     each with its own axes; points show their values
           |  o--o--o  | |  o--o  x  |     when the mouse is over them
           +-----------+ +-----------+
"""

import dataclasses
import html
import math
from collections.abc import Sequence
from typing import Final, Literal, final

from stretto.report import AMBER, BLUE, GREY, TEAL

__all__ = ["AMBER", "BLUE", "GREY", "TEAL", "Line", "Panel", "draw_figure"]

INK: Final = "#55606c"
GRID: Final = "#eceff2"
BAND: Final = "#e6f0ee"

PANEL_SIZE: Final = (380, 250)
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 34, 44
PER_ROW: Final = 2
LEGEND_ROW_HEIGHT: Final = 22
LETTER_WIDTH: Final = 7
MAX_TICKS: Final = 6


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a panel."""

    name: str  # in the legend
    colour: str
    xs: Sequence[float | str]  # numbers, or names on a category axis
    ys: Sequence[float | None]  # one per x; None is not drawn, infinite is a cross at the edge of the panel
    dashed: bool = False
    in_legend: bool = True  # False for a second line of the same name
    deviations: Sequence[float] = ()  # half the height of the error bars; no bars if empty


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Lines on one pair of axes."""

    title: str
    x: str  # name of the horizontal axis
    y: str  # name of the vertical axis
    lines: Sequence[Line]
    x_scale: Literal["category", "linear", "log"] = "category"  # categories are equally far apart
    y_scale: Literal["linear", "from zero", "log"] = "linear"
    y_range: tuple[float, float] | None = None  # values outside are crosses at the edge; by default all values fit
    band: tuple[float, float] | None = None  # shaded from one value to the other
    level: float | None = None  # a dashed horizontal line


def draw_figure(panels: Sequence[Panel], *, size: tuple[int, int] = PANEL_SIZE, cross: str = "") -> str:
    """Draw panels of one size row by row; `cross` says in the legend what a cross means."""
    width = size[0] * min(PER_ROW, len(panels))
    legend, top = _legend(panels, width=width, cross=cross)
    height = top + size[1] * math.ceil(len(panels) / PER_ROW)
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    style = f'style="max-width: 100%; height: auto" font-family="system-ui, sans-serif" font-size="13" fill="{INK}"'
    parts = [f"{frame} {style}>", f'<rect width="{width}" height="{height}" fill="#ffffff"/>', legend]
    for number, panel in enumerate(panels):
        x, y = size[0] * (number % PER_ROW), top + size[1] * (number // PER_ROW)
        parts.append(f'<g transform="translate({x} {y})">{_draw_panel(panel, size)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(panels: Sequence[Panel], *, width: int, cross: str) -> tuple[str, int]:
    """All names once, in as many rows as they need, and the height of that."""
    lines = {line.name: line for panel in panels for line in panel.lines if line.in_legend}
    parts, x, y = [], LEFT, 18
    for name in [*lines, *([cross] if cross else [])]:
        needed = 46 + LETTER_WIDTH * len(name)
        if x > LEFT and x + needed > width:
            x, y = LEFT, y + LEGEND_ROW_HEIGHT
        if name in lines:
            stroke = f'stroke="{lines[name].colour}" stroke-width="2.6"{_dashes(lines[name])}'
            parts.append(f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" {stroke}/>')
        else:
            parts.append(_cross(x + 11, y, INK))
        parts.append(f'<text x="{x + 28}" y="{y + 4}">{html.escape(name)}</text>')
        x += needed
    return "\n".join(parts), y + 16


def _draw_panel(panel: Panel, size: tuple[int, int]) -> str:
    width, height = size
    right, bottom = width - RIGHT, height - BOTTOM
    low, high = panel.y_range or _bounds(panel)
    places = list(dict.fromkeys(x for line in panel.lines for x in line.xs))
    numbers = sorted(x for x in places if not isinstance(x, str))

    def place_x(x: float | str) -> float:
        if isinstance(x, str):
            share = places.index(x) / (len(places) - 1) if len(places) > 1 else 0.5
        elif panel.x_scale == "log":
            share = math.log(x / numbers[0]) / (math.log(numbers[-1] / numbers[0]) or 1.0)
        else:
            share = x / numbers[-1]
        return LEFT + (right - LEFT) * share

    def place_y(y: float) -> float:
        inside = min(max(y, low), high)
        is_log = panel.y_scale == "log"
        share = math.log(high / inside) / math.log(high / low) if is_log else (high - inside) / (high - low)
        return TOP + (bottom - TOP) * share

    def straight(x1: float, x2: float, y1: float, y2: float, stroke: str) -> str:
        return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" stroke="{stroke}"/>'

    parts = [f'<text x="{LEFT}" y="{TOP - 12}" font-weight="600" fill="#22303f">{html.escape(panel.title)}</text>']
    if panel.band is not None:
        floor, ceiling = map(place_y, panel.band)
        box = f'x="{LEFT}" width="{right - LEFT}" y="{ceiling:.1f}" height="{floor - ceiling:.1f}"'
        parts.append(f'<rect {box} fill="{BAND}"/>')
    for tick in _log_ticks(low, high) if panel.y_scale == "log" else _ticks(low, high):
        y = place_y(tick)
        parts.append(straight(LEFT, right, y, y, GRID))
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    labels: Sequence[float | str] = _ticks(0.0, numbers[-1]) if panel.x_scale == "linear" else places
    for label in labels:
        x, text = place_x(label), label if isinstance(label, str) else _short(label)
        parts.append(straight(x, x, TOP, bottom, GRID))
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{html.escape(text)}</text>')
    if panel.level is not None:
        y = place_y(panel.level)
        parts.append(straight(LEFT, right, y, y, f'{GREY}" stroke-dasharray="4 4'))
    for line in panel.lines:
        drawn = [(x, y, place_x(x), place_y(y)) for x, y in zip(line.xs, line.ys, strict=True) if y is not None]
        points = " ".join(f"{across:.1f},{down:.1f}" for _, y, across, down in drawn if math.isfinite(y))
        stroke = f'stroke="{line.colour}" stroke-width="2.2"{_dashes(line)}'
        parts.append(f'<polyline points="{points}" fill="none" {stroke}/>')
        for (_, y, across, _), deviation in zip(drawn, line.deviations, strict=False):
            if deviation and math.isfinite(y):
                parts.append(straight(across, across, place_y(y - deviation), place_y(y + deviation), line.colour))
        for at, y, across, down in drawn:
            words = html.escape(f"{line.name}, {at if isinstance(at, str) else f'{at:g}'}: {y:.6g}")
            circle = f'<circle cx="{across:.1f}" cy="{down:.1f}" r="2.6" fill="{line.colour}"/>'
            mark = circle if low <= y <= high else _cross(across, down, line.colour)
            parts.append(f"<g><title>{words}</title>{mark}</g>")
    axes = html.escape(f"{panel.x}; {panel.y}")
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{height - 8}" text-anchor="middle">{axes}</text>')
    return "\n".join(parts)


def _dashes(line: Line) -> str:
    return ' stroke-dasharray="6 4"' if line.dashed else ""


def _cross(x: float, y: float, colour: str) -> str:
    strokes = f"M{x - 4:.1f} {y - 4:.1f}l8 8M{x - 4:.1f} {y + 4:.1f}l8 -8"
    return f'<path d="{strokes}" stroke="{colour}" stroke-width="2" fill="none"/>'


def _bounds(panel: Panel) -> tuple[float, float]:
    values = [y for line in panel.lines for y in line.ys if y is not None and math.isfinite(y)] or [1.0]
    low, high = min(values), max(values)
    if panel.y_scale == "log":
        room = max((high / low) ** 0.05, 1.01)
        return low / room, high * room
    if panel.y_scale == "from zero":
        return 0.0, 1.05 * high or 1.0
    room = 0.05 * (high - low) or 1.0
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between the two."""
    least = (high - low) / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten between the two; the powers alone if those are too many, others if too few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1,)):
        ticks = [tick for power in powers for digit in digits if low <= (tick := digit * 10.0**power) <= high]
        if len(ticks) <= MAX_TICKS:
            break
    return ticks if len(ticks) > 1 else _ticks(low, high)


def _short(value: float) -> str:
    for size, name in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size and (abs(value) >= 10 * size or value % size == 0):
            return f"{value / size:.6g}{name}"
    return f"{value:.6g}"
