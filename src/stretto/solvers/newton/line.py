"""All sequences of a batch one after another, each from its first step to its last: a line.

A recurrence over a line is one recurrence, however many sequences there are and however long each is.

Shape legend: B sequences, P real steps of all sequences, S numbers of a state, C chunks of all sequences.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch

from stretto.kernels import Layout
from stretto.solvers.chunks import Chunks


@final
@dataclass(frozen=True)
class Line:
    """Where each step of each sequence lies on the line.

    Attributes:
        layout: Of the batch.
    """

    layout: Layout

    @cached_property
    def sequence_P(self) -> torch.Tensor:
        """The sequence that each row of the line is of."""
        return torch.from_numpy(np.repeat(np.arange(self.layout.num_rows), self.layout.lengths_B))

    @cached_property
    def begins_B(self) -> torch.Tensor:
        """Where each sequence begins."""
        lengths_B = self.layout.lengths_B
        return torch.from_numpy(np.cumsum(lengths_B) - lengths_B)

    @cached_property
    def first_P(self) -> torch.Tensor:
        """Whether each row is the first of its sequence."""
        first_P = torch.zeros(self.layout.total, dtype=torch.bool)
        first_P[self.begins_B[: self.layout.num_going]] = True
        return first_P

    @cached_property
    def rows_P(self) -> torch.Tensor:
        """The row of the batch that each row of the line is."""
        step_P = torch.arange(self.layout.total) - self.begins_B[self.sequence_P]
        return torch.from_numpy(self.layout.starts_T)[step_P] + self.sequence_P

    def earlier(self, after_PS: torch.Tensor, initial_BS: torch.Tensor) -> torch.Tensor:
        """The state before each step, from those after each: one row up, and the initial one before a first step."""
        going = self.layout.num_going
        return after_PS.roll(1, 0).index_copy(0, self.begins_B[:going].to(after_PS.device), initial_BS[:going])

    def boundaries(self, after_PS: torch.Tensor, chunks: Chunks) -> torch.Tensor:
        """The state before each chunk (C, S); of no meaning for a first one."""
        steps_C = torch.from_numpy(chunks.number_C * chunks.length - 1).clamp(min=0)
        return after_PS.index_select(0, (self.begins_B[chunks.sequence_C] + steps_C).to(after_PS.device))
