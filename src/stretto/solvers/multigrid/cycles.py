"""Cycles over the grids of a chain: what they assume at the boundaries of chunks, and how they improve it.

Shape legend: C chunks of all sequences.
"""

from collections.abc import Sequence
from typing import final

import torch

from stretto.solvers.multigrid.grids import Grids
from stretto.solvers.multigrid.levels import Level, chosen
from stretto.solvers.solver import Chain


@final
class Cycles:
    """The states before each chunk of the finest grid, from cycle to cycle.

    Args:
        chain: What is walked.
        finest: Its own grid.
        coarse: The coarse grids; None if there are none.
        relaxations: Walks over the finest grid in a cycle: 1 is F-, 2 is FCF-relaxation.
    """

    def __init__(self, chain: Chain, finest: Level, coarse: Grids | None, *, relaxations: int) -> None:
        self.starts = [part.detach().index_select(0, finest.chunks.sequence_C.to(part.device)) for part in chain.states]
        self.made = 0
        self.walks = 0
        self._chain, self._finest, self._coarse, self._relaxations = chain, finest, coarse, relaxations

    @property
    def wait(self) -> int:
        """Steps of a cycle that wait for one another."""
        return self._relaxations * self._finest.coarsening + (0 if self._coarse is None else self._coarse.wait)

    @property
    def left(self) -> int:
        """Walks over the finest grid until all states are right, whatever the net: each makes one chunk certain."""
        return self._finest.chunks.most - self.walks

    @property
    def work(self) -> float:
        """Steps that were walked, over those that there are."""
        coarse = 0 if self._coarse is None else self._coarse.walked
        return self.walks + coarse / self._chain.layout.total

    def begin_on_the_coarsest(self) -> None:
        """A first cycle that does not walk the finest grid; nothing without coarse grids."""
        if self._coarse is not None:
            with torch.no_grad():
                self.starts = self._coarse.first_starts()
            self.made += 1

    def improve(self, ends: Sequence[torch.Tensor]) -> None:
        """The rest of a cycle, after a walk that came to these ends."""
        with torch.no_grad():
            arrived = self.arrived(ends)
            for _ in range(self._relaxations - 1):
                self.starts = arrived
                ends = self._walked()
                arrived = self.arrived(ends)
            corrected = arrived if self._coarse is None else self._coarse.corrected(self.starts, ends)
            self.starts = chosen(self._finest.ahead_C <= self.walks, arrived, corrected)
            self.made += 1

    def arrived(self, ends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What each chunk would begin with if it took on from the one before."""
        chunks = self._finest.chunks
        return [
            chunks.begun(state.detach(), chunks.arrived(end))
            for state, end in zip(self._chain.states, ends, strict=True)
        ]

    def _walked(self) -> list[torch.Tensor]:
        chunks = self._finest.chunks
        self.walks += 1
        return self._chain.run(chunks.layout, chunks.side_by_side(self._chain.x_PF), self.starts).states
