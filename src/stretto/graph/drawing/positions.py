"""Positions within rows that keep arrows short and straight."""

import math
from itertools import pairwise
from typing import Final

from stretto.graph.drawing.rows import Grid

BOX_GAP: Final = 18.0
ROUNDS: Final = 120


def middles_of(grid: Grid, widths: list[float]) -> list[float]:
    """Positions that bring neighbours close, under the order of each row: least squares, row by row, over and over."""
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
        # What an arrow passes should lie in line; where it ends matters less.
        weight = (1.0, 2.0, 12.0)[(upper not in ends) + (lower not in ends)]
        near.setdefault(upper, []).append((lower, weight))
        near.setdefault(lower, []).append((upper, weight))
    for turn in range(ROUNDS):
        for row in grid.rows if turn % 2 == 0 else reversed(grid.rows):
            wanted, weights = [], []
            for item in row:
                found = near.get(item, [(item, 0.1)])
                total = sum(weight for _, weight in found)
                wanted.append(sum(middles[other] * weight for other, weight in found) / total)
                weights.append(total)
            for item, place in zip(row, _apart(row, wanted, weights, widths), strict=True):
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
                # Rounding must not leave no room at all: where it is now is fine.
                least, most = min(least, middles[item]), max(most, middles[item])
                if max(low, least) > min(high, most):
                    break
                low, high = max(low, least), min(high, most)
                run.append(item)
            place = min(max(sum(middles[item] for item in run) / len(run), low), high)
            for item in run:
                middles[item] = place
            waiting = waiting[len(run) :]


def _apart(row: list[int], wanted: list[float], weights: list[float], widths: list[float]) -> list[float]:
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
