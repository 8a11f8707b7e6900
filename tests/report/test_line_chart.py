"""A picture of lines: where they lie, and that words are escaped."""

import itertools
import re
from xml.etree import ElementTree as ET

import pytest

from stretto.report import Line, line_chart
from stretto.report.plot import CHART_HEIGHT, CHART_WIDTH

TICKS = [(0.0, "0"), (1.0, "1")]


def _lines(picture: str) -> list[list[tuple[float, float]]]:
    found = re.findall(r'<polyline points="([^"]*)"', picture)
    return [[tuple(map(float, pair.split(","))) for pair in points.split()] for points in found]  # type: ignore[misc]


def test_higher_values_lie_higher_and_inside() -> None:
    picture = line_chart(
        [Line(name="up", values=(0.0, 0.5, 1.0)), Line(name="level", values=(0.25, 0.25))],
        places=["1", "2", "4"],
        across="x",
        up="y",
        ticks=TICKS,
    )
    rising, level = _lines(picture)
    assert rising[0][1] > rising[1][1] > rising[2][1]
    assert rising[1][1] == pytest.approx((rising[0][1] + rising[2][1]) / 2, abs=0.1)
    assert [x for x, _ in level] == [x for x, _ in rising[:2]]
    assert all(0 < x < CHART_WIDTH and 0 < y < CHART_HEIGHT for line in (rising, level) for x, y in line)


def test_names_do_not_touch() -> None:
    lines = [Line(name=str(number), values=(0.5, 0.5)) for number in range(4)]
    picture = line_chart(lines, places=["1", "2"], across="", up="", ticks=TICKS)
    heights = sorted(float(y) for y in re.findall(r'y="([\d.]+)" fill="#[^"]*">\d</text>', picture))
    assert len(heights) == 4
    assert all(below - above >= 16 for above, below in itertools.pairwise(heights))


def test_words_are_escaped() -> None:
    hostile = "<b>&'\""
    picture = line_chart([Line(name=hostile, values=(0.5,))], places=[hostile], across=hostile, up=hostile, ticks=TICKS)
    assert "".join(ET.fromstring(picture).itertext()).count(hostile) == 4
