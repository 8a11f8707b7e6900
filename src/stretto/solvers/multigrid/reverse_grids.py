"""The gradient on the coarse grids: at given states its recurrence is linear, and so are its corrections.

What arrives at a point of a coarse grid is what the step behind it passes back, and what the finer grid is still
missing there. Passing back through a coarse step is autograd's work: a walk over the grid, forced so that it goes
through the given states, is differentiated with regard to its forcing term.

Shape legend: C chunks of all sequences, P steps of a grid, Q those of the next coarser one, D units of the state.
"""

import dataclasses
from collections.abc import Sequence
from typing import final

import torch

from stretto.solvers.multigrid.coarse_step import joined, parted
from stretto.solvers.multigrid.grids import Grids
from stretto.solvers.multigrid.levels import Level


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """A walk over a coarse grid, of its chunks or, on the coarsest, step after step: what it began with and came to."""

    level: Level
    forcing_PD: torch.Tensor
    points_PD: torch.Tensor
    starts_CD: torch.Tensor | None = None
    ends_CD: torch.Tensor | None = None


@final
class ReverseGrids:
    """Corrections of a gradient by the coarse grids.

    Args:
        grids: The grids.
        boundaries: The states before each chunk of the finest grid (C, ...), at which all steps are differentiated;
            those before first chunks do not count.
    """

    def __init__(self, grids: Grids, boundaries: Sequence[torch.Tensor]) -> None:
        self._grids = grids
        self._walks = []
        starts_CD = joined([part.detach() for part in boundaries])
        for number in range(1, len(grids.levels)):
            points_PD = starts_CD.index_select(0, grids.levels[number - 1].next_Q.to(starts_CD.device))
            walk = self._walked(number, points_PD)
            self._walks.append(walk)
            if walk.starts_CD is not None:
                starts_CD = walk.starts_CD.detach()

    def _walked(self, number: int, points_PD: torch.Tensor) -> _Walk:
        """A walk through all these points of a coarse grid."""
        grids, level = self._grids, self._grids.levels[number]
        before_PD = level.layout.shifted(points_PD, grids.initial_BD)
        with torch.no_grad():
            forcing_PD = points_PD - grids.step(number, before_PD)
        forcing_PD.requires_grad_()
        if number == len(grids.levels) - 1:
            with torch.enable_grad():
                return _Walk(level=level, forcing_PD=forcing_PD, points_PD=grids.points(number, forcing_PD))
        starts_CD = level.starts(grids.initial_BD, points_PD).requires_grad_()
        with torch.enable_grad():
            points_PD, ends_CD = grids.walk(number, starts_CD, forcing_PD)
        return _Walk(level=level, forcing_PD=forcing_PD, points_PD=points_PD, starts_CD=starts_CD, ends_CD=ends_CD)

    def corrected(self, arrives: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What had better be assumed to arrive at the end of each chunk of the finest grid.

        Args:
            arrives: What was assumed (C, ...).
            fresh: What came of it at the start of the chunk after.
        """
        assumed_CD, passed_CD = joined(arrives), joined(fresh)
        chunk_Q = self._grids.levels[0].chunk_Q.to(assumed_CD.device)
        missing_QD = (passed_CD - assumed_CD).index_select(0, chunk_Q)
        return parted(assumed_CD.index_add(0, chunk_Q, self._passed_back(0, missing_QD)), arrives)

    def _passed_back(self, number: int, missing_PD: torch.Tensor) -> torch.Tensor:
        """What is missing at all points of a coarse grid: exactly on the coarsest, otherwise by one cycle."""
        walk = self._walks[number]
        if walk.starts_CD is None or walk.ends_CD is None:
            (found_PD,) = torch.autograd.grad([walk.points_PD], [walk.forcing_PD], [missing_PD], retain_graph=True)
            return found_PD
        made = [walk.points_PD, walk.ends_CD]
        arrives_CD = torch.zeros_like(walk.ends_CD)
        chunk_Q, next_Q = walk.level.chunk_Q.to(missing_PD.device), walk.level.next_Q.to(missing_PD.device)
        for turn in range(self._grids.relaxations):
            (d_start_CD,) = torch.autograd.grad(made, [walk.starts_CD], [missing_PD, arrives_CD], retain_graph=True)
            passed_QD = d_start_CD.index_select(0, next_Q)
            if turn + 1 < self._grids.relaxations:
                arrives_CD = torch.zeros_like(walk.ends_CD).index_copy(0, chunk_Q, passed_QD)
        short_QD = passed_QD - arrives_CD.index_select(0, chunk_Q)
        arrives_CD = arrives_CD.index_add(0, chunk_Q, self._passed_back(number + 1, short_QD))
        (found_PD,) = torch.autograd.grad(made, [walk.forcing_PD], [missing_PD, arrives_CD], retain_graph=True)
        return found_PD
