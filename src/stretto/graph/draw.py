"""The graph of a step as an SVG picture: self-contained, on its own background, the same for the same graph."""

import html
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Final

from stretto.graph.adjoint import Body
from stretto.graph.analyse import Plan
from stretto.graph.draw_layout import LINE_SIZE, TITLE_SIZE, Layout, Point, Rectangle, lay_out, text_width
from stretto.graph.draw_panels import Box, Look, Panel, backward_panel, forward_panel

INK: Final = "#22303f"
SOFT: Final = "#5c6976"
LINE: Final = "#8592a0"
ACCENT: Final = "#b3461f"
BAND_COLOURS: Final = {
    "once": "#eceff2",
    "input": "#eceff2",
    "hoisted": "#dff0eb",
    "loop": "#fdeed2",
    "sunk": "#e9e4f6",
    "backward": "#fbe3da",
    "deferred": "#dfeaf6",
}
MARGIN: Final = 26.0
HEAD: Final = 70.0
PANEL_HEAD: Final = 30.0
PANEL_GAP: Final = 30.0
FOOT: Final = 64.0
ROUNDING: Final = 10.0
LEGEND: Final = (
    (Look.PRODUCT, "product of matrices"),
    (Look.WORK, "other work"),
    (Look.VIEW, "view: free"),
    (Look.VALUE, "value"),
)


def draw(plan: Plan, bodies: list[Body], *, title: str, subtitle: str = "") -> str:
    """The step of a plan as SVG: what is computed at which stage, forward and backward.

    Args:
        plan: A step, taken apart.
        bodies: Its loops with their backward steps, in order.
        title: Above the picture.
        subtitle: Under the title.
    """
    panels = [forward_panel(plan), backward_panel(bodies)]
    return document([(panel, lay_out(panel)) for panel in panels if panel.boxes], title=title, subtitle=subtitle)


def escape(text: str) -> str:
    """Text as XML shows it; characters that XML cannot hold become a replacement mark."""
    plain = "".join("\ufffd" if unicodedata.category(c) in {"Cc", "Cs", "Cn"} else c for c in text)
    return html.escape(plain, quote=True)


def document(panels: Sequence[tuple[Panel, Layout]], *, title: str, subtitle: str = "", words: str = "") -> str:
    """Panels side by side as a whole picture.

    Args:
        panels: What to draw, and where.
        title: Above the picture.
        subtitle: Under the title.
        words: Shown when there are no panels.
    """
    inside = sum(layout.width for _, layout in panels) + PANEL_GAP * max(len(panels) - 1, 0)
    wide = max(inside, text_width(title, 21, bold=True), text_width(subtitle, 13), text_width(words, 13), 780.0)
    width = wide + 2 * MARGIN
    tall = max((layout.height for _, layout in panels), default=0.0)
    height = HEAD + PANEL_HEAD + tall + FOOT if panels else HEAD + 50
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(width)}" height="{_n(height)}" '
        f'viewBox="0 0 {_n(width)} {_n(height)}" role="img" aria-label="{escape(title)}" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\" "
        'style="max-width: 100%; height: auto">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_n(width)}" height="{_n(height)}" rx="12" fill="#ffffff"/>',
        _text(MARGIN, 40, title, size=21, weight=650),
        _text(MARGIN, 61, subtitle, size=13, fill=SOFT),
    ]
    if words:
        lines.append(_text(MARGIN, HEAD + 24, words, size=13))
    x = MARGIN
    for panel, layout in panels:
        lines.append(_text(x, HEAD + 19, panel.title, size=15, weight=600))
        lines.append(f'<g transform="translate({_n(x)} {_n(HEAD + PANEL_HEAD)})">')
        lines += _panel(panel, layout)
        lines.append("</g>")
        x += layout.width + PANEL_GAP
    if panels:
        lines += _legend(height - FOOT / 2 + 4)
    return "\n".join([*lines, "</svg>\n"])


def _panel(panel: Panel, layout: Layout) -> Iterator[str]:
    for band, place in zip(panel.bands, layout.bands, strict=True):
        yield _rectangle(place, f'rx="10" fill="{BAND_COLOURS[band.stage]}"')
    for corners in layout.arrows:
        yield f'<path d="{_curve(corners)}" fill="none" stroke="{LINE}" stroke-width="1.3"/>'
        yield _head(corners[-1], LINE)
    for index, item in enumerate(panel.delayed):
        falls = index in layout.falling
        corners = layout.falling[index] if falls else layout.rising[index]
        shape = _curve(corners) if falls else _polyline(corners)
        yield f'<path d="{shape}" fill="none" stroke="{ACCENT}" stroke-width="1.6" stroke-dasharray="5 4"/>'
        yield _head(corners[-1], ACCENT)
        if item.label:
            x, y = corners[-1]
            yield _text(x + 9, y - 5, item.label, size=LINE_SIZE, fill=ACCENT)
    for band, place in zip(panel.bands, layout.bands, strict=True):
        # An outline in the band's colour keeps arrows off the words.
        halo = f'paint-order="stroke" stroke="{BAND_COLOURS[band.stage]}" stroke-width="5" stroke-linejoin="round"'
        note = f'<tspan dx="8" font-weight="400" fill="{SOFT}">{escape(band.note)}</tspan>'
        yield (
            f'<text x="{_n(place.x + 14)}" y="{_n(place.y + 22)}" font-size="{_n(TITLE_SIZE)}" font-weight="650" '
            f'fill="{INK}" {halo}>{escape(band.title)} {note}</text>'
        )
    for box, place in zip(panel.boxes, layout.boxes, strict=True):
        yield from _box(box, place)


