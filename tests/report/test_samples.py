"""Samples: ink as SVG, tracks of labels, and texts with their errors marked."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.report.samples import INK_HEIGHT, MAX_INK_WIDTH, align, ink_svg, samples_html


def _points(svg: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    path = ET.fromstring(svg).find("path")
    assert path is not None
    return np.array([[float(x), float(y)] for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path.attrib["d"])])


def test_known_ink_has_a_known_picture() -> None:
    # A step right and up by 1, pen up, then a step right and down: margins are 12 % of the height on every side.
    svg = ink_svg([[0, 0, 0], [1, 1, 1], [1, -1, 1]], label="v")
    unit = INK_HEIGHT / 1.24
    expected = np.array([[0, 1], [1, 0], [2, 1], [2, 1]]) * unit + 0.12 * unit
    np.testing.assert_allclose(_points(svg), expected, atol=0.006)
    root = ET.fromstring(svg)
    assert root.attrib["height"] == str(INK_HEIGHT)
    assert root.attrib["width"] == f"{2.24 * unit:.0f}"
    assert root.attrib["aria-label"] == "v"


def test_a_label_cannot_leave_its_attribute() -> None:
    root = ET.fromstring(ink_svg([[0, 0, 1]], label='"><script>alert(1)</script>'))
    assert root.attrib["aria-label"] == '"><script>alert(1)</script>'
    assert [child.tag for child in root] == ["path"]


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.tuples(st.floats(-8, 8), st.floats(-8, 8), st.sampled_from([0.0, 1.0])), min_size=1, max_size=30)
)
def test_all_ink_lies_inside_its_picture(steps: list[tuple[float, float, float]]) -> None:
    svg = ink_svg(steps, label="")
    _, _, width, height = map(float, ET.fromstring(svg).attrib["viewBox"].split())
    points = _points(svg)
    assert (points > -0.01).all()
    assert (points <= np.array([width, height]) + 0.01).all()
    assert height <= INK_HEIGHT + 0.01
    assert width <= MAX_INK_WIDTH + 0.01
    ends = [*(pen_up > 0.5 for _, _, pen_up in steps[:-1]), True]
    dots = sum(end and begin for end, begin in zip(ends, [True, *ends], strict=False))
    assert svg.count("M") == sum(ends)
    assert len(points) == len(steps) + dots


def _bracketed(characters: list[tuple[str, bool]]) -> str:
    return "".join(f"[{one}]" if wrong else one for one, wrong in characters)


@pytest.mark.parametrize(
    ("target", "output", "marked_target", "marked_output", "errors"),
    [
        ("same", "same", "same", "same", 0),
        ("tone", "tune", "t[o]ne", "t[u]ne", 1),
        ("learn", "lean", "lea[r]n", "lean", 1),
        ("ice", "icee", "ice", "ice[e]", 1),
        ("ab", "", "[a][b]", "", 2),
        ("", "ab", "", "[a][b]", 2),
    ],
)
def test_wrong_characters_are_marked(
    target: str, output: str, marked_target: str, marked_output: str, errors: int
) -> None:
    in_target, in_output, found = align(target, output)
    assert (_bracketed(in_target), _bracketed(in_output), found) == (marked_target, marked_output, errors)


def _distance(one: str, other: str) -> int:
    if not one or not other:
        return len(one) + len(other)
    changed = _distance(one[1:], other[1:]) + (one[0] != other[0])
    return min(changed, _distance(one[1:], other) + 1, _distance(one, other[1:]) + 1)


@settings(deadline=None, max_examples=80)
@given(target=st.text("abc", max_size=5), output=st.text("abc", max_size=5))
def test_the_marks_are_the_fewest_edits(target: str, output: str) -> None:
    *sides, errors = align(target, output)
    assert errors == _distance(target, output)
    assert ["".join(one for one, _ in side) for side in sides] == [target, output]
    kept = [[one for one, wrong in side if not wrong] for side in sides]
    assert kept[0] == kept[1]


def test_samples_follow_the_metric() -> None:
    item = {"target": "seven", "output": "eleven", "ink": None}
    assert "<mark>eleven</mark>" in samples_html([item], metric="accuracy")
    assert "errors" in samples_html([item], metric="cer")
    by_place = samples_html([{"target": "abc", "output": "abd", "ink": None}], metric="perplexity")
    assert "ab<mark>d</mark>" in by_place
    assert "2 of 3 characters right" in by_place
    assert "<mark>" not in samples_html([item], metric="something else")
    assert "(empty)" in samples_html([{"target": "a", "output": "", "ink": None}], metric="cer")


def test_hostile_transcripts_are_escaped_character_by_character() -> None:
    shown = samples_html([{"target": "<b>", "output": "<script>", "ink": [[0, 0, 1]]}], metric="cer")
    assert "<b>" not in shown
    assert "<script" not in shown
    assert "&lt;" in shown


def test_labels_along_a_sequence_are_drawn_as_two_bands() -> None:
    hostile = "</script><script>alert(1)</script>"
    track = {"names": ["sit", hostile], "target": [[0, 5], [-1, 5]], "output": [[1, 10]], "right": 0.125}
    text = samples_html([{"target": "sit", "output": "x", "ink": None, "track": track}], metric="accuracy")
    assert text.count("<rect") == 3
    assert 'x="0.00" y="0" width="215.00"' in text
    assert 'x="0.00" y="23" width="430.00"' in text
    assert "12.5% right" in text
    assert "no label" in text
    assert hostile not in text
