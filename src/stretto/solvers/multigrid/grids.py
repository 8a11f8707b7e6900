"""Coarse grids of a chain, and what they make of an approximation on the finest: the full approximation scheme.

On a coarse grid the states solve v' = coarse_step(x, v) + G. Its forcing term G is what the finer grid arrived at less
what a coarse step makes of the finer grid's state: with it, the states that are right on the finer grid are right on
the coarse one, and no others are.

Shape legend: B sequences, C chunks of all sequences, P steps of a grid, Q those of the next coarser one, F features,
D units of the state.
"""

from collections.abc import Sequence
from typing import final

import torch

from stretto.kernels import Layout
from stretto.solvers.multigrid.coarse_step import ForcedCoarseStep, joined, parted
from stretto.solvers.multigrid.levels import Level
from stretto.solvers.solver import Chain


@final
class Grids:
    """All grids of a chain, and walks over the coarse ones.

    Args:
        chain: What they are grids of.
        levels: The finest and at least one coarser.
        relaxations: Walks over a coarse grid before the next coarser one is asked: 1 is F-, 2 is FCF-relaxation.
    """

    def __init__(self, chain: Chain, levels: Sequence[Level], *, relaxations: int) -> None:
        self.levels = levels
        self.relaxations = relaxations
        self.walked = 0
        self.initial_BD = joined([part.detach() for part in chain.states])
        self._chain = chain
        self._features = tuple(chain.x_PF.shape[1:])
        self._parameters = {name: tensor.detach() for name, tensor in chain.parameters.items()}
        self._x = [joined([chain.x_PF.detach()])]
        for level in levels[:-1]:
            self._x.append(self._x[-1].index_select(0, level.first_Q.to(chain.x_PF.device)))

    @property
    def wait(self) -> int:
        """Steps of a correction that wait for one another."""
        inner = sum(1 + min(level.coarsening, level.layout.num_steps) * (self.relaxations + 1) for level in self._inner)
        return inner + 1 + self.levels[-1].layout.num_steps

    @property
    def _inner(self) -> Sequence[Level]:
        """Those between the finest and the coarsest."""
        return self.levels[1:-1]

    def first_starts(self) -> list[torch.Tensor]:
        """States before each chunk of the finest grid, from the coarsest: by coarse steps alone."""
        last = len(self.levels) - 1
        points_PD = self.points(last, self._unforced(last))
        for number in range(last - 1, 0, -1):
            starts_CD = self.levels[number].refined(self.initial_BD, points_PD)
            points_PD, _ = self.walk(number, starts_CD, self._unforced(number))
        return parted(self.levels[0].refined(self.initial_BD, points_PD), self._chain.states)

    def corrected(self, starts: Sequence[torch.Tensor], ends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Better states before each chunk of the finest grid.

        Args:
            starts: Those that were assumed (C, ...).
            ends: What they became at the end of each chunk.
        """
        return parted(self._corrected(0, joined(starts), joined(ends)), self._chain.states)

    def _corrected(self, number: int, starts_CD: torch.Tensor, ends_CD: torch.Tensor) -> torch.Tensor:
        level = self.levels[number]
        chunk_Q, next_Q = level.chunk_Q.to(starts_CD.device), level.next_Q.to(starts_CD.device)
        forcing_QD = ends_CD.index_select(0, chunk_Q) - self.step(number + 1, starts_CD.index_select(0, chunk_Q))
        points_QD = self._solved(number + 1, starts_CD.index_select(0, next_Q), forcing_QD)
        return level.refined(self.initial_BD, points_QD)

    def _solved(self, number: int, points_PD: torch.Tensor, forcing_PD: torch.Tensor) -> torch.Tensor:
        """States after each step of a coarse grid: exactly on the coarsest, otherwise one cycle from those given."""
        if number == len(self.levels) - 1:
            return self.points(number, forcing_PD)
        level = self.levels[number]
        starts_CD = level.starts(self.initial_BD, points_PD)
        _, ends_CD = self.walk(number, starts_CD, forcing_PD)
        for _ in range(self.relaxations - 1):
            starts_CD = level.chunks.begun(self.initial_BD, level.chunks.arrived(ends_CD))
            _, ends_CD = self.walk(number, starts_CD, forcing_PD)
        points_PD, _ = self.walk(number, self._corrected(number, starts_CD, ends_CD), forcing_PD)
        return points_PD

    def step(self, number: int, states_PD: torch.Tensor) -> torch.Tensor:
        """What one step of a coarse grid makes of a state before each of its steps, without forcing."""
        layout = Layout.even(num_steps=1, num_rows=len(states_PD))
        after_PD, _ = self._run(number, layout, self._rows(number, self._unforced(number)), states_PD)
        return after_PD

    def points(self, number: int, forcing_PD: torch.Tensor) -> torch.Tensor:
        """The state after each step of a coarse grid, step after step."""
        level = self.levels[number]
        points_PD, _ = self._run(number, level.layout, self._rows(number, forcing_PD), self.initial_BD)
        return points_PD

    def walk(self, number: int, starts_CD: torch.Tensor, forcing_PD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The states after each step and at the end of each chunk of a coarse grid, all chunks at once."""
        chunks = self.levels[number].chunks
        rows_PG = chunks.side_by_side(self._rows(number, forcing_PD))
        points_PD, ends_CD = self._run(number, chunks.layout, rows_PG, starts_CD)
        return chunks.one_after_another(points_PD), ends_CD

    def _run(
        self, number: int, layout: Layout, rows_PG: torch.Tensor, states_BD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dt = float(self.levels[0].coarsening ** number)
        module = self._chain.variants.module(
            f"a coarse step over {dt:g} of {self._features}",
            lambda cell: ForcedCoarseStep(cell, dt=dt, features=self._features),
        )
        states = parted(states_BD, self._chain.states)
        points_PD, after = self._chain.variants.run(module, layout, rows_PG, states, self._parameters)
        self.walked += layout.total
        return points_PD, joined(after)

    def _rows(self, number: int, forcing_PD: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._x[number], forcing_PD], dim=1)

    def _unforced(self, number: int) -> torch.Tensor:
        return self.initial_BD.new_zeros(self.levels[number].layout.total, self.initial_BD.shape[1])
