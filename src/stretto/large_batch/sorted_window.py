"""The last so many numbers of a stream, kept in order, so that quantiles of them cost next to nothing."""

import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from typing import final

from stretto.errors import StrettoError


@final
class SortedWindow:
    """The last `size` numbers, by age and by order.

    Args:
        size: How many are kept; the oldest goes first.
        values: To begin with, the oldest first.

    Example:
        >>> window = SortedWindow(3, [5.0, 1.0, 4.0, 2.0])
        >>> list(window), window.median, window.quantile(0.0)
        ([1.0, 4.0, 2.0], 2.0, 1.0)
    """

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        if size < 1:
            raise StrettoError(f"SortedWindow got a size of {size}", fix="Give at least 1.")
        self.size = size
        self._aged: deque[float] = deque()
        self._ordered: list[float] = []
        for value in values:
            self.append(value)

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[float]:
        return iter(self._aged)

    @property
    def is_full(self) -> bool:
        """Whether there are as many as are kept."""
        return len(self._ordered) == self.size

    @property
    def median(self) -> float:
        """The middle one, or the mean of the two in the middle; there must be one."""
        half = len(self._ordered) // 2
        if len(self._ordered) % 2:
            return self._ordered[half]
        return (self._ordered[half - 1] + self._ordered[half]) / 2

    def quantile(self, share: float) -> float:
        """The largest of the lower share of the numbers, none between them."""
        return self._ordered[int(share * (len(self._ordered) - 1))]

    def append(self, value: float) -> None:
        """Take a finite number in, and let the oldest go if there are too many."""
        if self.is_full:
            oldest = self._aged.popleft()
            del self._ordered[bisect.bisect_left(self._ordered, oldest)]
        self._aged.append(value)
        bisect.insort(self._ordered, value)

    def clear(self) -> None:
        """Forget all."""
        self._aged.clear()
        self._ordered.clear()
