"""Where everything in a picture goes: sizes of boxes, rows and bands, and lanes for arrows between steps."""

from dataclasses import dataclass, field
from typing import Final, final

from stretto.graph.drawing.panel import Box, Delayed, Look, Panel
from stretto.graph.drawing.positions import middles_of
from stretto.graph.drawing.rows import Grid, arrange

TITLE_SIZE: Final = 13.0
LINE_SIZE: Final = 11.0
ROW_GAP: Final = 30.0
TRACK: Final = 11.0
BAND_TOP: Final = 36.0
BAND_BOTTOM: Final = 16.0
BAND_GAP: Final = 14.0
BAND_SIDE: Final = 20.0
LANE: Final = 14.0
MOST_WIDTH: Final = 220.0
LEAST_WIDTH: Final = 72.0

Point = tuple[float, float]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """A place, by its left upper corner."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        """Half way across."""
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.y + self.height


@final
@dataclass(slots=True)
class Layout:
    """A panel with a place for everything.

    Attributes:
        width: Of all.
        height: Of all.
        bands: Places of the bands.
        boxes: Places of the boxes.
        arrows: Corners of the panel's arrows, from top to bottom: two for each row that an arrow passes.
        falling: Corners of the delayed arrows that lead down, by number.
        rising: Corners of all other delayed arrows, by number.
    """

    width: float = 0.0
    height: float = 0.0
    bands: list[Rectangle] = field(default_factory=list)
    boxes: list[Rectangle] = field(default_factory=list)
    arrows: list[list[Point]] = field(default_factory=list)
    falling: dict[int, list[Point]] = field(default_factory=dict)
    rising: dict[int, list[Point]] = field(default_factory=dict)


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """About how wide a text is in whichever plain font there is."""
    return len(text) * size * (0.63 if bold else 0.58)


def box_size(box: Box) -> tuple[float, float]:
    """Width and height that a box needs for its text."""
    widths = [text_width(box.title, TITLE_SIZE, bold=True), text_width(box.reads, LINE_SIZE)]
    widths.append(text_width(box.shape, LINE_SIZE))
    around = 36.0 if box.look is Look.VALUE else 20.0
    return min(max(*widths, LEAST_WIDTH - around) + around, MOST_WIDTH), 44.0 + 14.0 * bool(box.reads)


def lay_out(panel: Panel) -> Layout:
    """Find a place for everything in a panel."""
    return _LayingOut(panel)()


@final
class _LayingOut:
    """Finds places across first, then room for arrows between steps, then heights."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self.grid: Grid = arrange(panel)
        self.sizes = [box_size(box) for box in panel.boxes]
        self.widths = [width for width, _ in self.sizes] + [4.0] * (len(self.grid.row_of) - len(self.sizes))
        self.middles = middles_of(self.grid, self.widths)
        self.layout = Layout()
        self.above = [0] * len(self.grid.rows)
        self.below = [0] * len(self.grid.rows)
        self.tops: list[float] = []
        self.heights = [
            max((self.sizes[item][1] for item in row if item < len(self.sizes)), default=0.0) for row in self.grid.rows
        ]

    def __call__(self) -> Layout:
        rising = [index for index in range(len(self.panel.delayed)) if index not in self.grid.falling]
        lanes, tracks = self._lanes(rising), {}
        for index in rising:
            tracks[index] = self._tracks(self.panel.delayed[index])
        left = min([*(m - w / 2 for m, w in zip(self.middles, self.widths, strict=True)), *lanes.values(), 0.0])
        shift = BAND_SIDE - left
        self.middles = [middle + shift for middle in self.middles]
        right = max([m + w / 2 for m, w in zip(self.middles, self.widths, strict=True)], default=0.0)
        right = max([right, *(lane + shift for lane in lanes.values())])
        titles = [text_width(f"{band.title}  {band.note}", TITLE_SIZE) for band in self.panel.bands]
        self.layout.width = max([right + BAND_SIDE, *(title + BAND_SIDE for title in titles)])
        self._rows()
        self._arrows()
        for index in rising:
            self.layout.rising[index] = self._rising(index, lanes.get(index, 0.0) + shift, tracks[index])
        return self.layout

    def _lanes(self, rising: list[int]) -> dict[int, float]:
        """For each arrow that leads up, where it does: beside all that lies in between, on the nearer side."""
        taken: list[tuple[bool, float, int, int]] = []
        lanes: dict[int, float] = {}

        def span(index: int) -> tuple[int, int]:
            item = self.panel.delayed[index]
            return self.grid.row_of[item.target], self.grid.row_of[item.source]

        for index in sorted(rising, key=lambda index: (span(index)[1] - span(index)[0], index)):
            first, last = span(index)
            if first == last:
                continue
            item = self.panel.delayed[index]
            between = [vertex for row in self.grid.rows[first : last + 1] for vertex in row]
            right = max(self.middles[vertex] + self.widths[vertex] / 2 for vertex in between) + LANE
            left = min(self.middles[vertex] - self.widths[vertex] / 2 for vertex in between) - LANE
            ends = self.middles[item.source] + self.middles[item.target]
            on_right = 2 * right - ends <= ends - 2 * left
            lane, step = (right, LANE) if on_right else (left, -LANE)
            while any(
                side == on_right and abs(other - lane) < LANE and low <= last and first <= high
                for side, other, low, high in taken
            ):
                lane += step
            taken.append((on_right, lane, first, last))
            lanes[index] = lane
        return lanes

    def _tracks(self, item: Delayed) -> tuple[int, int]:
        """Room above the target's row, and below the source's unless they are the same."""
        source, target = self.grid.row_of[item.source], self.grid.row_of[item.target]
        self.above[target] += 1
        if source != target:
            self.below[source] += 1
        return self.below[source], self.above[target]

    def _rows(self) -> None:
        """Heights of rows and bands."""
        y, number = 0.0, 0
        last: dict[int, int] = {}
        for item, box in enumerate(self.panel.boxes):
            last[box.band] = max(last.get(box.band, 0), self.grid.row_of[item])
        for band in range(len(self.panel.bands)):
            top = y
            y += BAND_TOP
            while number <= last.get(band, -1):
                y += TRACK * self.above[number]
                self.tops.append(y)
                y += self.heights[number] + TRACK * self.below[number]
                y += 0.0 if number == last[band] else ROW_GAP
                number += 1
            y += BAND_BOTTOM
            self.layout.bands.append(Rectangle(x=0.0, y=top, width=self.layout.width, height=y - top))
            y += BAND_GAP
        self.layout.height = max(y - BAND_GAP, 0.0)
        for item, (width, height) in enumerate(self.sizes):
            row = self.grid.row_of[item]
            y = self.tops[row] + (self.heights[row] - height) / 2
            self.layout.boxes.append(Rectangle(x=self.middles[item] - width / 2, y=y, width=width, height=height))

    def _arrows(self) -> None:
        leaving, arriving = self._ports(outgoing=True), self._ports(outgoing=False)
        for number, hop in enumerate(self.grid.hops):
            source, target = hop[0], hop[-1]
            corners = [(leaving[source, hop[1]], self.layout.boxes[source].bottom)]
            for item in hop[1:-1]:
                top = self.tops[self.grid.row_of[item]]
                corners += [
                    (self.middles[item], top),
                    (self.middles[item], top + self.heights[self.grid.row_of[item]]),
                ]
            corners.append((arriving[target, hop[-2]], self.layout.boxes[target].y))
            if number < len(self.panel.edges):
                self.layout.arrows.append(corners)
            else:
                self.layout.falling[self.grid.falling[number - len(self.panel.edges)]] = corners

    def _ports(self, *, outgoing: bool) -> dict[tuple[int, int], float]:
        """Where arrows leave or reach each box: side by side, in the order of where they go or come from."""
        ends: dict[int, list[int]] = {}
        for hop in self.grid.hops:
            own, other = (hop[0], hop[1]) if outgoing else (hop[-1], hop[-2])
            if other not in ends.setdefault(own, []):
                ends[own].append(other)
        ports = {}
        for own, others in ends.items():
            others.sort(key=lambda item: self.middles[item])
            distance = min(16.0, (self.widths[own] - 24) / len(others))
            for position, other in enumerate(others):
                ports[own, other] = self.middles[own] + (position - (len(others) - 1) / 2) * distance
        return ports

    def _rising(self, index: int, lane: float, track: tuple[int, int]) -> list[Point]:
        item = self.panel.delayed[index]
        source, target = self.layout.boxes[item.source], self.layout.boxes[item.target]
        rows = self.grid.row_of
        above = self.tops[rows[item.target]] - TRACK * (track[1] + 0.5)
        if rows[item.source] == rows[item.target]:
            side = 1 if target.middle > source.middle else -1
            start = source.middle + side * source.width * 0.3
            return [(start, source.y), (start, above), (target.middle, above), (target.middle, target.y)]
        side = 1 if lane > source.middle else -1
        start = source.middle + side * (source.width / 2 - 14)
        below = self.tops[rows[item.source]] + self.heights[rows[item.source]] + TRACK * (track[0] + 0.5)
        return [
            (start, source.bottom),
            (start, below),
            (lane, below),
            (lane, above),
            (target.middle, above),
            (target.middle, target.y),
        ]
