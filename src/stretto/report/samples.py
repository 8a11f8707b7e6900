"""What the net made of test sequences, beside what they are: texts with errors marked, ink, and tracks of labels.

Shape legend: T time steps, 3 features of ink (dx, dy, pen-up), 2 coordinates.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stretto.extras import optional
from stretto.report.page import Html, escape

INK_HEIGHT: Final = 72
MAX_INK_WIDTH: Final = 1030
INK_MARGIN: Final = 0.12
TRACK_WIDTH: Final = 430
TRACK_HEIGHT: Final = 18
TRACK_GAP: Final = 5
LABEL_COLOURS: Final = (
    "#2f5d8a", "#cf8a35", "#3f8f86", "#9b5a86", "#7d9a3c", "#c05b4d", "#6b6fb0", "#b39b2e", "#4b9fc4", "#8a6b52",
    "#5f7f5f", "#b56fa8",
)  # fmt: skip
NO_LABEL_COLOUR: Final = "#e4e8ec"
EMPTY: Final = Html('<i class="detail">(empty)</i>')

Marks = list[tuple[str, bool]]


def align(target: str, output: str) -> tuple[Marks, Marks, int]:
    """Line two texts up with the fewest edits: the characters of each, whether they are wrong, and how many edits."""
    levenshtein = optional("rapidfuzz.distance").Levenshtein
    runs = levenshtein.opcodes(target, output)
    return (
        [(one, run.tag != "equal") for run in runs for one in target[run.src_start : run.src_end]],
        [(one, run.tag != "equal") for run in runs for one in output[run.dest_start : run.dest_end]],
        levenshtein.distance(target, output),
    )


def samples_html(items: Iterable[Mapping[str, Any]], *, metric: str) -> Html:
    """One card per sequence: its ink when it has some, the target, and the output with what is wrong in it marked.

    Items have `target`, `output` and `ink` (rows of dx, dy, pen-up, or None), or, where every time step has a label, a
    `track` of them. The metric decides what counts as wrong: characters that must be edited for "cer", the whole for
    "accuracy", characters at their place for "perplexity", nothing otherwise.
    """
    return Html('<div class="samples">' + "\n".join(_card(item, metric=metric) for item in items) + "</div>")


def _card(item: Mapping[str, Any], *, metric: str) -> Html:
    track = item.get("track")
    if track:
        right = f"truth above, output below: {track['right']:.1%} right"
        return Html(f'<div class="sample">{label_track_svg(track)}<div class="detail">{escape(right)}</div></div>')
    target, output = _as_text(item.get("target")), _as_text(item.get("output"))
    ink = item.get("ink")
    drawing = ink_svg(ink, label=target) if ink else ""
    verdict = ""
    if metric == "cer":
        wrong_in_target, wrong_in_output, errors = align(target, output)
        shown_target, shown_output = _mark_errors(wrong_in_target), _mark_errors(wrong_in_output)
        verdict = f"{errors} {'error' if errors == 1 else 'errors'}" if errors else "correct"
    elif metric == "accuracy":
        shown_target = escape(target)
        shown_output = Html(f"<mark>{escape(output)}</mark>") if target != output else escape(output)
        verdict = "wrong" if target != output else "correct"
    elif metric == "perplexity":
        places = [(one, one != expected) for one, expected in zip(output, target, strict=False)]
        shown_target = escape(target)
        shown_output = _mark_errors([*places, *((one, True) for one in output[len(target) :])])
        verdict = f"{sum(not wrong for _, wrong in places)} of {len(target)} characters right"
    else:
        shown_target, shown_output = escape(target), escape(output)
    verdict_row = f'<dt></dt><dd class="detail">{escape(verdict)}</dd>' if verdict else ""
    return Html(
        f'<div class="sample">{drawing}<dl><dt>target</dt><dd>{shown_target or EMPTY}</dd>'
        f"<dt>output</dt><dd>{shown_output or EMPTY}</dd>{verdict_row}</dl></div>"
    )


def _as_text(value: object) -> str:
    return "" if value is None else str(value)


def _mark_errors(characters: Iterable[tuple[str, bool]]) -> Html:
    return Html("".join(f"<mark>{escape(one)}</mark>" if wrong else escape(one) for one, wrong in characters))


def ink_svg(ink: Sequence[Sequence[float]], *, label: str) -> Html:
    """Draw the strokes of (dx, dy, pen-up) steps, y pointing up; `label` is for people who do not see them."""
    ink_T3: npt.NDArray[np.float64] = np.asarray(ink, dtype=np.float64)
    points_T2 = np.cumsum(ink_T3[:, :2] * np.array([1.0, -1.0]), axis=0)
    low, high = points_T2.min(axis=0), points_T2.max(axis=0)
    margin = INK_MARGIN * max(float(high[1] - low[1]), 0.25 * float(high[0] - low[0]), 1e-3)
    left, top = (low - margin).tolist()
    width, height = (high - low + 2 * margin).tolist()
    scale = min(INK_HEIGHT / height, MAX_INK_WIDTH / width)
    # Coordinates are in pixels from the corner, so that two decimals are enough for ink of any size.
    placed_T2 = (points_T2 - np.array([left, top])) * scale
    return Html(
        f'<svg role="img" aria-label="{escape(label)}" width="{width * scale:.0f}" height="{height * scale:.0f}" '
        f'viewBox="0 0 {width * scale:.2f} {height * scale:.2f}"><path d="{stroke_path(placed_T2, ink_T3[:, 2])}" '
        'fill="none" stroke="#22303f" stroke-width="1.7" stroke-linecap="round" stroke-linejoin="round"/></svg>'
    )


def stroke_path(points_T2: npt.NDArray[np.float64], pen_up_T: npt.NDArray[np.float64]) -> str:
    """The points as SVG path commands: M begins a stroke, L continues it; a stroke of one point is a dot."""
    begins_T = np.append(True, pen_up_T[:-1] > 0.5)
    ends_T = np.append(pen_up_T[:-1] > 0.5, True)
    commands = []
    for (x, y), begins, ends in zip(points_T2.tolist(), begins_T, ends_T, strict=True):
        at = f"{x:.2f} {y:.2f}"
        if begins:
            commands.append(f"M{at}")
        if not begins or ends:
            commands.append(f"L{at}")
    return "".join(commands)


def label_track_svg(track: Mapping[str, Any]) -> Html:
    """Two bands, the target above the output, and the names of their colours below.

    A track has the `names` of the labels, and `target` and `output` as runs of [label, steps]; -1 means no label.
    """
    height = 2 * TRACK_HEIGHT + TRACK_GAP
    sides = {"target": 0, "output": TRACK_HEIGHT + TRACK_GAP}
    bands = "".join(_band(track[side], track["names"], top=top) for side, top in sides.items())
    used = sorted({int(label) for side in sides for label, _ in track[side]})
    keys = "".join(
        f'<span><i style="background:{_colour(label)}"></i>{escape(_name(track["names"], label))}</span>'
        for label in used
    )
    return Html(
        f'<svg role="img" aria-label="labels of each step, true above found" width="{TRACK_WIDTH}" height="{height}" '
        f'viewBox="0 0 {TRACK_WIDTH} {height}">{bands}</svg><div class="key">{keys}</div>'
    )


def _band(runs: Sequence[Sequence[int]], names: Sequence[str], *, top: int) -> str:
    total = max(1, sum(steps for _, steps in runs))
    parts, left = [], 0
    for label, steps in runs:
        x, width = left * TRACK_WIDTH / total, steps * TRACK_WIDTH / total
        parts.append(
            f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{TRACK_HEIGHT}" '
            f'fill="{_colour(label)}"><title>{escape(_name(names, label))}</title></rect>'
        )
        left += steps
    return "".join(parts)


def _colour(label: int) -> str:
    return NO_LABEL_COLOUR if label < 0 else LABEL_COLOURS[label % len(LABEL_COLOURS)]


def _name(names: Sequence[str], label: int) -> str:
    return "no label" if label < 0 else names[label]
