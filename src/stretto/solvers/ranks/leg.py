"""The steps of one rank, walked in pieces of which each has a graph of its own.

A walk from other states than before goes on only until it meets the one before: what comes after stands. The gradient
is linear, so that what arrives late is added, as far back as it is felt.

Shape legend: B sequences, P real steps of all sequences, F features.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from stretto.kernels import Layout
from stretto.solvers.solver import Chain


def gap(arrived: Sequence[torch.Tensor], assumed: Sequence[torch.Tensor]) -> float:
    """The largest difference, relative to states above 1; infinite where one is a number and the other none.

    Counts and truth values are the same, or differ infinitely.
    """
    worst = 0.0
    for one, other in zip(arrived, assumed, strict=True):
        apart = (one != other) & ~(one.isnan() & other.isnan())
        if not bool(apart.any()):
            continue
        if not one.is_floating_point():
            return math.inf
        difference = ((one - other).abs() / one.abs().clamp(min=1.0))[apart]
        worst = max(worst, float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max()))
    return worst


def size(parts: Sequence[torch.Tensor]) -> float:
    """The largest of all numbers, without its sign; infinite if one is none."""
    return max((float(part.abs().nan_to_num(nan=math.inf).max()) for part in parts if part.numel()), default=0.0)


@final
@dataclass(slots=True)
class _Piece:
    layout: Layout
    rows: slice
    x_PF: torch.Tensor
    starts: list[torch.Tensor] = field(default_factory=list)
    ends: list[torch.Tensor] = field(default_factory=list)
    y_PF: torch.Tensor | None = None
    gap: float = 0.0


@final
class Sums:
    """Gradients of the input and the parameters of a leg, added up.

    Args:
        leg: The leg.

    Attributes:
        x_PF: Of the input's rows, if it is needed.
        parameters: By name, of those that need it.
        left_out: The largest gradient of a state that was not followed further.
    """

    def __init__(self, leg: "Leg") -> None:
        chain = leg.chain
        self.x_PF = torch.zeros_like(chain.x_PF) if leg.needs_input else None
        self.parameters = {name: torch.zeros_like(p) for name, p in chain.parameters.items() if p.requires_grad}
        self.left_out = 0.0


@final
class Leg:
    """A chain that is the stretch of time of one rank.

    Args:
        chain: The stretch, with parameters that are leaves.
        length: Most steps of a piece.
        keeps: Whether gradients will be asked for.
        needs_input: Whether that of the input will be.

    Attributes:
        starts: What it was last walked from.
        ends: The states after it.
        walked: Real steps that were walked, again and again.
    """

    def __init__(self, chain: Chain, *, length: int, keeps: bool, needs_input: bool) -> None:
        self.chain, self.keeps, self.needs_input = chain, keeps, needs_input
        self.starts: list[torch.Tensor] = []
        self.ends: list[torch.Tensor] = []
        self.walked = 0
        self._pieces = [self._piece(first, length) for first in range(0, chain.layout.num_steps, length)]

    def _piece(self, first: int, length: int) -> _Piece:
        layout = self.chain.layout
        last = min(first + length, layout.num_steps)
        rows = slice(int(layout.starts_T[first]), int(layout.starts_T[last]))
        x_PF = self.chain.x_PF[rows].detach().requires_grad_(self.needs_input)
        return _Piece(layout=layout.chunk(first, last), rows=rows, x_PF=x_PF)

    @property
    def residual(self) -> float:
        """The largest mismatch that is left where pieces meet, and at the start."""
        return max((piece.gap for piece in self._pieces), default=0.0)

    @property
    def y_PF(self) -> torch.Tensor:
        """Outputs of all rows."""
        made = [piece.y_PF.detach() for piece in self._pieces if piece.y_PF is not None]
        if not made:
            with torch.no_grad():
                return self.chain.run(self.chain.layout, self.chain.x_PF, self.starts).y_PF
        return made[0] if len(made) == 1 else torch.cat(made)

    def walk(self, starts: Sequence[torch.Tensor], *, close: float) -> None:
        """Walk from these states, until what follows was walked from states that are as close as this."""
        self.starts = now = [start.detach() for start in starts]
        for piece in self._pieces:
            if piece.starts:
                piece.gap = gap(now, piece.starts)
                if piece.gap <= close:
                    return
            self._run(piece, now)
            now = [end.detach() for end in piece.ends]
        # Without steps they are the states themselves, which are somebody else's.
        self.ends = now if self._pieces else [part.clone() for part in now]

    def _run(self, piece: _Piece, starts: Sequence[torch.Tensor]) -> None:
        piece.gap = 0.0
        # Of their own: a graph's leaves are not shared with what is sent or compared.
        piece.starts = [s.detach().requires_grad_(self.keeps and s.is_floating_point()) for s in starts]
        with torch.set_grad_enabled(self.keeps):
            walked = self.chain.run(piece.layout, piece.x_PF, piece.starts)
        piece.y_PF, piece.ends = walked.y_PF, walked.states
        self.walked += piece.layout.total

    def back(
        self,
        d_ends: Sequence[torch.Tensor],
        sums: Sums,
        *,
        d_y_PF: torch.Tensor | None = None,
        negligible: float = 0.0,
    ) -> list[torch.Tensor]:
        """Add what the gradient of the states after it, and of its outputs, comes to.

        Args:
            d_ends: Gradients of the states that are real numbers.
            sums: Where to add.
            d_y_PF: Gradients of the outputs.
            negligible: Stop where no gradient of a state is larger; without `d_y_PF` only.

        Returns:
            The gradient of the states before it that are real numbers, or zeros if it is negligible there.
        """
        carried = list(d_ends)
        for piece in reversed(self._pieces):
            if d_y_PF is None and (left_out := size(carried)) <= negligible:
                sums.left_out = max(sums.left_out, left_out)
                return [torch.zeros_like(part) for part in carried]
            made = list(zip([end for end in piece.ends if end.is_floating_point()], carried, strict=True))
            if d_y_PF is not None and piece.y_PF is not None:
                made.append((piece.y_PF, d_y_PF[piece.rows]))
            carried = self._back(piece, [(tensor, d) for tensor, d in made if tensor.requires_grad], sums)
        return carried

    def _back(self, piece: _Piece, made: Sequence[tuple[torch.Tensor, torch.Tensor]], sums: Sums) -> list[torch.Tensor]:
        starts = [start for start in piece.starts if start.requires_grad]
        if not made:
            return [torch.zeros_like(start) for start in starts]
        names = list(sums.parameters)
        wanted = [*starts, *(self.chain.parameters[name] for name in names), *([piece.x_PF] * self.needs_input)]
        found = torch.autograd.grad(
            [tensor for tensor, _ in made], wanted, [d for _, d in made], retain_graph=True, allow_unused=True
        )
        for name, gradient in zip(names, found[len(starts) :], strict=False):
            if gradient is not None:
                sums.parameters[name] += gradient
        if sums.x_PF is not None and found[-1] is not None:
            sums.x_PF[piece.rows] += found[-1]
        return [
            torch.zeros_like(start) if gradient is None else gradient
            for start, gradient in zip(starts, found, strict=False)
        ]
