"""Where everything in a picture goes: a layered drawing after Sugiyama et al. (1981).

1. rows      by the longest path within each band; a long arrow takes a place in every row that it passes
2. order     within rows, by barycentres and swaps, for few crossings
3. across    positions that keep arrows short and straight
4. down      heights of rows and bands, with room for arrows between steps, which run beside the boxes
"""

import math
from bisect import bisect_right, insort
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, final

from stretto.graph.draw_panels import Box, Delayed, Look, Panel

ORDER_SWEEPS: Final = 16
PLACEMENT_ROUNDS: Final = 120
TITLE_SIZE: Final = 13.0
LINE_SIZE: Final = 11.0
BOX_GAP: Final = 18.0
ROW_GAP: Final = 30.0
TRACK: Final = 11.0
BAND_TOP: Final = 36.0
BAND_BOTTOM: Final = 16.0
BAND_GAP: Final = 14.0
BAND_SIDE: Final = 20.0
LANE: Final = 14.0
MAX_BOX_WIDTH: Final = 220.0
MIN_BOX_WIDTH: Final = 72.0

Point = tuple[float, float]


@final
@dataclass(slots=True)
class Grid:
    """Boxes, and places that long arrows pass, in rows.

    Attributes:
        rows: What lies in each row, from left to right: numbers of boxes, and higher ones for places that arrows pass.
        row_of: The row of each of them.
        hops: What each arrow runs through, both ends included: those of the panel, then delayed ones that lead down.
        falling: Which delayed arrows lead down.
    """

    rows: list[list[int]] = field(default_factory=list)
    row_of: list[int] = field(default_factory=list)
    hops: list[list[int]] = field(default_factory=list)
    falling: list[int] = field(default_factory=list)

    @property
    def links(self) -> list[tuple[int, int]]:
        """Neighbours from one row to the next, each pair once."""
        return list(dict.fromkeys(pair for hop in self.hops for pair in pairwise(hop)))


def assign_rows(panel: Panel) -> Grid:
    """Put the boxes of a panel in rows, in an order with few crossings."""
    grid = Grid(row_of=_assign_rows(panel))
    delayed = enumerate(panel.delayed)
    grid.falling = [index for index, item in delayed if grid.row_of[item.source] < grid.row_of[item.target]]
    falling = [(panel.delayed[index].source, panel.delayed[index].target) for index in grid.falling]
    passed: dict[tuple[int, int], int] = {}
    for source, target in [*panel.edges, *falling]:
        hop = [source]
        for row in range(grid.row_of[source] + 1, grid.row_of[target]):
            # Arrows from one box run together for as long as they can.
            if (source, row) not in passed:
                passed[source, row] = len(grid.row_of)
                grid.row_of.append(row)
            hop.append(passed[source, row])
        grid.hops.append([*hop, target])
    grid.rows = [[] for _ in range(max(grid.row_of, default=-1) + 1)]
    for item, row in enumerate(grid.row_of):
        grid.rows[row].append(item)
    _order_rows(grid)
    return grid


def _assign_rows(panel: Panel) -> list[int]:
    """Bands one below the other; within a band, a box lies below all it reads, and an input just above its reader."""
    band = [box.band for box in panel.boxes]
    inside = [(source, target) for source, target in panel.edges if band[source] == band[target]]
    reads: dict[int, list[int]] = {}
    for source, target in inside:
        reads.setdefault(target, []).append(source)
    row = [0] * len(band)
    for _ in band:
        changed = False
        for target, found in reads.items():
            lowest = 1 + max(row[source] for source in found)
            if row[target] < lowest:
                row[target], changed = lowest, True
        if not changed:
            break
    for source in {source for source, _ in inside} - set(reads):
        row[source] = min(row[target] for other, target in inside if other == source) - 1
    start = 0
    for number in range(len(panel.bands)):
        here = [item for item, own in enumerate(band) if own == number]
        used = sorted({row[item] for item in here})
        for item in here:
            row[item] = start + used.index(row[item])
        start += len(used)
    return row


