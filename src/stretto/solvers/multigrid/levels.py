"""Grids of time, each with every few points of the one before, and where the points of one are on the next.

A grid has steps and the points between them: point t is the state after t steps. Every `coarsening`-th point, from
point 0 on, is a point of the coarser grid, so that a step of that grid spans a whole chunk of this one. Behind the
start of a sequence's last chunk, which may be short, there is no coarse step.

Shape legend: B sequences, C chunks of all sequences, P real steps of all sequences, Q those of the coarser grid,
F features, D units of the state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import torch

from stretto.kernels import Layout
from stretto.solvers.chunks import Chunks

Integers = np.ndarray[Any, np.dtype[np.int64]]


@final
@dataclass(frozen=True)
class Level:
    """One grid.

    Attributes:
        layout: Of its steps.
        coarsening: Steps that one step of the coarser grid spans.
    """

    layout: Layout
    coarsening: int

    @cached_property
    def chunks(self) -> Chunks:
        """Its steps, cut where the coarser grid has points."""
        return Chunks(whole=self.layout, length=self.coarsening)

    @cached_property
    def coarser(self) -> Layout:
        """Of the coarser grid's steps."""
        return Layout(np.maximum(-(-self.layout.lengths_B // self.coarsening) - 1, 0))

    @cached_property
    def _steps_Q(self) -> tuple[Integers, Integers]:
        """The sequence and the number of each coarse step."""
        return self.coarser.sequence_P.numpy(), self.coarser.step_P.numpy()

    @cached_property
    def _places(self) -> Integers:
        """Where each chunk of each sequence is among all."""
        places_BN = np.zeros((self.layout.num_rows, self.chunks.most), np.int64)
        places_BN[self.chunks.sequence_C.numpy(), self.chunks.number_C] = np.arange(self.chunks.num_chunks)
        return places_BN

    @cached_property
    def chunk_Q(self) -> torch.Tensor:
        """The chunk that each coarse step spans."""
        return torch.from_numpy(self._places[self._steps_Q])

    @cached_property
    def next_Q(self) -> torch.Tensor:
        """The chunk that begins where each coarse step ends."""
        sequence_Q, step_Q = self._steps_Q
        return torch.from_numpy(self._places[sequence_Q, step_Q + 1])

    @cached_property
    def first_Q(self) -> torch.Tensor:
        """The first row that each coarse step spans."""
        sequence_Q, step_Q = self._steps_Q
        return torch.from_numpy(self.layout.starts_T[step_Q * self.coarsening] + sequence_Q)

    @cached_property
    def _last_C(self) -> torch.Tensor:
        """The row before each chunk; of no meaning for a first one."""
        step_C = np.maximum(self.chunks.number_C * self.coarsening - 1, 0)
        return torch.from_numpy(self.layout.starts_T[step_C] + self.chunks.sequence_C.numpy())

    @cached_property
    def ahead_C(self) -> torch.Tensor:
        """Chunks before each in its sequence."""
        return torch.from_numpy(self.chunks.number_C)

    @cached_property
    def behind_C(self) -> torch.Tensor:
        """Chunks after each in its sequence."""
        counts_B = -(-self.layout.lengths_B // self.coarsening)
        return torch.from_numpy(counts_B[self.chunks.sequence_C.numpy()] - 1 - self.chunks.number_C)

    def starts(self, initial_BD: torch.Tensor, points_PD: torch.Tensor) -> torch.Tensor:
        """The state before each chunk, given those after each step."""
        return self.chunks.begun(initial_BD, points_PD.index_select(0, self._last_C.to(points_PD.device)))

    def refined(self, initial_BD: torch.Tensor, points_QD: torch.Tensor) -> torch.Tensor:
        """The state before each chunk, given those after each coarse step."""
        boundary_CD = points_QD.new_zeros(self.chunks.num_chunks, *points_QD.shape[1:])
        boundary_CD[self.next_Q.to(points_QD.device)] = points_QD
        return self.chunks.begun(initial_BD, boundary_CD)


def levels(layout: Layout, *, num_levels: int, coarsening: int) -> list[Level]:
    """The finest grid and coarser ones: as many as were asked for, or until one is no longer than a chunk."""
    found = [Level(layout, coarsening)]
    while len(found) < num_levels and found[-1].chunks.most > 1:
        found.append(Level(found[-1].coarser, coarsening))
    return found


def chosen(here_C: torch.Tensor, these: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Rows of these (C, ...), part by part, and elsewhere of the others."""
    return [
        torch.where(here_C.to(one.device).reshape(-1, *[1] * (one.dim() - 1)), one, other)
        for one, other in zip(these, others, strict=True)
    ]
