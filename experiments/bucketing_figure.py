"""The bucketing experiment as one small picture, for places where a page with scripts cannot go."""

import html
import itertools
import math
from pathlib import Path
from typing import Final

from experiments.bucketing import BucketingResult, BucketingRow
from experiments.bucketing_page import name_of
from stretto.files import write_text_atomically

WIDTH: Final = 760
HEIGHT: Final = 340
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 24, 48
ROOM: Final = 0.08
BASELINE: Final = "#cf8a35"
SHADES: Final = ("#b9cbdc", "#8fb0cb", "#6690b5", "#2f5d8a", "#1d3c5c")


def write_bucketing_figure(result: BucketingResult, path: Path) -> None:
    """Draw validation loss against seconds of training, one line a contender, as SVG."""
    longest = max(sum(row.seconds) for row in result.rows)
    losses = [loss for row in result.rows for loss in row.losses]
    low, high = math.log(min(losses)), math.log(max(losses))
    low -= ROOM * (high - low)

    def place(seconds: float, loss: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * seconds / longest
        down = TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log(loss)) / max(1e-9, high - low)
        return across, down

    (left, level), (right, _) = place(0.0, result.target), place(longest, result.target)
    reached = f'x1="{left:.1f}" x2="{right:.1f}" y1="{level:.1f}" y2="{level:.1f}"'
    parts = [_axes(longest, low=low, high=high), f'<line {reached} stroke="#8a94a0" stroke-dasharray="4 4"/>']
    counts = sorted({row.buckets for row in result.rows} - {1})
    for row in sorted(result.rows, key=lambda row: row.buckets == 1):
        colour = BASELINE if row.buckets == 1 else SHADES[min(counts.index(row.buckets), len(SHADES) - 1)]
        points = [place(at, loss) for at, loss in zip(itertools.accumulate(row.seconds), row.losses, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = "" if row.workers == 1 else ' stroke-dasharray="6 4"'
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.2"{dashes}/>')
        if row.buckets in {1, *counts[-1:]}:
            parts.append(_label(row, *points[-1], colour=colour))
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    style = 'font-family="system-ui, sans-serif" font-size="13" fill="#55606c"'
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    write_text_atomically(path, "\n".join([f"{frame} {style}>", background, *parts, "</svg>"]) + "\n")


def _label(row: BucketingRow, x: float, y: float, *, colour: str) -> str:
    words = name_of(row)
    return f'<text x="{x + 8:.1f}" y="{y + 14:.1f}" fill="{colour}">{html.escape(words)}</text>'


def _axes(longest: float, *, low: float, high: float) -> str:
    """Lines at round seconds and at losses a factor of two apart."""
    step = _round_step(longest / 6)
    parts = []
    for seconds in [step * n for n in range(int(longest / step) + 1)]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * seconds / longest
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#eceff2"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{seconds:g}</text>')
    for power in range(math.ceil(low / math.log(2)), math.floor(high / math.log(2)) + 1):
        y = TOP + (HEIGHT - TOP - BOTTOM) * (high - power * math.log(2)) / max(1e-9, high - low)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eceff2"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{2.0**power:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">seconds of training</text>')
    across = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text transform="translate(16 {across}) rotate(-90)" text-anchor="middle">validation loss</text>')
    return "\n".join(parts)


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, ... that is not below `least`."""
    base: float = 10.0 ** math.floor(math.log10(max(least, 1e-9)))
    return next(base * factor for factor in (1, 2, 5, 10) if base * factor >= least)