def _order_rows(grid: Grid) -> None:
    above: dict[int, list[int]] = {}
    below: dict[int, list[int]] = {}
    for upper, lower in grid.links:
        above.setdefault(lower, []).append(upper)
        below.setdefault(upper, []).append(lower)
    best, fewest = [list(row) for row in grid.rows], _crossings(grid.rows, below)
    for sweep in range(ORDER_SWEEPS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        for number in range(len(grid.rows)) if down else reversed(range(len(grid.rows))):
            row = grid.rows[number]
            # Places of the row that is looked at, as shares of its width: rows are of unequal length.
            beside = number - 1 if down else number + 1
            places = _relative_places(grid.rows[beside]) if 0 <= beside < len(grid.rows) else {}
            own = _relative_places(row)
            row.sort(key=lambda item: _mean([places[n] for n in neighbours.get(item, ())], own[item]))
        _swap_neighbours(grid.rows, above, below)
        count = _crossings(grid.rows, below)
        if count < fewest:
            best, fewest = [list(row) for row in grid.rows], count
    grid.rows = best


def _relative_places(row: list[int]) -> dict[int, float]:
    return {item: (position + 0.5) / len(row) for position, item in enumerate(row)}


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _swap_neighbours(rows: list[list[int]], above: dict[int, list[int]], below: dict[int, list[int]]) -> None:
    """Exchange neighbours in a row while that saves crossings."""
    for number, row in enumerate(rows):
        places = {item: p for beside in rows[max(number - 1, 0) : number + 2] for p, item in enumerate(beside)}
        for _ in row:
            changed = False
            for position in range(len(row) - 1):
                left, right = row[position], row[position + 1]
                gain = sum(
                    (places[a] > places[b]) - (places[a] < places[b])
                    for neighbours in (above, below)
                    for a in neighbours.get(left, ())
                    for b in neighbours.get(right, ())
                )
                if gain > 0:
                    row[position], row[position + 1], changed = right, left, True
            if not changed:
                break


def _crossings(rows: list[list[int]], below: dict[int, list[int]]) -> int:
    total = 0
    for upper, lower in pairwise(rows):
        place = {item: position for position, item in enumerate(lower)}
        seen: list[int] = []
        for item in upper:
            ends = sorted(place[other] for other in below.get(item, ()))
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


def _place_across(grid: Grid, widths: list[float]) -> list[float]:
    """Positions that keep arrows short and straight: least squares in each row, under its order, repeatedly."""
    middles = [0.0] * len(widths)
    for row in grid.rows:
        x = 0.0
        for item in row:
            middles[item] = x + widths[item] / 2
            x += widths[item] + BOX_GAP
        for item in row:
            middles[item] -= x / 2
    ends = {item for hop in grid.hops for item in (hop[0], hop[-1])}
    near: dict[int, list[tuple[int, float]]] = {}
    for upper, lower in grid.links:
        # The places that an arrow passes should lie in line; its ends matter less.
        weight = (1.0, 2.0, 12.0)[(upper not in ends) + (lower not in ends)]
        near.setdefault(upper, []).append((lower, weight))
        near.setdefault(lower, []).append((upper, weight))
    for turn in range(PLACEMENT_ROUNDS):
        for row in grid.rows if turn % 2 == 0 else reversed(grid.rows):
            wanted, weights = [], []
            for item in row:
                found = near.get(item, [(item, 0.1)])
                total = sum(weight for _, weight in found)
                wanted.append(sum(middles[other] * weight for other, weight in found) / total)
                weights.append(total)
            for item, place in zip(row, _separate(row, wanted, weights, widths), strict=True):
                middles[item] = place
    _straighten(grid, middles, widths)
    return middles


def _straighten(grid: Grid, middles: list[float], widths: list[float]) -> None:
    """Let arrows that pass rows run upright for as many rows as their neighbours leave room."""
    boxes = {item for hop in grid.hops for item in (hop[0], hop[-1])}

    def room(item: int) -> tuple[float, float]:
        row = grid.rows[grid.row_of[item]]
        at = row.index(item)
        low, high = -math.inf, math.inf
        if at:
            low = middles[row[at - 1]] + (widths[row[at - 1]] + widths[item]) / 2 + BOX_GAP
        if at + 1 < len(row):
            high = middles[row[at + 1]] - (widths[row[at + 1]] + widths[item]) / 2 - BOX_GAP
        return low, high

    for hop in sorted(grid.hops, key=len, reverse=True):
        waiting = [item for item in hop if item not in boxes]
        while waiting:
            low, high, run = -math.inf, math.inf, []
            for item in waiting:
                least, most = room(item)
                # Rounding must not leave no room at all: the present place is fine.
                least, most = min(least, middles[item]), max(most, middles[item])
                if max(low, least) > min(high, most):
                    break
                low, high = max(low, least), min(high, most)
                run.append(item)
            place = min(max(sum(middles[item] for item in run) / len(run), low), high)
            for item in run:
                middles[item] = place
            waiting = waiting[len(run) :]


def _separate(row: list[int], wanted: list[float], weights: list[float], widths: list[float]) -> list[float]:
    """The places nearest to those wanted at which nothing overlaps: neighbours that push each other move as one."""
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(offsets[-1] + (widths[left] + widths[right]) / 2 + BOX_GAP)
    blocks: list[tuple[float, float, int]] = []
    for place, weight, offset in zip(wanted, weights, offsets, strict=True):
        blocks.append((place - offset, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (one, first, many), (two, second, more) = blocks[-2:]
            blocks[-2:] = [((one * first + two * second) / (first + second), first + second, many + more)]
    places = [place for place, _, count in blocks for _ in range(count)]
    return [place + offset for place, offset in zip(places, offsets, strict=True)]


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
    """About how wide a text is in any plain font."""
    return len(text) * size * (0.63 if bold else 0.58)


def _box_size(box: Box) -> tuple[float, float]:
    """Width and height that a box needs for its text."""
    widths = [text_width(box.title, TITLE_SIZE, bold=True), text_width(box.reads, LINE_SIZE)]
    widths.append(text_width(box.shape, LINE_SIZE))
    around = 36.0 if box.look is Look.VALUE else 20.0
    return min(max(*widths, MIN_BOX_WIDTH - around) + around, MAX_BOX_WIDTH), 44.0 + 14.0 * bool(box.reads)


def lay_out(panel: Panel) -> Layout:
    """Find a place for everything in a panel."""
    return _Placement(panel)()


@final
class _Placement:
    """Finds places across first, then room for arrows between steps, then heights."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self.grid: Grid = assign_rows(panel)
        self.sizes = [_box_size(box) for box in panel.boxes]
        self.widths = [width for width, _ in self.sizes] + [4.0] * (len(self.grid.row_of) - len(self.sizes))
        self.middles = _place_across(self.grid, self.widths)
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