def _box(box: Box, place: Rectangle) -> Iterator[str]:
    yield f"<g><title>{escape(box.tip)}</title>"
    yield _rectangle(place, _look(box.look, place.height))
    weight = 600 if box.look is not Look.VIEW else 450
    title = _shorten(box.title, place.width - 14, size=TITLE_SIZE)
    yield _text(place.middle, place.y + 19, title, size=TITLE_SIZE, weight=weight, centred=True)
    yield _text(place.middle, place.y + 34, box.shape, size=LINE_SIZE, fill=SOFT, centred=True)
    if box.reads:
        reads = _shorten(box.reads, place.width - 14, size=LINE_SIZE)
        yield _text(place.middle, place.y + 48, reads, size=LINE_SIZE, fill=SOFT, centred=True, italic=True)
    yield "</g>"


def _look(look: Look, height: float) -> str:
    if look is Look.PRODUCT:
        return f'rx="7" fill="#ffffff" stroke="{INK}" stroke-width="2.2"'
    if look is Look.VIEW:
        return f'rx="7" fill="#ffffff" fill-opacity="0.55" stroke="{LINE}" stroke-width="1" stroke-dasharray="2 2"'
    if look is Look.VALUE:
        return f'rx="{_n(height / 2)}" fill="{INK}" fill-opacity="0.09" stroke="{SOFT}" stroke-width="1"'
    return f'rx="7" fill="#ffffff" stroke="{LINE}" stroke-width="1.1"'


def _legend(y: float) -> Iterator[str]:
    x = MARGIN
    for look, words in LEGEND:
        yield _rectangle(Rectangle(x=x, y=y - 12, width=26, height=16), _look(look, 16))
        yield _text(x + 34, y, words, size=12, fill=SOFT)
        x += 34 + text_width(words, 12) + 18
    yield f'<path d="M{_n(x)} {_n(y - 4)}h22" fill="none" stroke="{LINE}" stroke-width="1.3"/>'
    yield _text(x + 30, y, "read by", size=12, fill=SOFT)
    x += 30 + text_width("read by", 12) + 18
    yield f'<path d="M{_n(x)} {_n(y - 4)}h22" fill="none" stroke="{ACCENT}" stroke-width="1.6" stroke-dasharray="5 4"/>'
    yield _text(x + 30, y, "carried to the next step", size=12, fill=SOFT)


def _curve(corners: list[Point]) -> str:
    """An arrow that leads down: vertical at every row, bent in between."""
    (x, y), *rest = corners
    parts = [f"M{_n(x)} {_n(y)}"]
    for number, (to_x, to_y) in enumerate(rest):
        if number % 2:
            parts.append(f"V{_n(to_y)}")
        else:
            half = (y + to_y) / 2
            parts.append(f"C{_n(x)} {_n(half)} {_n(to_x)} {_n(half)} {_n(to_x)} {_n(to_y)}")
        x, y = to_x, to_y
    return "".join(parts)


def _polyline(corners: list[Point]) -> str:
    """Straight lines with rounded corners."""
    parts = [f"M{_n(corners[0][0])} {_n(corners[0][1])}"]
    for before, here, after in zip(corners, corners[1:], corners[2:], strict=False):
        start, end = _towards(here, before), _towards(here, after)
        parts.append(f"L{_n(start[0])} {_n(start[1])}Q{_n(here[0])} {_n(here[1])} {_n(end[0])} {_n(end[1])}")
    return "".join([*parts, f"L{_n(corners[-1][0])} {_n(corners[-1][1])}"])


def _towards(here: Point, there: Point) -> Point:
    away = abs(there[0] - here[0]) + abs(there[1] - here[1])
    share = min(ROUNDING, away / 2) / away if away else 0.0
    return here[0] + (there[0] - here[0]) * share, here[1] + (there[1] - here[1]) * share


def _head(tip: Point, colour: str) -> str:
    x, y = tip
    return f'<path d="M{_n(x - 3.6)} {_n(y - 7)}h7.2L{_n(x)} {_n(y)}z" fill="{colour}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: float,
    weight: int = 400,
    fill: str = INK,
    centred: bool = False,
    italic: bool = False,
) -> str:
    style = ' text-anchor="middle"' if centred else ""
    style += ' font-style="italic"' if italic else ""
    return (
        f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" font-weight="{weight}" fill="{fill}"{style}>'
        f"{escape(text)}</text>"
    )


def _rectangle(place: Rectangle, style: str) -> str:
    return f'<rect x="{_n(place.x)}" y="{_n(place.y)}" width="{_n(place.width)}" height="{_n(place.height)}" {style}/>'


def _shorten(text: str, width: float, *, size: float) -> str:
    """As much as fits, with an ellipsis for the rest."""
    most = int(width / text_width("x", size, bold=size == TITLE_SIZE))
    return text if len(text) <= most else f"{text[: most - 1].rstrip(', ')}…"


def _n(number: float) -> str:
    """A coordinate, without needless digits."""
    return f"{number:.1f}".removesuffix(".0") if round(number, 1) else "0"
