"""Ever stronger corrections of boundary states, as sweeps turn out to need them."""

import math
from typing import Final, final

import torch

from stretto.solvers.chunks import Chunks
from stretto.solvers.shooting.corrections import AbstractCorrection, Gates, Plain, Secants, Tangents, packed, unpacked
from stretto.solvers.solver import Chain

PATIENT: Final = 2.0
"""Sweeps still needed, at the last one's rate, that call for nothing stronger."""


@final
class Escalation:
    """Sweeps over chunks, each with the weakest correction that is expected to do.

    Plain sweeps come first. While the measured contraction calls for more than a few further sweeps, the products of
    the cell's gates join in, then secants of the sweeps so far, and whole Jacobians where a state has fewer numbers
    than there are sweeps to save.

    Args:
        chain: What is walked.
        chunks: How it is cut.
        tolerance: The mismatch that is to be reached.
    """

    def __init__(self, chain: Chain, chunks: Chunks, *, tolerance: float) -> None:
        self._chain, self._chunks, self._tolerance = chain, chunks, tolerance
        self._correction: AbstractCorrection = Plain()
        self._stronger = self._ladder()
        self._residuals: list[float] = []

    def _ladder(self) -> list[AbstractCorrection]:
        kinds = {part.dtype for part in self._chain.states}
        if len(kinds) != 1 or not next(iter(kinds)).is_floating_point:
            return []
        gates: list[AbstractCorrection] = [Gates()] if Gates.knows(self._chain) else []
        return [*gates, Secants(gates[0] if gates else Plain()), Tangents()]

    @property
    def is_near(self) -> bool:
        """Whether the next sweep is expected to agree within the tolerance."""
        return self._needed <= 1.0

    @property
    def told(self) -> str:
        """What was done besides plain sweeps."""
        return "" if isinstance(self._correction, Plain) else f", corrected by {self._correction.name}"

    @property
    def _needed(self) -> float:
        """Sweeps that are still needed, if they go on as the last one did."""
        if self._residuals and self._residuals[-1] <= self._tolerance:
            return 0.0
        if len(self._residuals) < 2:
            return math.inf
        before, now = self._residuals[-2:]
        rate = now / before
        return math.log(self._tolerance / now) / math.log(rate) if 0 < rate < 1 else math.inf

    def walk(self, boundaries: list[torch.Tensor]) -> list[torch.Tensor]:
        """States (C, ...) after each chunk from those before; no gradient flows."""
        starts = [
            self._chunks.begun(state.detach(), part) for state, part in zip(self._chain.states, boundaries, strict=True)
        ]
        if isinstance(self._correction, Plain):
            with torch.no_grad():
                rows_PF = self._chunks.side_by_side(self._chain.x_PF)
                return self._chain.run(self._chunks.layout, rows_PF, starts).states
        return unpacked(self._correction.walk(self._chain, self._chunks, packed(starts)), starts)

    def next_boundaries(
        self, boundaries: list[torch.Tensor], ends: list[torch.Tensor], residual: float
    ) -> list[torch.Tensor]:
        """States before each chunk for the next sweep, and the correction that it will come with."""
        self._residuals.append(residual)
        if isinstance(self._correction, Plain):
            fresh = [self._chunks.arrived(end) for end in ends]
        else:
            starts_CS, ends_CS = packed(boundaries), packed(ends)
            self._correction.learn(starts_CS, ends_CS)
            fresh = unpacked(self._correction.next_starts(self._chunks, starts_CS, ends_CS), boundaries)
        if len(self._residuals) > 1 and self._needed > PATIENT and self._stronger and self._pays(self._stronger[0]):
            self._correction = self._stronger.pop(0)
        return fresh

    def _pays(self, correction: AbstractCorrection) -> bool:
        """Whole Jacobians cost a sweep for each number of a state."""
        left = self._chunks.most - len(self._residuals)
        return not isinstance(correction, Tangents) or sum(s[0].numel() for s in self._chain.states) < left
