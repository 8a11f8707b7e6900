"""Batches of sequences of unequal length, laid out without padding.

Sequences are sorted, longest first. The rows of step 0 come first, then those of step 1, and so on: at each step the
sequences that are still running are a prefix, so that no step does any work for one that has ended.

    lengths 4, 2, 1         step      0      1      2   3
                            sequence  0 1 2  0 1    0   0
                            row       0 1 2  3 4    5   6       starts_T 0 3 5 6 7, rows_T 3 2 1 1, P = 7

Shape legend: B sequences, T steps, P rows of all steps together.
"""

from array import array
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
    _on_device: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict, repr=False)

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
        """What each row's sequence had one step earlier: `initial` (B, ...) at step 0, then rows of `after`."""
        first = initial[: self.num_nonempty]
        if self.num_steps <= 1:
            return first
        if self.is_even:
            return torch.cat([first, after[: self.total - self.num_nonempty]])
        return torch.cat([first, after.index_select(0, self.on_device(self._earlier_P, after.device))])

    def last(self, after: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
        """What each sequence had at its last step (B, ...); `initial` where it is empty."""
        if self.num_steps == 0:
            return initial
        if self.is_even:
            return after[self.total - self.num_rows :]
        last = after.index_select(0, self.on_device(self.last_B, after.device)[: self.num_nonempty])
        return torch.cat([last, initial[self.num_nonempty :]])

    def on_device(self, index: torch.Tensor, device: torch.device) -> torch.Tensor:
        """One of the layout's index tables on a device; each is copied there once."""
        if device.type == "cpu":
            return index
        return self._on_device.setdefault((id(index), device), index.to(device))

    def spread(self, per_row: torch.Tensor) -> torch.Tensor:
        """One row of `per_row` (B, ...) for each row of its sequence (P, ...)."""
        if self.is_even:
            return per_row.repeat(self.num_steps, *[1] * (per_row.dim() - 1))
        return per_row.index_select(0, self.on_device(self.sequence_P, per_row.device))


@lru_cache(maxsize=64)
def _even(num_steps: int, num_rows: int) -> Layout:
    return Layout(np.full(num_rows, num_steps, dtype=np.int64))
