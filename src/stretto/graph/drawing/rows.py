"""The rows of a picture: which boxes lie in each, in an order with few crossings.

A layered drawing after Sugiyama et al. (1981): rows by the longest path within each band, then an order by barycentres.
A long arrow takes a place in every row that it passes.
"""

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, final

from stretto.graph.drawing.panel import Panel

SWEEPS: Final = 16


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


def arrange(panel: Panel) -> Grid:
    """Rows for the boxes of a panel, in a good order."""
    grid = Grid(row_of=_rows(panel))
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
    _order(grid)
    return grid


def _rows(panel: Panel) -> list[int]:
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


def _order(grid: Grid) -> None:
    above: dict[int, list[int]] = {}
    below: dict[int, list[int]] = {}
    for upper, lower in grid.links:
        above.setdefault(lower, []).append(upper)
        below.setdefault(upper, []).append(lower)
    best, fewest = [list(row) for row in grid.rows], _crossings(grid.rows, below)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        for number in range(len(grid.rows)) if down else reversed(range(len(grid.rows))):
            row = grid.rows[number]
            # Places of the row that is looked at, as shares of its width: rows are of unequal length.
            beside = number - 1 if down else number + 1
            places = _places(grid.rows[beside]) if 0 <= beside < len(grid.rows) else {}
            own = _places(row)
            row.sort(key=lambda item: _mean([places[n] for n in neighbours.get(item, ())], own[item]))
        _swap_neighbours(grid.rows, above, below)
        count = _crossings(grid.rows, below)
        if count < fewest:
            best, fewest = [list(row) for row in grid.rows], count
    grid.rows = best


def _places(row: list[int]) -> dict[int, float]:
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
