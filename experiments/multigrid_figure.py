"""The multigrid experiment as one small picture, for places where a page with scripts cannot go."""

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

from experiments.multigrid import MultigridResult
from experiments.multigrid_contestant import CARRIED, EXACT, MULTIGRID, SERIAL, WAYS
from experiments.multigrid_settings import WHOLE, Length
from stretto.files import write_text_atomically

PANEL_WIDTH: Final = 380
PANEL_HEIGHT: Final = 250
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 34, 44
LEGEND_HEIGHT: Final = 34
PER_ROW: Final = 2
COLOURS: Final = {SERIAL: "#8a94a0", MULTIGRID: "#cf8a35", EXACT: "#3f8f86", CARRIED: "#2f5d8a"}
MOST_TICKS: Final = 5


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """Lines by contestant over places that are equally far apart, from 0 up."""

    title: str
    across: str
    places: Sequence[str]
    lines: Mapping[str, Sequence[float]]


def length_name(length: Length) -> str:
    """A length in words."""
    return "whole recordings" if length == WHOLE else f"{length:,} steps"


def write_multigrid_figure(result: MultigridResult, path: Path) -> None:
    """Draw seconds an epoch against length, and for each length the residual along training, as SVG."""
    panels = [_times(result), *(_residuals(result, course.length) for course in result.courses)]
    width = PANEL_WIDTH * min(PER_ROW, len(panels))
    height = LEGEND_HEIGHT + PANEL_HEIGHT * math.ceil(len(panels) / PER_ROW)
    parts = [_legend()]
    for number, panel in enumerate(panels):
        across, down = PANEL_WIDTH * (number % PER_ROW), LEGEND_HEIGHT + PANEL_HEIGHT * (number // PER_ROW)
        parts.append(f'<g transform="translate({across} {down})">{_drawn(panel)}</g>')
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    style = 'font-family="system-ui, sans-serif" font-size="13" fill="#55606c"'
    background = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    write_text_atomically(path, "\n".join([f"{frame} {style}>", background, *parts, "</svg>"]) + "\n")


def _times(result: MultigridResult) -> _Panel:
    return _Panel(
        title="seconds an epoch, the median",
        across="steps of a sequence",
        places=["whole" if course.length == WHOLE else f"{course.length:,}" for course in result.courses],
        lines={way: [row.median_seconds for row in result.rows if row.way == way] for way in WAYS},
    )


def _residuals(result: MultigridResult, length: Length) -> _Panel:
    rows = result.at(length)
    return _Panel(
        title=f"residual, {length_name(length)}",
        across="epoch",
        places=[str(number + 1) for number in range(len(rows[0].epochs))],
        lines={row.way: [epoch.residual for epoch in row.epochs] for row in rows},
    )


def _legend() -> str:
    parts = []
    for number, way in enumerate(WAYS):
        x, colour = LEFT + 155 * number, COLOURS[way]
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="18" y2="18" stroke="{colour}" stroke-width="2.6"/>')
        parts.append(f'<text x="{x + 28}" y="22">{html.escape(way)}</text>')
    return "\n".join(parts)


def _drawn(panel: _Panel) -> str:
    ticks = _ticks(max(value for line in panel.lines.values() for value in line))
    room = PANEL_WIDTH - LEFT - RIGHT

    def place(number: int, value: float) -> tuple[float, float]:
        x = LEFT + room * (number / (len(panel.places) - 1) if len(panel.places) > 1 else 0.5)
        return x, TOP + (PANEL_HEIGHT - TOP - BOTTOM) * (1 - value / ticks[-1])

    parts = [f'<text x="{LEFT}" y="{TOP - 12}" font-weight="600" fill="#22303f">{html.escape(panel.title)}</text>']
    for tick in ticks:
        _, y = place(0, tick)
        parts.append(f'<line x1="{LEFT}" x2="{PANEL_WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eceff2"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    for number, label in enumerate(panel.places):
        x, _ = place(number, 0.0)
        parts.append(f'<text x="{x:.1f}" y="{PANEL_HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    for way, line in panel.lines.items():
        points = [place(number, value) for number, value in enumerate(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[way]}" stroke-width="2.2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{COLOURS[way]}"/>' for x, y in points]
    middle = (LEFT + PANEL_WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{PANEL_HEIGHT - 8}" text-anchor="middle">{panel.across}</text>')
    return "\n".join(parts)


def _ticks(most: float) -> list[float]:
    """From 0 in steps of 1, 2 or 5 times a power of ten to what is not below `most`."""
    least = (most or 1.0) / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)
    return [step * number for number in range(math.ceil((most or 1.0) / step) + 1)]
