"""Stretches of time as rows of a batch.

Each sequence is cut into chunks of equally many steps, the last of which may be shorter. Chunks lie beside each other
as if each were a sequence: a walk over all of them takes as many steps as the longest chunk has.

Shape legend: B sequences, C chunks of all sequences, D those that are not the first of theirs, P real steps of all
sequences, F features.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, final

import numpy as np
import torch

from stretto.kernels import Layout

Integers = np.ndarray[Any, np.dtype[np.int64]]


@final
@dataclass(frozen=True)
class Chunks:
    """How a batch is cut.

    Attributes:
        whole: The layout of the sequences.
        length: Most steps of a chunk.
    """

    whole: Layout
    length: int

    @staticmethod
    def cut(whole: Layout, num_chunks: int) -> "Chunks":
        """Cut the longest sequence into at most so many chunks of equal length, and the others alike."""
        return Chunks.of(whole, length=max(1, -(-whole.num_steps // max(1, num_chunks))))

    @staticmethod
    def of(whole: Layout, *, length: int) -> "Chunks":
        """Chunks of so many steps; of sequences of one length, the tables that were made for the last such batches."""
        if not whole.is_even or not whole.num_rows:
            return Chunks(whole=whole, length=length)
        return _even(whole.num_steps, whole.num_rows, length)

    @cached_property
    def _counts_B(self) -> Integers:
        return -(-self.whole.lengths_B // self.length)

    @cached_property
    def _order(self) -> tuple[Integers, Integers, Integers]:
        """Sequence, number and steps of each chunk, in the order of the layout: longest first."""
        counts_B = self._counts_B
        sequence_C = np.repeat(np.arange(self.whole.num_rows), counts_B)
        number_C = np.arange(len(sequence_C)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
        steps_C = np.minimum(self.length, self.whole.lengths_B[sequence_C] - number_C * self.length)
        # Those of one number side by side, so that equal lengths need no sorting to be rows of a regular grid.
        order_C = np.lexsort((sequence_C, number_C, -steps_C))
        return sequence_C[order_C], number_C[order_C], steps_C[order_C]

    @cached_property
    def layout(self) -> Layout:
        """Of the chunks as sequences."""
        return Layout(np.ascontiguousarray(self._order[2].astype(np.int64)))

    @property
    def num_chunks(self) -> int:
        """C."""
        return len(self._order[0])

    @property
    def most(self) -> int:
        """Chunks of the longest sequence."""
        return int(self._counts_B.max(initial=0))

    @cached_property
    def sequence_C(self) -> torch.Tensor:
        """The sequence that each chunk is of."""
        return torch.from_numpy(self._order[0])

    @property
    def number_C(self) -> Integers:
        """Which chunk of its sequence each chunk is."""
        return self._order[1]

    @cached_property
    def inner(self) -> dict[int, torch.Tensor]:
        """For each sequence of several chunks, its chunks but the first, in order."""
        found: dict[int, list[int]] = {}
        for place in np.lexsort((self.number_C, self._order[0])).tolist():
            if self.number_C[place]:
                found.setdefault(int(self._order[0][place]), []).append(place)
        return {sequence: torch.tensor(places) for sequence, places in found.items()}

    @cached_property
    def later_D(self) -> torch.Tensor:
        """All chunks but the first of each sequence, in the order of the layout."""
        return torch.nonzero(~self.is_first_C)[:, 0]

    def tails(self, steps: int, places_D: torch.Tensor) -> torch.Tensor:
        """Rows of the batch that are the last steps before some later chunks, step by step; at most a chunk's."""
        sequence_D, number_D = self._order[0][places_D.numpy()], self._order[1][places_D.numpy()]
        at_TD = number_D * self.length - steps + np.arange(steps)[:, None]
        return torch.from_numpy((self.whole.starts_T[at_TD] + sequence_D).reshape(-1))

    def numbered(self, number: int) -> torch.Tensor:
        """The chunks of this number, one for each sequence that has as many."""
        return torch.from_numpy(np.flatnonzero(self._order[1] == number))

    def first(self, count: int) -> "tuple[Chunks, torch.Tensor]":
        """The first `count` chunks of each sequence, and where they are among all."""
        head = Chunks(whole=self.whole.chunk(0, count * self.length), length=self.length)
        places = [self._place[key] for key in zip(*(part.tolist() for part in head._order[:2]), strict=True)]
        return head, torch.tensor(places, dtype=torch.int64)

    @cached_property
    def is_first_C(self) -> torch.Tensor:
        """Whether each chunk is the first of its sequence."""
        return torch.from_numpy(self._order[1] == 0)

    @cached_property
    def _place(self) -> dict[tuple[int, int], int]:
        return {(int(b), int(c)): place for place, (b, c) in enumerate(zip(*self._order[:2], strict=True))}

    @cached_property
    def before_C(self) -> torch.Tensor:
        """The chunk before each chunk; itself where there is none."""
        return torch.tensor(
            [self._place[b, max(0, c - 1)] for b, c in zip(*(part.tolist() for part in self._order[:2]), strict=True)],
            dtype=torch.int64,
        )

    @cached_property
    def last_B(self) -> torch.Tensor:
        """The last chunk of each sequence that has any."""
        return torch.tensor(
            [self._place[b, int(count) - 1] for b, count in enumerate(self._counts_B) if count], dtype=torch.int64
        )

    @cached_property
    def rows_P(self) -> torch.Tensor:
        """The row of the batch that each row of the chunks is."""
        sequence_C, number_C, _ = self._order
        chunk_P, step_P = self.layout.sequence_P.numpy(), self.layout.step_P.numpy()
        return torch.from_numpy(self.whole.starts_T[number_C[chunk_P] * self.length + step_P] + sequence_C[chunk_P])

    @cached_property
    def back_P(self) -> torch.Tensor:
        """The row of the chunks that each row of the batch is."""
        return torch.argsort(self.rows_P)

    @cached_property
    def _grid(self) -> tuple[int, int, int] | None:
        """Chunks, steps and sequences, if all chunks are equally long."""
        if not self.whole.is_even or self.whole.num_steps % self.length or self.whole.num_rows == 0:
            return None
        return self.whole.num_steps // self.length, self.length, self.whole.num_rows

    def side_by_side(self, x_PF: torch.Tensor) -> torch.Tensor:
        """Rows of the batch as rows of the chunks."""
        if self._grid is None:
            return x_PF.index_select(0, self.rows_P.to(x_PF.device))
        return x_PF.reshape(*self._grid, *x_PF.shape[1:]).transpose(0, 1).reshape(x_PF.shape)

    def one_after_another(self, y_PF: torch.Tensor) -> torch.Tensor:
        """Rows of the chunks as rows of the batch."""
        if self._grid is None:
            return y_PF.index_select(0, self.back_P.to(y_PF.device))
        chunks, steps, rows = self._grid
        return y_PF.reshape(steps, chunks, rows, *y_PF.shape[1:]).transpose(0, 1).reshape(y_PF.shape)

    def begun(self, initial_B: torch.Tensor, boundary_C: torch.Tensor) -> torch.Tensor:
        """The state before each chunk: the initial one of its sequence before the first, `boundary_C` elsewhere."""
        first_C = self.is_first_C.to(initial_B.device)
        own_C = initial_B.index_select(0, self.sequence_C.to(initial_B.device))
        return torch.where(first_C.reshape(-1, *[1] * (initial_B.dim() - 1)), own_C, boundary_C)

    def arrived(self, ends_C: torch.Tensor) -> torch.Tensor:
        """The end of the chunk before each chunk; of no meaning for a first one."""
        return ends_C.index_select(0, self.before_C.to(ends_C.device))

    def finals(self, initial_B: torch.Tensor, ends_C: torch.Tensor) -> torch.Tensor:
        """The state after each sequence; the initial one of those without steps, which come last."""
        last_B = self.last_B.to(ends_C.device)
        return torch.cat([ends_C.index_select(0, last_B), initial_B[len(last_B) :]])


@lru_cache(maxsize=8)
def _even(num_steps: int, num_rows: int, length: int) -> Chunks:
    return Chunks(whole=Layout.even(num_steps=num_steps, num_rows=num_rows), length=length)
