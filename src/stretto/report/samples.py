"""What the net made of test sequences, beside what they are."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import numpy as np

from stretto.report.ink import ink_svg
from stretto.report.page import Html, escaped
from stretto.report.strip import label_track_svg

EMPTY: Final = Html('<i class="detail">(empty)</i>')

Edit = Literal["same", "changed", "missing", "extra"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """A target and an output with the places where they differ.

    Attributes:
        target: Each character of the target, and whether the output lacks or changes it.
        output: Each character of the output, and whether the target does not have it there.
        errors: The fewest characters to insert, delete or replace.
    """

    target: tuple[tuple[str, bool], ...]
    output: tuple[tuple[str, bool], ...]
    errors: int


def compare(target: str, output: str) -> Alignment:
    """Line the two texts up with the fewest edits."""
    edits = _fewest_edits(target, output)
    lefts, rights = iter(target), iter(output)
    return Alignment(
        target=tuple((next(lefts), edit != "same") for edit in edits if edit != "extra"),
        output=tuple((next(rights), edit != "same") for edit in edits if edit != "missing"),
        errors=sum(edit != "same" for edit in edits),
    )


def samples_html(items: Iterable[Mapping[str, Any]], *, metric: str) -> Html:
    """A card a sequence: its ink when it has some, the target, and the output with what is wrong in it marked.

    Args:
        items: Each with `target`, `output` and `ink` (rows of dx, dy, pen-up, or None); where labels of steps are
            learnt, with a `track` of them, which is shown instead.
        metric: The task's; it decides what counts as wrong: characters that must be edited for "cer", the
            whole for "accuracy", characters at their place for "perplexity", nothing otherwise.
    """
    return Html('<div class="samples">' + "\n".join(_card(item, metric=metric) for item in items) + "</div>")


def _card(item: Mapping[str, Any], *, metric: str) -> Html:
    track = item.get("track")
    if track:
        right = f"truth above, output below: {track['right']:.1%} right"
        return Html(f'<div class="sample">{label_track_svg(track)}<div class="detail">{escaped(right)}</div></div>')
    target, output = _text(item.get("target")), _text(item.get("output"))
    ink = item.get("ink")
    drawing = ink_svg(ink, label=target) if ink else ""
    verdict = ""
    if metric == "cer":
        alignment = compare(target, output)
        shown_target, shown_output = _marked(alignment.target), _marked(alignment.output)
        verdict = (
            f"{alignment.errors} {'error' if alignment.errors == 1 else 'errors'}" if alignment.errors else "correct"
        )
    elif metric == "accuracy":
        shown_target = escaped(target)
        shown_output = Html(f"<mark>{escaped(output)}</mark>") if target != output else escaped(output)
        verdict = "wrong" if target != output else "correct"
    elif metric == "perplexity":
        places = [(one, one != expected) for one, expected in zip(output, target, strict=False)]
        shown_target, shown_output = (
            escaped(target),
            _marked([*places, *((one, True) for one in output[len(target) :])]),
        )
        verdict = f"{sum(not wrong for _, wrong in places)} of {len(target)} characters right"
    else:
        shown_target, shown_output = escaped(target), escaped(output)
    told = f'<dt></dt><dd class="detail">{escaped(verdict)}</dd>' if verdict else ""
    return Html(
        f'<div class="sample">{drawing}<dl><dt>target</dt><dd>{shown_target or EMPTY}</dd>'
        f"<dt>output</dt><dd>{shown_output or EMPTY}</dd>{told}</dl></div>"
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _marked(characters: Iterable[tuple[str, bool]]) -> Html:
    return Html("".join(f"<mark>{escaped(one)}</mark>" if wrong else escaped(one) for one, wrong in characters))


def _fewest_edits(target: str, output: str) -> list[Edit]:
    """The edits from the first character to the last, by the usual table of edit distances."""
    rows, cols = len(target), len(output)
    cost = np.zeros((rows + 1, cols + 1), dtype=np.int64)
    cost[:, 0], cost[0] = np.arange(rows + 1), np.arange(cols + 1)
    for i in range(1, rows + 1):
        for j in range(1, cols + 1):
            differs = target[i - 1] != output[j - 1]
            cost[i, j] = min(cost[i - 1, j - 1] + differs, cost[i - 1, j] + 1, cost[i, j - 1] + 1)
    edits: list[Edit] = []
    i, j = rows, cols
    while i or j:
        if i and j and cost[i, j] == cost[i - 1, j - 1] + (target[i - 1] != output[j - 1]):
            i, j = i - 1, j - 1
            edits.append("same" if target[i] == output[j] else "changed")
        elif i and cost[i, j] == cost[i - 1, j] + 1:
            i -= 1
            edits.append("missing")
        else:
            j -= 1
            edits.append("extra")
    return edits[::-1]
