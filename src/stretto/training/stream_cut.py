"""One long text cut into streams that are read side by side, a window after the other.

Shape legend: B streams of one worker, T steps of a window.
"""

import bisect
import dataclasses
import itertools
from typing import final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
Run = tuple[int, int]
"""Places of the text from the first up to, not with, the second."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one worker reads at once.

    Attributes:
        places_BT: Where each step is in the text; behind a row's end, its last place.
        lengths_B: Steps of each row, falling; streams that have come to their end have no row.
    """

    places_BT: Array
    lengths_B: Array


@final
class StreamCut:
    """Runs of a text, end to end, cut into streams whose lengths differ by one step at most; longer ones come first.

    So the streams that still go on are always the first ones, and every step is in exactly one window.

    Args:
        runs: What is to be read, in order.
        num_streams: How many streams; as many as there are steps, if those are fewer.
        window: Most steps of a window.

    Attributes:
        runs, window: As given.
        num_streams: As they are.
        num_steps: Steps of all streams.
        num_windows: Windows until the longest stream ends.
    """

    def __init__(self, runs: tuple[Run, ...], *, num_streams: int, window: int) -> None:
        self.runs, self.window = runs, window
        lengths = [end - begin for begin, end in runs]
        self._begins = np.array([begin for begin, _ in runs], dtype=np.int64)
        self._firsts = np.array([0, *itertools.accumulate(lengths)][:-1], dtype=np.int64)
        self.num_steps = sum(lengths)
        self.num_streams = max(1, min(num_streams, self.num_steps))
        self._shortest, self._num_longer = divmod(self.num_steps, self.num_streams)
        self.num_windows = -(-(self._shortest + (self._num_longer > 0)) // window)

    def share(self, *, rank: int, size: int) -> slice:
        """The streams of one of so many workers: as evenly as whole streams allow."""
        each = -(-self.num_streams // size)
        return slice(min(rank * each, self.num_streams), min((rank + 1) * each, self.num_streams))

    def read(self, number: int, streams: slice) -> Window:
        """The window with this number of some of the streams."""
        starts_B, lengths_B = self._streams(np.arange(streams.start, streams.stop))
        offset = number * self.window
        left_B = np.clip(lengths_B - offset, 0, self.window)
        num_rows = int((left_B > 0).sum())
        left_B, starts_B = left_B[:num_rows], starts_B[:num_rows] + offset
        steps_T = np.arange(left_B[0] if num_rows else 0)
        orders_BT = starts_B[:, None] + np.minimum(steps_T, left_B[:, None] - 1)
        return Window(places_BT=self._places(orders_BT), lengths_B=left_B)

    def rest(self, used: int) -> tuple[Run, ...]:
        """What is left of every stream, in order, when so many windows are used."""
        starts, lengths = self._streams(np.arange(self.num_streams))
        begins = starts + np.minimum(used * self.window, lengths)
        pieces = zip(begins.tolist(), (starts + lengths).tolist(), strict=True)
        return tuple(run for begin, end in pieces if begin < end for run in self._runs_between(begin, end))

    def _streams(self, numbers: Array) -> tuple[Array, Array]:
        starts = numbers * self._shortest + np.minimum(numbers, self._num_longer)
        return starts, self._shortest + (numbers < self._num_longer)

    def _places(self, orders: Array) -> Array:
        """Places in the text of steps by their order in the runs."""
        if len(self.runs) == 1:
            return orders + self.runs[0][0]
        run = np.searchsorted(self._firsts, orders, side="right") - 1
        places: Array = self._begins[run] + orders - self._firsts[run]
        return places

    def _runs_between(self, begin: int, end: int) -> list[Run]:
        found = []
        number = bisect.bisect_right(self._firsts, begin) - 1
        while begin < end:
            first = int(self._firsts[number])
            length = self.runs[number][1] - self.runs[number][0]
            stop = min(end, first + length)
            place = self.runs[number][0] + begin - first
            found.append((place, place + stop - begin))
            begin, number = stop, number + 1
        return found
