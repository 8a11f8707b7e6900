"""Labels along a sequence as inline SVG: a band of what each moment is, and one of what the net takes it for."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from stretto.report.page import Html, escaped

WIDTH: Final = 430
BAND: Final = 18
APART: Final = 5
COLOURS: Final = (
    "#2f5d8a", "#cf8a35", "#3f8f86", "#9b5a86", "#7d9a3c", "#c05b4d", "#6b6fb0", "#b39b2e", "#4b9fc4", "#8a6b52",
    "#5f7f5f", "#b56fa8",
)  # fmt: skip
UNKNOWN: Final = "#e4e8ec"


def label_track_svg(track: Mapping[str, Any]) -> Html:
    """Two bands, the target above the output, and the names of their colours below.

    Args:
        track: `names` of the labels, and `target` and `output` as runs of [label, steps]; -1 is no label.
    """
    height = 2 * BAND + APART
    bands = _band(track["target"], track["names"], top=0) + _band(track["output"], track["names"], top=BAND + APART)
    used = sorted({int(label) for side in ("target", "output") for label, _ in track[side]})
    keys = "".join(
        f'<span><i style="background:{_colour(label)}"></i>{escaped(_name(track["names"], label))}</span>'
        for label in used
    )
    return Html(
        f'<svg role="img" aria-label="labels of each step, true above found" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}">{bands}</svg><div class="key">{keys}</div>'
    )


def _band(runs: Sequence[Sequence[int]], names: Sequence[str], *, top: int) -> str:
    total = max(1, sum(steps for _, steps in runs))
    parts, left = [], 0
    for label, steps in runs:
        parts.append(
            f'<rect x="{left * WIDTH / total:.2f}" y="{top}" width="{steps * WIDTH / total:.2f}" height="{BAND}" '
            f'fill="{_colour(label)}"><title>{escaped(_name(names, label))}</title></rect>'
        )
        left += steps
    return "".join(parts)


def _colour(label: int) -> str:
    return UNKNOWN if label < 0 else COLOURS[label % len(COLOURS)]


def _name(names: Sequence[str], label: int) -> str:
    return "no label" if label < 0 else names[label]
