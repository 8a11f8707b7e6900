"""Batches of sequences of unequal length, laid out without padding.

Sequences are sorted, longest first. The rows of step 0 come first, then those of step 1, and so on: at each step the
sequences that are still running are a prefix, so that no step does any work for one that has ended.

    lengths 4, 2, 1         step      0      1      2   3
                            sequence  0 1 2  0 1    0   0
                            row       0 1 2  3 4    5   6       starts_T 0 3 5 6 7, rows_T 3 2 1 1, P = 7

Shape legend: B sequences, T steps, P rows of all steps together.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, final

import numpy as np
import torch


@final
@dataclass(frozen=True)
class Layout:
    """Where the row of each step of each sequence lies; lengths are in steps, longest first."""

    lengths_B: np.ndarray[Any, np.dtype[np.int64]]
    _bounds: dict[int, "array[int]"] = field(default_factory=dict, repr=False)
    _on_device: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def even(*, num_steps: int, num_rows: int) -> "Layout":
        """Sequences of one length."""
        return _even(num_steps, num_rows)

    @property
    def num_rows(self) -> int:
        """Sequences, B."""
        return len(self.lengths_B)

    @cached_property
    def num_steps(self) -> int:
        """Steps of the longest sequence, T."""
        return int(self.lengths_B[0]) if len(self.lengths_B) else 0

    @cached_property
    def is_even(self) -> bool:
        """Whether all sequences have the same length."""
        return bool(len(self.lengths_B) == 0 or self.lengths_B[0] == self.lengths_B[-1])

    @cached_property
    def rows_T(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Sequences still running at each step."""
        ascending = self.lengths_B[::-1]
        return self.num_rows - np.searchsorted(ascending, np.arange(self.num_steps), side="right").astype(np.int64)

    @cached_property
    def starts_T(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """First row of each step, and P behind the last."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.rows_T, dtype=np.int64)])

    @cached_property
    def total(self) -> int:
        """Rows of all steps, P."""
        return int(self.lengths_B.sum())

    @cached_property
    def sizes(self) -> tuple[int, int, int, int, bool]:
        """What memory and work depend on: T, B, P, sequences that are not empty, and whether all are of one length."""
        return self.num_steps, self.num_rows, self.total, self.num_nonempty, self.is_even

    @cached_property
    def _steps_P(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.repeat(np.arange(self.num_steps), self.rows_T)

    @cached_property
    def sequence_P(self) -> torch.Tensor:
        """The sequence that each row belongs to."""
        return torch.from_numpy(np.arange(self.total) - self.starts_T[self._steps_P])

    @cached_property
    def step_P(self) -> torch.Tensor:
        """The step that each row is."""
        return torch.from_numpy(self._steps_P)

    def chunk(self, first: int, last: int) -> "Layout":
        """The steps from `first` up to `last`."""
        return Layout(np.clip(self.lengths_B - first, 0, last - first))

    @cached_property
    def reversed_P(self) -> torch.Tensor:
        """The row with the step that each row has when its sequence is read from its end."""
        sequence_P = self.sequence_P.numpy()
        mirrored_P = self.lengths_B[sequence_P] - 1 - self._steps_P
        return torch.from_numpy(self.starts_T[mirrored_P] + sequence_P)

    @cached_property
    def last_B(self) -> torch.Tensor:
        """The row of each sequence's last step; of no meaning for an empty one."""
        steps_B = np.maximum(self.lengths_B - 1, 0)
        return torch.from_numpy(self.starts_T[steps_B] + np.arange(self.num_rows))

    @cached_property
    def _earlier_P(self) -> torch.Tensor:
        """The row of the same sequence one step earlier, from step 1 on."""
        rest_P = self._steps_P[self.num_nonempty :] - 1
        return torch.from_numpy(self.starts_T[rest_P]) + self.sequence_P[self.num_nonempty :]

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Where `rows_T`, `starts_T` and `lengths_B` lie, for compiled code."""
        return self.rows_T.ctypes.data, self.starts_T.ctypes.data, self.lengths_B.ctypes.data

    def bounds(self, pieces: int) -> "array[int]":
        """First row of each piece, so that all have about as many steps; all rows, empty ones too, are in one."""
        if pieces not in self._bounds:
            done = np.cumsum(self.lengths_B)
            inner = np.searchsorted(done, done[-1] * np.arange(1, pieces) / pieces, side="left") + 1
            inner = np.minimum(inner, self.num_rows)
            self._bounds[pieces] = array("q", [0, *inner.tolist(), self.num_rows])
        return self._bounds[pieces]

    @cached_property
    def num_nonempty(self) -> int:
        """Sequences that are not empty."""
        return int(self.rows_T[0]) if self.num_steps else 0

    def shift(self, after: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
        """The value one step earlier of each row's sequence: `initial` (B, ...) at step 0, then rows of `after`."""
        first = initial[: self.num_nonempty]
        if self.num_steps <= 1:
            return first
        if self.is_even:
            return torch.cat([first, after[: self.total - self.num_nonempty]])
        return torch.cat([first, after.index_select(0, self.on_device("_earlier_P", after.device))])

    def last(self, after: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
        """The value of each sequence at its last step (B, ...); `initial` where it is empty."""
        if self.num_steps == 0:
            return initial
        if self.is_even:
            return after[self.total - self.num_rows :]
        last = after.index_select(0, self.on_device("last_B", after.device)[: self.num_nonempty])
        return torch.cat([last, initial[self.num_nonempty :]])

    def on_device(self, name: str, device: torch.device) -> torch.Tensor:
        """One of the layout's tables, such as "last_B", on a device; each is copied there once."""
        table = getattr(self, name)
        if isinstance(table, torch.Tensor) and device.type == "cpu":
            return table
        if (name, device) not in self._on_device:
            self._on_device[name, device] = torch.as_tensor(table, device=device)
        return self._on_device[name, device]

    def tables(self, device: torch.device) -> list[torch.Tensor]:
        """`starts_T`, `rows_T` and `lengths_B`, for compiled code."""
        return [self.on_device(name, device) for name in ("starts_T", "rows_T", "lengths_B")]

    def spread(self, per_row: torch.Tensor) -> torch.Tensor:
        """One row of `per_row` (B, ...), or several, for each row of its sequence (P, ...)."""
        if several := len(per_row) - self.num_rows:
            each = several // self.num_rows + 1
            return self.spread(per_row.reshape(self.num_rows, each, *per_row.shape[1:])).flatten(0, 1)
        if self.is_even:
            return per_row.repeat(self.num_steps, *[1] * (per_row.dim() - 1))
        return per_row.index_select(0, self.on_device("sequence_P", per_row.device))

    def stretches(self, most: int) -> "Iterator[Stretch]":
        """All steps in stretches of at most `most`: rectangles of steps and sequences, for kernels of fixed shapes.

        Steps are a power of two, and so are rows, up to all of them: few shapes occur. With at most 4 steps, lengths
        7 6 4 2 1 give stretches of 4 steps and 5 rows, 2 steps and 2 rows, 1 step and 1 row:

            sequence 0    x x x x | x x | x
                     1    x x x x | x x |         x  a step that there is
                     2    x x x x |               .  its sequence has ended: its last row is read again, and what
                     3    x x . . |                  is computed there is not stored
                     4    x . . . |
        """
        first = 0
        while first < self.num_steps:
            steps = 1 << (min(most, self.num_steps - first).bit_length() - 1)
            rows = min(1 << (int(self.rows_T[first]) - 1).bit_length(), self.num_nonempty)
            yield Stretch(first, steps, rows)
            first += steps

    def dense_rows(self, stretch: "Stretch", device: torch.device, *, back: int = 0) -> torch.Tensor:
        """The row of each step and sequence of a stretch; its last row for a sequence that has ended.

        With `back`, the rows of the step so many steps before the stretch.
        """
        key = (f"dense {stretch} {back}", device)
        if key not in self._on_device:
            steps = stretch.first - back + np.arange(1 if back else stretch.steps)
            rows = np.arange(stretch.rows)
            steps_SR = np.minimum(steps[:, None], self.lengths_B[None, : stretch.rows] - 1)
            self._on_device[key] = torch.as_tensor((self.starts_T[steps_SR] + rows).ravel(), device=device)
        return self._on_device[key]

    def places(self, stretch: "Stretch", device: torch.device, *, running: bool) -> torch.Tensor:
        """Places in the rectangle of a stretch where the sequence is still running, or those where it has ended."""
        key = (f"running {stretch} {running}", device)
        if key not in self._on_device:
            rows_S = self.rows_T[stretch.first : stretch.first + stretch.steps]
            places_SR = np.arange(stretch.steps * stretch.rows).reshape(stretch.steps, stretch.rows)
            running_SR = np.arange(stretch.rows) < rows_S[:, None]
            self._on_device[key] = torch.as_tensor(places_SR[running_SR == running], device=device)
        return self._on_device[key]


@final
@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps from `first` on, of so many rows at each: a rectangle of steps and sequences."""

    first: int
    steps: int
    rows: int

    def _span(self, layout: Layout) -> tuple[int, int, bool]:
        """The span of its rows among all rows, and whether every place of the rectangle has one."""
        begin, end = int(layout.starts_T[self.first]), int(layout.starts_T[self.first + self.steps])
        return begin, end, end - begin == self.steps * self.rows

    def dense(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The rectangle of a value of all rows (P, ...)."""
        begin, end, is_full = self._span(layout)
        if is_full:
            each = len(tensor) // layout.total
            return tensor[begin * each : end * each]
        return _select(tensor, layout.dense_rows(self, tensor.device), layout.total)

    def dense_gradient(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The rectangle of a gradient, which is zero where a sequence has ended."""
        dense = self.dense(tensor, layout)
        if not self._span(layout)[2]:
            each = len(tensor) // layout.total
            ended = layout.places(self, tensor.device, running=False)
            dense.view(-1, each, *dense.shape[1:]).index_fill_(0, ended, 0)
        return dense

    def before(self, after: torch.Tensor, initial: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The state before the first step (R, ...)."""
        if self.first == 0:
            return initial[: self.rows].to(after.dtype)
        return after.index_select(0, layout.dense_rows(self, after.device, back=1))

    def store(self, whole: torch.Tensor, tensor: torch.Tensor, layout: Layout) -> None:
        """Copy the rows of running sequences from a rectangle to their place among all rows."""
        begin, end, is_full = self._span(layout)
        each = len(whole) // layout.total
        if not is_full:
            running = layout.places(self, tensor.device, running=True)
            tensor = _select(tensor, running, self.steps * self.rows)
        whole[begin * each : end * each].copy_(tensor)


def _select(tensor: torch.Tensor, rows: torch.Tensor, total: int) -> torch.Tensor:
    """Rows of a value that has one of them, or several side by side, for each of `total`."""
    each = len(tensor) // total
    if each == 1:
        return tensor.index_select(0, rows)
    return tensor.reshape(total, each, *tensor.shape[1:]).index_select(0, rows).flatten(0, 1)


@lru_cache(maxsize=64)
def _even(num_steps: int, num_rows: int) -> Layout:
    return Layout(np.full(num_rows, num_steps, dtype=np.int64))
