"""The graph experiment as one small picture, for places where a page with scripts cannot go."""

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from experiments.graph import ANALYSIS, FUSION, LOOP, VARIANTS, GraphResult, GraphRow
from stretto.files import write_text_atomically

PANEL_WIDTH: Final = 380
PANEL_HEIGHT: Final = 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 40
LEGEND_HEIGHT: Final = 34
PER_ROW: Final = 2
COLOURS: Final = {LOOP: "#cf8a35", ANALYSIS: "#3f8f86", FUSION: "#2f5d8a"}


def write_graph_figure(result: GraphResult, path: Path) -> None:
    """Draw steps a second against streams, a panel a network and a line a variant, both axes logarithmic, as SVG."""
    networks = list(dict.fromkeys(row.network for row in result.rows))
    width = PANEL_WIDTH * min(PER_ROW, len(networks))
    height = LEGEND_HEIGHT + PANEL_HEIGHT * math.ceil(len(networks) / PER_ROW)
    speeds = [row.steps_per_second for row in result.rows]
    bounds = (10.0 ** math.floor(math.log10(min(speeds))), 10.0 ** math.ceil(math.log10(max(speeds))))
    parts = [_legend()]
    for number, network in enumerate(networks):
        across, down = PANEL_WIDTH * (number % PER_ROW), LEGEND_HEIGHT + PANEL_HEIGHT * (number // PER_ROW)
        rows = [row for row in result.rows if row.network == network]
        parts.append(f'<g transform="translate({across} {down})">{_panel(network, rows, bounds=bounds)}</g>')
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    style = 'font-family="system-ui, sans-serif" font-size="13" fill="#55606c"'
    background = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    write_text_atomically(path, "\n".join([f"{frame} {style}>", background, *parts, "</svg>"]) + "\n")


def _legend() -> str:
    parts = []
    for number, variant in enumerate(VARIANTS):
        x, colour = LEFT + 170 * number, COLOURS[variant]
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="18" y2="18" stroke="{colour}" stroke-width="2.6"/>')
        parts.append(f'<text x="{x + 28}" y="22">{html.escape(variant)}</text>')
    return "\n".join(parts)


def _panel(network: str, rows: Sequence[GraphRow], *, bounds: tuple[float, float]) -> str:
    counts = sorted({row.streams for row in rows})
    most = math.log2(max(counts)) or 1.0
    low, high = map(math.log10, bounds)

    def place(streams: int, speed: float) -> tuple[float, float]:
        x = LEFT + (PANEL_WIDTH - LEFT - RIGHT) * math.log2(streams) / most
        y = TOP + (PANEL_HEIGHT - TOP - BOTTOM) * (high - math.log10(speed)) / max(high - low, 1e-9)
        return x, y

    parts = [f'<text x="{LEFT}" y="{TOP - 12}" font-weight="600" fill="#22303f">{html.escape(network)}</text>']
    for streams in counts:
        x, _ = place(streams, bounds[0])
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{PANEL_HEIGHT - BOTTOM}" stroke="#eceff2"/>')
        parts.append(f'<text x="{x:.1f}" y="{PANEL_HEIGHT - BOTTOM + 17}" text-anchor="middle">{streams}</text>')
    for power in range(round(low), round(high) + 1):
        _, y = place(1, 10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{PANEL_WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eceff2"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_thousands(power)}</text>')
    for variant in VARIANTS:
        points = [place(row.streams, row.steps_per_second) for row in rows if row.variant == variant]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[variant]}" stroke-width="2.2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{COLOURS[variant]}"/>' for x, y in points]
    middle = (LEFT + PANEL_WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{PANEL_HEIGHT - 6}" text-anchor="middle">streams; steps a second</text>')
    return "\n".join(parts)


def _thousands(power: int) -> str:
    """A power of ten as a short label."""
    names = {0: "", 3: "k", 6: "M"}
    base = max((known for known in names if known <= power), default=0)
    return f"{10.0 ** (power - base):g}{names[base]}"
