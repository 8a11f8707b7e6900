"""The gradient through chunks of the finest grid: a linear recurrence, solved by cycles in reverse.

A walk in reverse gives what leaves the start of each chunk, given what arrives at its end; the two must agree. After k
walks the last k chunks are right, whatever the net, as they are first for states.

Shape legend: C chunks of all sequences.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias, final

import torch

from stretto.kernels import without_weights
from stretto.solvers.multigrid.grids import Grids
from stretto.solvers.multigrid.levels import Level, chosen
from stretto.solvers.multigrid.outlook import Outlook
from stretto.solvers.multigrid.reverse_grids import ReverseGrids

Pairs: TypeAlias = "list[tuple[torch.Tensor, torch.Tensor]]"
"""Tensors that were made, each beside the gradient that arrives at it."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reversal:
    """How to find the gradient.

    Attributes:
        most: Cycles to make at most; as many as there are chunks are always enough.
        tolerance: The mismatch at the boundaries that is small enough; None to make all cycles.
        relaxations: Walks in reverse before the coarse grids are asked: 1 is F-, 2 is FCF-relaxation.
        grids: The coarse grids; None if there are none.
        outlook: When to go step after step instead; None never to.
    """

    most: int
    tolerance: float | None
    relaxations: int
    grids: Grids | None
    outlook: Outlook | None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reversed:
    """How the gradient was found: by how many cycles, what they left, and why it had to be step after step."""

    cycles: int
    residual: float
    reason: str = ""


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class ReverseCycles:
    """The recurrence of one walk.

    Attributes:
        level: The finest grid.
        reversal: How to solve it.
        boundaries: The states that were assumed before each chunk (C, ...): leaves of the walk's graph.
        ends: The states after each chunk, at the other end of that graph.
        outside: What gradients arrive at from outside.
    """

    level: Level
    reversal: Reversal
    boundaries: Sequence[torch.Tensor]
    ends: Sequence[torch.Tensor]
    outside: Pairs

    def solved(self, wanted: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor | None], Reversed]:
        """Gradients of the leaves that are wanted, and how they were found; they are void if there is a reason."""
        reversal = self.reversal
        arrives = [torch.zeros_like(end) for end in self.ends]
        coarse: ReverseGrids | None = None
        cycles, certain, residual = 0, 0, math.inf
        while cycles < reversal.most and certain + 1 < self.level.chunks.most:
            fresh = self._passed_back(arrives)
            certain += 1
            before, residual = residual, _change(fresh, arrives)
            if reversal.tolerance is not None and residual <= reversal.tolerance:
                break
            reason = self._given_up(cycles, residual, before, certain)
            if reason:
                return [None] * len(wanted), Reversed(cycles=cycles, residual=residual, reason=reason)
            for _ in range(reversal.relaxations - 1):
                arrives, fresh = fresh, self._passed_back(fresh)
                certain += 1
            if reversal.grids is not None:
                coarse = coarse or ReverseGrids(reversal.grids, self.boundaries)
                fresh = chosen(self.level.behind_C <= certain, fresh, coarse.corrected(arrives, fresh))
            arrives = fresh
            cycles += 1
        found = gradients(self._pairs(arrives), [*wanted, *self._moving])
        residual = _change(self._shifted(found[len(wanted) :]), arrives)
        reason = "" if math.isfinite(residual) else "a gradient is no number"
        return found[: len(wanted)], Reversed(cycles=cycles, residual=residual, reason=reason)

    def _given_up(self, cycles: int, residual: float, before: float, certain: int) -> str:
        if not math.isfinite(residual):
            return "a gradient is no number"
        if self.reversal.outlook is None:
            return ""
        left = self.level.chunks.most - certain
        return self.reversal.outlook.given_up(made=cycles, residual=residual, before=before, left=left)

    @property
    def _moving(self) -> list[torch.Tensor]:
        return [boundary for boundary in self.boundaries if boundary.requires_grad]

    def _pairs(self, arrives: Sequence[torch.Tensor]) -> Pairs:
        inner = [(end, d) for end, d in zip(self.ends, arrives, strict=True) if end.requires_grad]
        return self.outside + inner

    def _passed_back(self, arrives: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What leaves the start of each chunk, where it arrives: at the end of the chunk before."""
        with without_weights():
            return self._shifted(gradients(self._pairs(arrives), self._moving))

    def _shifted(self, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        remaining, shifted = iter(found), []
        for boundary, end in zip(self.boundaries, self.ends, strict=True):
            new, d_start = torch.zeros_like(end), next(remaining) if boundary.requires_grad else None
            if d_start is not None:
                leaves_Q = d_start.index_select(0, self.level.next_Q.to(end.device))
                new.index_copy_(0, self.level.chunk_Q.to(end.device), leaves_Q)
            shifted.append(new)
        return shifted


def gradients(pairs: Pairs, wanted: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Of what was made, with regard to what is wanted."""
    if not pairs or not wanted:
        return [None] * len(wanted)
    made, arriving = zip(*pairs, strict=True)
    return list(torch.autograd.grad(made, wanted, arriving, retain_graph=True, allow_unused=True))


def _change(fresh: Sequence[torch.Tensor], old: Sequence[torch.Tensor]) -> float:
    """The largest change, relative to the largest gradient; not a number if a gradient is none."""
    pairs = [(a, b) for a, b in zip(fresh, old, strict=True) if a.is_floating_point() and a.numel()]
    changes = [float((a - b).abs().max()) for a, b in pairs]
    largest = max((float(a.abs().max()) for a, _ in pairs), default=0.0)
    if any(math.isnan(change) for change in changes):
        return math.nan
    return max(changes, default=0.0) / largest if largest else max(changes, default=0.0)
