"""Which classes were taken for which: a matrix with a row for each true class and a column for each found one.

Up to 20 classes are shown with their numbers. More become a picture of small squares, without numbers, of the 64 that
have most errors. In both the shade is the share of the row; a list of the most frequent confusions is below.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stretto.report.page import Html, bullets, columns, escape, join, paragraph

MAX_NUMBERED: Final = 20
MAX_SHOWN: Final = 64
MAX_LISTED: Final = 12
MAX_NAME: Final = 20
MAX_SMALL_NAME: Final = 12
"""Letters of a name beside numbers, and beside small squares."""
LEVELS: Final = 5
"""Shades of right and of wrong cells, as the style of the page has them."""

Pairs = Sequence[tuple[str, str, int, int]]


def confusion_html(confusion: Mapping[str, Any]) -> Html:
    """The matrix and the most frequent confusions.

    Args:
        confusion: `names` of the classes, and `pairs` of [true class, class found, how often], by number.
    """
    names: list[str] = [str(name) for name in confusion["names"]]
    counts = {(int(true), int(found)): int(count) for true, found, count in confusion["pairs"]}
    if not counts:
        return paragraph("Nothing with a class was tested.")
    totals, errors = Counter[int](), Counter[int]()
    for (true, found), count in counts.items():
        totals[true] += count
        if true != found:
            errors.update({true: count, found: count})
    shown = list(range(len(names)))
    words = "Rows are the true classes, columns what the model found. The shade is the share of the row."
    if len(names) > MAX_SHOWN:
        shown = sorted(sorted(shown, key=lambda number: -errors[number])[:MAX_SHOWN])
        words += f" Of {len(names)} classes those {MAX_SHOWN} are shown that have most errors."
    if len(names) > MAX_NUMBERED:
        words += " A square names its classes and its count when the pointer rests on it."
    parts = [paragraph(words), _matrix(names, counts, totals, shown)]
    wrong = most_confused(confusion)
    if wrong:
        listed = [(true, found, f"{count:,}", f"{count / total:.1%}") for true, found, count, total in wrong]
        title = "Most frequent confusions:" if len(counts) > len(totals) else ""
        parts += [paragraph(title), columns(["true class", "found", "times", "of the class"], listed)]
    else:
        parts.append(bullets(["No class was taken for another."]))
    return join(parts)


def most_confused(confusion: Mapping[str, Any]) -> Pairs:
    """The most frequent errors: the true class, the class found, how often, and of how many; at most twelve."""
    totals = Counter[int]()
    for true, _, count in confusion["pairs"]:
        totals[true] += count
    wrong = sorted((-count, true, found) for true, found, count in confusion["pairs"] if true != found)
    names = confusion["names"]
    return [(str(names[true]), str(names[found]), -count, totals[true]) for count, true, found in wrong[:MAX_LISTED]]


def _matrix(
    names: Sequence[str], counts: Mapping[tuple[int, int], int], totals: Counter[int], shown: list[int]
) -> Html:
    is_small = len(names) <= MAX_NUMBERED
    most = MAX_NAME if is_small else MAX_SMALL_NAME
    head = "".join(_heading(names[number], scope="col", most=most) for number in shown)
    rows = []
    for true in shown:
        total = totals[true]
        cells = "".join(
            _cell(counts.get((true, found), 0), total, names=(names[true], names[found]), is_numbered=is_small)
            for found in shown
        )
        share = counts.get((true, true), 0) / total if total else 0.0
        right = "-" if not total else f"{share:.1%}" if is_small else f"{share:.0%}"
        rows.append(f'<tr>{_heading(names[true], scope="row", most=most)}{cells}<td class="share">{right}</td></tr>')
    kind = "confusion" if is_small else "confusion many"
    return Html(
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr><td></td>{head}'
        f'<th scope="col" class="share">right</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _heading(name: str, *, scope: str, most: int) -> Html:
    """A name, shortened if it is long, and upright above its column; whole when the pointer rests on it."""
    short = name if len(name) <= most else f"{name[: most - 1]}…"
    kind = ' class="upright"' if scope == "col" and len(short) > (2 if most == MAX_NAME else 1) else ""
    return Html(f'<th scope="{scope}"{kind} title="{escape(name)}"><span>{escape(short)}</span></th>')


def _cell(count: int, total: int, *, names: tuple[str, str], is_numbered: bool) -> Html:
    if not count:
        return Html("<td></td>")
    true, found = names
    # The square root shows rare errors too.
    level = min(LEVELS, max(1, math.ceil(LEVELS * math.sqrt(count / total))))
    kind = f"{'right' if true == found else 'wrong'}{level}"
    said = f"{true} taken for {found}" if true != found else f"{true} right"
    title = f"{said}: {count:,} of {total:,}"
    return Html(f'<td class="{kind}" title="{escape(title)}">{f"{count:,}" if is_numbered else ""}</td>')
