"""Gradients through chunks of time, by sweeps in reverse.

Shape legend: C chunks of all sequences, P real steps of all sequences, F features.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import final

import torch

from stretto.kernels import without_weights
from stretto.solvers.chunks import Chunks


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop.

    Attributes:
        tolerance: The mismatch at the boundaries that is small enough.
        most: Sweeps after which to stop all the same; as many as there are chunks are always enough.
        lead: Steps at the start of each chunk that are walked in reverse first, for what arrives at the chunk before.
        arriving: The gradient that arrives at the end of each chunk (C, ...), as it is known from elsewhere.
    """

    tolerance: float
    most: int
    lead: int = 0
    arriving: Sequence[torch.Tensor] | None = None


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class Swept:
    """What sweeps came to: how many there were, the mismatch that is left, and what arrives at the chunks' ends."""

    sweeps: float = 0
    residual: float = 0.0
    arriving: list[torch.Tensor] = dataclasses.field(default_factory=list)


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class ChunkGraph:
    """What was walked, chunks side by side: leaves, and what came of them.

    The first steps may be apart from the others, to be walked in reverse alone.
    """

    x_PF: torch.Tensor
    starts: list[torch.Tensor]
    parameters: list[torch.Tensor]
    parts: list[torch.Tensor]
    ends: list[torch.Tensor]


@final
class ReverseSweep:
    """The gradient that arrives at the end of each chunk from the chunk after it: a linear recurrence, by sweeps.

    After k sweeps the last k chunks of each sequence have it exactly.
    """

    def __init__(
        self,
        chunks: Chunks,
        limits: Limits,
        graph: ChunkGraph,
        d_parts: Sequence[torch.Tensor | None],
        outside: list[torch.Tensor],
    ) -> None:
        self.chunks, self.limits, self.graph = chunks, limits, graph
        self.d_parts, self.outside = d_parts, outside
        self.swept = Swept()
        follows_C = ~chunks.is_first_C
        # The chunk before each that has one, and those themselves.
        self._before, self._after = chunks.before_C[follows_C], torch.nonzero(follows_C)[:, 0]
        self._moving = [start for start in graph.starts if start.requires_grad]

    def solved(self) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Gradients of the input and of parameters, and of the states before each chunk."""
        limits, swept = self.limits, self.swept
        arrives = self._first_guess(swept)
        sure = not len(self._after) or limits.most <= 1
        if not sure and not limits.lead and limits.arriving is None:
            sure, arrives = True, self._settled(arrives, swept)
        while True:
            wanted = [t for t in (self.graph.x_PF, *self.graph.parameters) if t.requires_grad]
            found, d_starts = self._back(arrives, wanted)
            fresh = self._passed_on(d_starts)
            swept.sweeps += 1
            swept.residual = self._change(fresh, arrives)
            if sure or swept.residual <= limits.tolerance or swept.sweeps >= limits.most:
                break
            sure, arrives = True, self._settled(fresh, swept)
        swept.arriving = fresh
        by_leaf = dict(zip(map(id, wanted), found, strict=True))
        return [by_leaf.get(id(t)) for t in (self.graph.x_PF, *self.graph.parameters)], d_starts

    def _first_guess(self, swept: Swept) -> list[torch.Tensor]:
        limits = self.limits
        if limits.arriving is not None:
            return [part.to(end) for part, end in zip(limits.arriving, self.graph.ends, strict=True)]
        nothing = [torch.zeros_like(end) for end in self.graph.ends]
        if len(self.graph.parts) == 1 or not len(self._after) or self.d_parts[0] is None:
            return nothing
        swept.sweeps += limits.lead / self.chunks.length
        with without_weights():
            found = torch.autograd.grad(
                [self.graph.parts[0]], self._moving, [self.d_parts[0]], retain_graph=True, allow_unused=True
            )
        return self._passed_on(self._spread(found))

    def _settled(self, arrives: list[torch.Tensor], swept: Swept) -> list[torch.Tensor]:
        """What arrives after sweeps, without the gradients of weights, until nothing changes or all but one are made.

        A gradient that is no number goes on to all chunks before, as it would step after step.
        """
        limits = self.limits
        while swept.sweeps + 1 < limits.most:
            with without_weights():
                _, d_starts = self._back(arrives, [])
            fresh = self._passed_on(d_starts)
            swept.sweeps += 1
            change = self._change(fresh, arrives)
            arrives = fresh
            if change <= limits.tolerance:
                break
        return arrives

    def _back(
        self, arrives: list[torch.Tensor], wanted: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = [
            (part, d) for part, d in zip(self.graph.parts, self.d_parts, strict=True) if d is not None
        ]
        pairs += [
            (end, outer + inner) for end, outer, inner in zip(self.graph.ends, self.outside, arrives, strict=True)
        ]
        pairs = [(made, d) for made, d in pairs if made.requires_grad]
        asked = [*wanted, *self._moving]
        if not pairs or not asked:
            return [None] * len(wanted), [None] * len(self.graph.starts)
        found = torch.autograd.grad(
            [made for made, _ in pairs], asked, [d for _, d in pairs], retain_graph=True, allow_unused=True
        )
        return list(found[: len(wanted)]), self._spread(found[len(wanted) :])

    def _spread(self, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """One for each part of the state; None for parts without a gradient."""
        remaining = iter(found)
        return [next(remaining) if start.requires_grad else None for start in self.graph.starts]

    def _passed_on(self, d_starts: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """What leaves the start of each chunk, where it arrives: at the end of the chunk before."""
        arrives = []
        for end, d_start in zip(self.graph.ends, d_starts, strict=True):
            new = torch.zeros_like(end)
            if d_start is not None:
                new[self._before.to(end.device)] = d_start[self._after.to(end.device)]
            arrives.append(new)
        return arrives

    @staticmethod
    def _change(fresh: list[torch.Tensor], old: list[torch.Tensor]) -> float:
        """The largest change, relative to the largest gradient."""
        pairs = [(a, b) for a, b in zip(fresh, old, strict=True) if a.is_floating_point() and a.numel()]
        changes = [float((a - b).abs().max()) for a, b in pairs]
        if any(math.isnan(change) for change in changes):
            return math.nan
        largest = max((float(a.abs().max()) for a, _ in pairs), default=0.0)
        return max(changes, default=0.0) / largest if largest else 0.0
