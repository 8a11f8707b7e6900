"""The experiment with large batches as one small picture, for places where a page with scripts cannot go."""

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

from experiments.large_batch import LargeBatchResult
from experiments.large_batch_measures import MEASURES, Measure
from experiments.large_batch_rows import BASELINE, baseline_of
from experiments.large_batch_settings import ApplicationName
from experiments.large_batch_table import row_at, rules_of
from stretto.files import write_text_atomically

PANEL_WIDTH: Final = 380
PANEL_HEIGHT: Final = 250
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 34, 44
LEGEND_HEIGHT: Final = 34
PER_ROW: Final = 2
MOST_TICKS: Final = 5
FARTHEST: Final = 3.0
"""A perplexity of more than this times the baseline's is off the scale."""
COLOURS: Final = {
    BASELINE: "#22303f",
    "none": "#8a94a0",
    "linear": "#cf8a35",
    "sqrt": "#3f8f86",
    "legw": "#2f5d8a",
    "lamb": "#8f4f8a",
    "oracle": "#b0463c",
}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One application: a line a rule, over batches that are equally far apart.

    Attributes:
        application: Which.
        batches: Their sizes.
        lines: For each rule a value a batch, as shown; None where it diverged or was not run.
        diverged: Of each rule, the places of the batches at which it did.
        low: The end of the scale.
        high: The other.
        band: From the baseline to what is still as good.
    """

    application: ApplicationName
    batches: tuple[int, ...]
    lines: Mapping[str, Sequence[float | None]]
    diverged: Mapping[str, Sequence[int]]
    low: float
    high: float
    band: tuple[float, float] | None


def panel_of(result: LargeBatchResult, application: ApplicationName) -> Panel:
    """What is drawn of an application."""
    measure, baseline = MEASURES[application], baseline_of(result.rows, application)
    multiples = next(told.multiples for told in result.applications if told.name == application)
    lines: dict[str, list[float | None]] = {}
    diverged: dict[str, list[int]] = {}
    for rule in rules_of(result, application):
        rows = [row_at(result, application, rule, multiple) for multiple in multiples]
        lines[rule] = [None if row is None or row.test is None else measure.scale * row.test for row in rows]
        diverged[rule] = [place for place, row in enumerate(rows) if row is not None and row.test is None]
    base = None if baseline.test is None else measure.scale * baseline.test
    values = [value for line in lines.values() for value in line if value is not None]
    low, high = _bounds(values, base, measure)
    return Panel(
        application=application,
        batches=tuple(multiple * (baseline.batch_size // baseline.multiple) for multiple in multiples),
        lines=lines,
        diverged=diverged,
        low=low,
        high=high,
        band=None if base is None else _band(base, measure),
    )


def _band(base: float, measure: Measure) -> tuple[float, float]:
    room = base * measure.tolerance if measure.is_relative else measure.tolerance
    return (base, base + room) if measure.better == "lower" else (base - room, base)


def _bounds(values: Sequence[float], base: float | None, measure: Measure) -> tuple[float, float]:
    farthest = FARTHEST * base if measure.is_relative and base is not None else math.inf
    shown = [value for value in values if value <= farthest] or [0.0]
    low, high = min(shown), max(shown)
    room = 0.05 * (high - low) or 1.0
    return low - room, high + room


def write_large_batch_figure(result: LargeBatchResult, path: Path) -> None:
    """Draw quality against batch, one panel an application, as SVG."""
    panels = [panel_of(result, application.name) for application in result.applications]
    width = PANEL_WIDTH * PER_ROW
    height = LEGEND_HEIGHT + PANEL_HEIGHT * math.ceil(len(panels) / PER_ROW)
    parts = [_legend(list(dict.fromkeys(rule for panel in panels for rule in panel.lines)))]
    for number, panel in enumerate(panels):
        across, down = PANEL_WIDTH * (number % PER_ROW), LEGEND_HEIGHT + PANEL_HEIGHT * (number // PER_ROW)
        parts.append(f'<g transform="translate({across} {down})">{_drawn(panel)}</g>')
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    style = 'font-family="system-ui, sans-serif" font-size="13" fill="#55606c"'
    background = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    write_text_atomically(path, "\n".join([f"{frame} {style}>", background, *parts, "</svg>"]) + "\n")


def _legend(rules: Sequence[str]) -> str:
    parts = []
    for number, rule in enumerate(rules):
        x, colour = LEFT + 88 * number, COLOURS[rule]
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="18" y2="18" stroke="{colour}" stroke-width="2.6"/>')
        parts.append(f'<text x="{x + 28}" y="22">{html.escape(rule)}</text>')
    x = LEFT + 88 * len(rules)
    parts.append(f'{_cross(x + 8, 18, "#55606c")}<text x="{x + 20}" y="22">diverged, or off</text>')
    return "\n".join(parts)


def _drawn(panel: Panel) -> str:
    measure = MEASURES[panel.application]
    worst = panel.high if measure.better == "lower" else panel.low
    room = PANEL_WIDTH - LEFT - RIGHT

    def place(number: int, value: float) -> tuple[float, float]:
        x = LEFT + room * (number / (len(panel.batches) - 1) if len(panel.batches) > 1 else 0.5)
        inside = min(max(value, panel.low), panel.high)
        return x, TOP + (PANEL_HEIGHT - TOP - BOTTOM) * (panel.high - inside) / (panel.high - panel.low)

    heading = html.escape(f"{panel.application}: {measure.unit}")
    parts = [f'<text x="{LEFT}" y="{TOP - 12}" font-weight="600" fill="#22303f">{heading}</text>']
    if panel.band is not None:
        (_, bottom), (_, top) = place(0, panel.band[0]), place(0, panel.band[1])
        parts.append(f'<rect x="{LEFT}" width="{room}" y="{top:.1f}" height="{bottom - top:.1f}" fill="#e6f0ee"/>')
    for tick in _ticks(panel.low, panel.high):
        _, y = place(0, tick)
        parts.append(f'<line x1="{LEFT}" x2="{PANEL_WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eceff2"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    for number, batch in enumerate(panel.batches):
        x, _ = place(number, panel.low)
        parts.append(f'<text x="{x:.1f}" y="{PANEL_HEIGHT - BOTTOM + 18}" text-anchor="middle">{batch:,}</text>')
    for rule, line in panel.lines.items():
        colour = COLOURS[rule]
        there = [(number, value) for number, value in enumerate(line) if value is not None]
        points = [place(number, value) for number, value in there]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (_, value), (x, y) in zip(there, points, strict=True):
            off = not panel.low <= value <= panel.high
            parts.append(
                _cross(x, y, colour) if off else f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>'
            )
        parts += [_cross(*place(number, worst), colour) for number in panel.diverged[rule]]
    middle = (LEFT + PANEL_WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{PANEL_HEIGHT - 8}" text-anchor="middle">batch</text>')
    return "\n".join(parts)


def _cross(x: float, y: float, colour: str) -> str:
    lines = f"M{x - 4:.1f} {y - 4:.1f}L{x + 4:.1f} {y + 4:.1f}M{x - 4:.1f} {y + 4:.1f}L{x + 4:.1f} {y - 4:.1f}"
    return f'<path d="{lines}" stroke="{colour}" stroke-width="2" fill="none"/>'


def _ticks(low: float, high: float) -> list[float]:
    """In steps of 1, 2 or 5 times a power of ten, all between the two."""
    least = (high - low) / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
