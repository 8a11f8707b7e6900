"""The histogram of lengths in a terminal: block characters, with the bucket edges beside them.

Shape legend: H bins.
"""

import dataclasses
from collections.abc import Sequence
from typing import Final, final

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from stretto.report.length_histogram import USUAL

MOST_LINES = 18
MOST_WIDTH, LEAST_WIDTH = 60, 8
MOST_EDGES_LISTED = 4
EIGHTHS: Final = "▏▎▍▌▋▊▉"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthBars:
    """A bar a line, as wide as the terminal allows; plain characters where it shows no others.

    Attributes:
        bounds: Where the bins begin, and the end of the last; a bin holds its begin, not its end.
        counts: Sequences in each bin.
        edges: Bucket edges.
        longest: The greatest length.
    """

    bounds: Sequence[int]
    counts: Sequence[int]
    edges: Sequence[int]
    longest: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = options.ascii_only
        lines = self.lines()
        names = [span(low, high) for low, high, _ in lines]
        marks = [self._edges_between(low, high, plain=plain) for low, high, _ in lines]
        numbers = [f"{count:,}" for _, _, count in lines]
        taken = sum(max(map(len, cells)) for cells in (names, marks, numbers)) + 6
        width = max(LEAST_WIDTH, min(MOST_WIDTH, options.max_width - taken))
        most = max(count for _, _, count in lines)
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(justify="right", style="dim", no_wrap=True)
        table.add_column(width=width, style="blue", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="yellow")
        for name, (_, _, count), number, mark in zip(names, lines, numbers, marks, strict=True):
            table.add_row(name, _bar(count / most * width, plain=plain), number, mark)
        yield table

    def lines(self) -> list[tuple[int, int, int]]:
        """Shortest, longest and count of each line: equal bins up to the usual lengths, longer ones in the last."""
        total_H = np.cumsum(self.counts)
        usual = int(np.searchsorted(total_H, USUAL * total_H[-1])) + 1
        step = -(-usual // MOST_LINES)
        begins = list(range(0, usual, step))
        if begins[-1] + step < len(self.counts):
            begins.append(begins[-1] + step)
        ends = [*begins[1:], len(self.counts)]
        return [
            (self.bounds[begin], min(self.bounds[end] - 1, self.longest), sum(self.counts[begin:end]))
            for begin, end in zip(begins, ends, strict=True)
        ]

    def _edges_between(self, low: int, high: int, *, plain: bool) -> str:
        within = [f"{edge:,}" for edge in self.edges if low <= edge <= high]
        if not within:
            return ""
        listed = ", ".join(within)
        if len(within) > MOST_EDGES_LISTED:
            listed = f"{len(within)} edges, {within[0]} to {within[-1]}"
        return f"{'<' if plain else '◂'} {listed}"


def span(low: int, high: int) -> str:
    """Lengths from `low` up to and including `high`, in words."""
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _bar(length: float, *, plain: bool) -> str:
    """A bar of that many characters, to an eighth; whatever is there at all is seen."""
    eighths = max(round(length * 8), 1 if length > 0 else 0)
    if plain:
        return "#" * -(-eighths // 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8 - 1] if eighths % 8 else "")
