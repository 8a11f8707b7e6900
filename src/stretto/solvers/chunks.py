"""Chunks of time as rows of a batch.

Each sequence is cut into chunks of equally many steps; its last chunk may be shorter. A run over the chunks treats each
as a separate sequence, so that it takes as many steps as the longest chunk has:

    sequences     a0 a1 a2 a3 a4 a5 a6 a7           chunks     a0 a1 a2
                  b0 b1 b2 b3 b4                               a3 a4 a5
                                                               b0 b1 b2
                                                               a6 a7
                                                               b3 b4

Chunks are rows of a `Layout` and so are sorted, longest first. Among equally long ones, those with the same number
within their sequence are neighbours.

Shape legend: B sequences, C chunks of all sequences, D those that are not the first of their sequence, P real steps of
all sequences, F features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from stretto.kernels import Layout
from stretto.solvers.base import residual_norm
from stretto.state import select_rows

Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Chunks:
    """A batch cut into chunks.

    Attributes:
        whole: The layout of the sequences.
        length: Steps of a chunk, at most.
    """

    whole: Layout
    length: int

    @staticmethod
    def cut(whole: Layout, num_chunks: int) -> "Chunks":
        """Chunks of the length that cuts the longest sequence into at most `num_chunks`."""
        return Chunks.of_length(whole, max(1, -(-whole.num_steps // max(1, num_chunks))))

    @staticmethod
    def of_length(whole: Layout, length: int) -> "Chunks":
        """Chunks of `length` steps. For sequences of one length, the index tables are shared between batches."""
        if not whole.is_even or not whole.num_rows:
            return Chunks(whole=whole, length=length)
        return _even(whole.num_steps, whole.num_rows, length)

    @cached_property
    def counts_B(self) -> Integers:
        """Chunks of each sequence."""
        return -(-self.whole.lengths_B // self.length)

    @cached_property
    def _order(self) -> tuple[Integers, Integers, Integers]:
        """Sequence, number within the sequence, and steps of each chunk, in the order of the layout: longest first."""
        counts_B = self.counts_B
        sequence_C = np.repeat(np.arange(self.whole.num_rows), counts_B)
        number_C = np.arange(len(sequence_C)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
        steps_C = np.minimum(self.length, self.whole.lengths_B[sequence_C] - number_C * self.length)
        # Same numbers side by side: for sequences of one length, rows then form a regular grid.
        order_C = np.lexsort((sequence_C, number_C, -steps_C))
        return sequence_C[order_C], number_C[order_C], steps_C[order_C]

    @cached_property
    def layout(self) -> Layout:
        """The layout of the chunks as sequences."""
        return Layout(np.ascontiguousarray(self._order[2].astype(np.int64)))

    @property
    def num_chunks(self) -> int:
        """Chunks of all sequences, C."""
        return len(self._order[0])

    @property
    def max_per_sequence(self) -> int:
        """Chunks of the longest sequence."""
        return int(self.counts_B.max(initial=0))

    @cached_property
    def sequence_C(self) -> torch.Tensor:
        """The sequence of each chunk."""
        return torch.from_numpy(self._order[0])

    @property
    def number_C(self) -> Integers:
        """The number of each chunk within its sequence."""
        return self._order[1]

    @cached_property
    def behind_C(self) -> torch.Tensor:
        """How many chunks come after each in its sequence."""
        return torch.from_numpy(self.counts_B[self._order[0]] - 1 - self.number_C)

    @cached_property
    def is_first_C(self) -> torch.Tensor:
        """Whether each chunk is the first of its sequence."""
        return torch.from_numpy(self.number_C == 0)

    @cached_property
    def later_D(self) -> torch.Tensor:
        """All chunks but the first of each sequence, in the order of the layout."""
        return torch.nonzero(~self.is_first_C)[:, 0]

    @cached_property
    def place_BN(self) -> Integers:
        """Where chunk n of sequence b is among all; meaningless if the sequence has fewer chunks."""
        sequence_C, number_C, _ = self._order
        place_BN = np.zeros((self.whole.num_rows, self.max_per_sequence), np.int64)
        place_BN[sequence_C, number_C] = np.arange(self.num_chunks)
        return place_BN

    @cached_property
    def later_by_sequence(self) -> dict[int, torch.Tensor]:
        """For each sequence of several chunks, all but its first, in order of time."""
        counts = enumerate(self.counts_B.tolist())
        return {b: torch.from_numpy(self.place_BN[b, 1:count]) for b, count in counts if count > 1}

    def numbered(self, number: int) -> torch.Tensor:
        """The chunks with this number, one per sequence that is long enough."""
        return torch.from_numpy(np.flatnonzero(self.number_C == number))

    @cached_property
    def previous_C(self) -> torch.Tensor:
        """The chunk before each chunk; a first chunk itself."""
        sequence_C, number_C, _ = self._order
        return torch.from_numpy(self.place_BN[sequence_C, np.maximum(number_C - 1, 0)])

    @cached_property
    def last_B(self) -> torch.Tensor:
        """The last chunk of each sequence that has steps."""
        counts_B = self.counts_B[: self.whole.num_nonempty]
        return torch.from_numpy(self.place_BN[np.arange(len(counts_B)), counts_B - 1])

    @cached_property
    def rows_P(self) -> torch.Tensor:
        """The row of the batch for each row of the chunks."""
        sequence_C, number_C, _ = self._order
        chunk_P, step_P = self.layout.sequence_P.numpy(), self.layout.step_P.numpy()
        return torch.from_numpy(self.whole.starts_T[number_C[chunk_P] * self.length + step_P] + sequence_C[chunk_P])

    @cached_property
    def _inverse_P(self) -> torch.Tensor:
        return torch.argsort(self.rows_P)

    def rows_before(self, chunks_D: torch.Tensor, *, steps: int) -> torch.Tensor:
        """Rows of the batch with the last `steps` steps before each of some later chunks; at most a chunk's length."""
        sequence_D, number_D = self._order[0][chunks_D.numpy()], self._order[1][chunks_D.numpy()]
        at_TD = number_D * self.length - steps + np.arange(steps)[:, None]
        return torch.from_numpy((self.whole.starts_T[at_TD] + sequence_D).reshape(-1))

    @cached_property
    def _grid(self) -> tuple[int, int, int] | None:
        """Chunks, steps and sequences, if all chunks are equally long: rows then move by a transpose."""
        if not self.whole.is_even or self.whole.num_steps % self.length or self.whole.num_rows == 0:
            return None
        return self.whole.num_steps // self.length, self.length, self.whole.num_rows

    def to_chunks(self, x_PF: torch.Tensor) -> torch.Tensor:
        """Rows of the batch in the order of the chunks."""
        if self._grid is None:
            return x_PF.index_select(0, self.rows_P.to(x_PF.device))
        return x_PF.reshape(*self._grid, *x_PF.shape[1:]).transpose(0, 1).reshape(x_PF.shape)

    def to_sequences(self, y_PF: torch.Tensor) -> torch.Tensor:
        """Rows of the chunks in the order of the batch."""
        if self._grid is None:
            return y_PF.index_select(0, self._inverse_P.to(y_PF.device))
        chunks, steps, rows = self._grid
        return y_PF.reshape(steps, chunks, rows, *y_PF.shape[1:]).transpose(0, 1).reshape(y_PF.shape)

    def starts(self, initial: Sequence[torch.Tensor], boundaries: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The states before each chunk (C, ...).

        Args:
            initial: The initial states (B, ...), for the first chunk of each sequence.
            boundaries: States (C, ...) for all others.
        """
        return select_chunks(self.is_first_C, self.repeat_initial(initial), boundaries)

    def repeat_initial(self, initial: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The initial states (B, ...) of each chunk's sequence (C, ...)."""
        return [part_B.index_select(0, self.sequence_C.to(part_B.device)) for part_B in initial]

    def previous_ends(self, ends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The states after the chunk before each chunk (C, ...); meaningless for a first chunk."""
        return [end_C.index_select(0, self.previous_C.to(end_C.device)) for end_C in ends]

    def residual(self, arrived: Sequence[torch.Tensor], assumed: Sequence[torch.Tensor]) -> float:
        """What is left at the boundaries: ends of the chunks before against the states (C, ...) that were assumed."""
        return residual_norm(arrived, assumed, rows_C=~self.is_first_C)

    def final_states(self, initial: Sequence[torch.Tensor], ends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The states after each sequence (B, ...); the initial ones for sequences without steps, which come last."""
        count = len(self.last_B)
        return [
            torch.cat([end_C.index_select(0, self.last_B.to(end_C.device)), initial_B[count:]])
            for initial_B, end_C in zip(initial, ends, strict=True)
        ]


def select_chunks(
    here_C: torch.Tensor, these: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Rows of `these` (C, ...) where the mask is set, part by part; elsewhere of the others."""
    return [select_rows(here_C.to(one.device), one, other) for one, other in zip(these, others, strict=True)]


@lru_cache(maxsize=8)
def _even(num_steps: int, num_rows: int, length: int) -> Chunks:
    return Chunks(whole=Layout.even(num_steps=num_steps, num_rows=num_rows), length=length)
