"""Static figures: where lines lie, what is crossed out, and that words are escaped."""

import math
import re
from xml.etree import ElementTree as ET

import pytest

from bench.figure import BLUE, Line, Panel, draw_figure


def _points(picture: str) -> list[list[tuple[float, ...]]]:
    found = re.findall(r'<polyline points="([^"]*)"', picture)
    return [[tuple(map(float, pair.split(","))) for pair in points.split()] for points in found]


@pytest.mark.parametrize("scale", ["linear", "from zero", "log"])
def test_higher_values_lie_higher_and_inside(scale: str) -> None:
    rising = Line(name="up", colour=BLUE, xs=["1", "2", "4"], ys=[1.0, 2.0, 4.0])
    level = Line(name="level", colour=BLUE, xs=["1", "2"], ys=[1.5, 1.5])
    panel = Panel(title="", x="x", y="y", lines=[rising, level], y_scale=scale)  # type: ignore[arg-type]
    up, flat = _points(draw_figure([panel], size=(400, 300)))
    assert up[0][1] > up[1][1] > up[2][1]
    assert flat[0][1] == flat[1][1]
    assert [x for x, _ in flat] == [x for x, _ in up[:2]]
    assert all(0 < x < 400 and 0 < y < 340 for line in (up, flat) for x, y in line)


def test_what_is_missing_is_not_drawn_and_what_is_infinite_is_crossed() -> None:
    line = Line(name="a", colour=BLUE, xs=[1.0, 2.0, 3.0], ys=[1.0, None, math.inf])
    picture = draw_figure([Panel(title="", x="", y="", lines=[line], x_scale="linear")])
    assert len(_points(picture)[0]) == 1
    assert picture.count("<path") == 1
    assert "nan" not in picture


def test_words_are_escaped() -> None:
    hostile = "<b>&'\""
    line = Line(name=hostile, colour=BLUE, xs=[hostile], ys=[0.5])
    picture = draw_figure([Panel(title=hostile, x=hostile, y=hostile, lines=[line])], cross=hostile)
    assert "".join(ET.fromstring(picture).itertext()).count(hostile) >= 5
