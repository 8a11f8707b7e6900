"""How boundary states move between sweeps: a chunk's new start moves its end by the chunk's Jacobian, more or less.

With starts s and ends e of the last sweep, the next starts are s'(c+1) = e(c) + M(c) (s'(c) - s(c)). Without M these
are plain sweeps, in which news travel one chunk a sweep; with the true Jacobian it is Newton's method.

Shape legend: C chunks of all sequences, W full chunks, L steps of a chunk, S numbers of a state, R pairs of sweeps.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, final

import torch
from torch import nn

from stretto.solvers.chunks import Chunks
from stretto.solvers.solver import Chain
from stretto.state import flatten

MOST_PAIRS: Final = 8
SMALLEST_PAIR: Final = 1e-3
"""Pairs whose directions are this much shorter than the longest carry rounding errors alone."""


class AbstractCorrection(ABC):
    """Walks all chunks, and says where to start next."""

    name: str

    @abstractmethod
    def walk(self, chain: Chain, chunks: Chunks, starts_CS: torch.Tensor) -> torch.Tensor:
        """States (C, S) after each chunk; no gradient flows."""

    def learn(self, starts_CS: torch.Tensor, ends_CS: torch.Tensor) -> None:  # noqa: B027
        """Take note of a sweep: what came of which states."""

    @abstractmethod
    def pushed(self, places: torch.Tensor, moved_S: torch.Tensor) -> torch.Tensor:
        """How far the ends of some chunks move (.., S) when their starts move so far."""

    def next_starts(self, chunks: Chunks, starts_CS: torch.Tensor, ends_CS: torch.Tensor) -> torch.Tensor:
        """States before each chunk for the next sweep; first chunks keep theirs."""
        fresh_CS = starts_CS.clone()
        for number in range(1, chunks.most):
            places = chunks.numbered(number)
            before = chunks.before_C[places]
            pushed = self.pushed(before, fresh_CS[before] - starts_CS[before])
            # A walk from a wrong state may overflow where that from the right one does not.
            fresh_CS[places] = ends_CS[before] + pushed.nan_to_num(0.0, 0.0, 0.0)
        return fresh_CS


def packed(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts of states (C, ...) side by side (C, S)."""
    return torch.cat([state.reshape(len(state), -1) for state in states], dim=1)


def unpacked(states_CS: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts again, as those of `like` are shaped."""
    parts = torch.split(states_CS, [part.shape[1:].numel() for part in like], dim=1)
    return [part.reshape(len(states_CS), *other.shape[1:]) for part, other in zip(parts, like, strict=True)]


def _plain_walk(chain: Chain, chunks: Chunks, starts_CS: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        rows_PF = chunks.side_by_side(chain.x_PF)
        return packed(chain.run(chunks.layout, rows_PF, unpacked(starts_CS, chain.states)).states)


@final
class Plain(AbstractCorrection):
    """No correction: the end of each chunk is the start of the next."""

    name = "plain sweeps"

    def walk(self, chain: Chain, chunks: Chunks, starts_CS: torch.Tensor) -> torch.Tensor:
        """One walk."""
        return _plain_walk(chain, chunks, starts_CS)

    def pushed(self, places: torch.Tensor, moved_S: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Not at all."""
        return torch.zeros_like(moved_S)


class _WithGates(nn.Module):
    """A cell whose output is what it carries over, unit by unit."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x_t: torch.Tensor, state: object) -> tuple[torch.Tensor, object]:
        _, after = self.cell(x_t, state)
        carried = self.cell.retention(x_t, state)  # type: ignore[operator]
        return packed(flatten(carried)), after


@final
class Gates(AbstractCorrection):
    """The product of what each step carries over by its gates: a diagonal, for cells that have a `retention`."""

    name = "products of gates"

    def __init__(self) -> None:
        self._product_CS = torch.empty(0)

    @staticmethod
    def knows(chain: Chain) -> bool:
        """Whether the cell tells."""
        return hasattr(chain.variants.cell, "retention")

    def walk(self, chain: Chain, chunks: Chunks, starts_CS: torch.Tensor) -> torch.Tensor:
        """One walk, which also puts out the gates."""
        layout, variants = chunks.layout, chain.variants
        module = variants.module("gates", _WithGates)
        with torch.no_grad():
            states = unpacked(starts_CS, chain.states)
            gates_PS, ends = variants.run(module, layout, chunks.side_by_side(chain.x_PF), states, chain.parameters)
        # Only a full chunk is followed by another; full ones come first in every step.
        full = int((layout.lengths_B == chunks.length).sum())
        rows_LW = torch.from_numpy(layout.starts_T[: chunks.length, None]) + torch.arange(full)
        picked_LWS = gates_PS.index_select(0, rows_LW.reshape(-1).to(gates_PS.device)).reshape(chunks.length, full, -1)
        self._product_CS = torch.zeros_like(starts_CS)
        self._product_CS[:full] = picked_LWS.prod(0)
        return packed(ends)

    def pushed(self, places: torch.Tensor, moved_S: torch.Tensor) -> torch.Tensor:
        """Each unit by itself; before the first walk nothing is known."""
        return self._product_CS[places] * moved_S if len(self._product_CS) else torch.zeros_like(moved_S)


@final
class Secants(AbstractCorrection):
    """A low rank: how ends moved when starts moved between the last sweeps; the rest by another correction."""

    name = "secants of earlier sweeps"

    def __init__(self, base: AbstractCorrection) -> None:
        self._base = base
        self._starts: list[torch.Tensor] = []
        self._ends: list[torch.Tensor] = []
        self._directions_CSR: torch.Tensor | None = None
        self._responses_CSR = torch.empty(0)

    def walk(self, chain: Chain, chunks: Chunks, starts_CS: torch.Tensor) -> torch.Tensor:
        """One walk."""
        return self._base.walk(chain, chunks, starts_CS)

    def learn(self, starts_CS: torch.Tensor, ends_CS: torch.Tensor) -> None:
        """Compare with the sweeps before."""
        if not bool(torch.isfinite(ends_CS).all() and torch.isfinite(starts_CS).all()):
            return
        self._starts, self._ends = [*self._starts, starts_CS][-1 - MOST_PAIRS :], [*self._ends, ends_CS]
        self._ends = self._ends[-1 - MOST_PAIRS :]
        if len(self._starts) > 1:
            moved_CSR = torch.stack([starts_CS - old for old in self._starts[:-1]], dim=-1)
            came_CSR = torch.stack([ends_CS - old for old in self._ends[:-1]], dim=-1)
            self._fit(moved_CSR, came_CSR)

    def _fit(self, moved_CSR: torch.Tensor, came_CSR: torch.Tensor) -> None:
        """Orthogonal directions of what was tried, and what came of a step along each, beyond the base's."""
        left_CSR, size_CR, right_CRR = torch.linalg.svd(moved_CSR, full_matrices=False)
        known_CR = size_CR > SMALLEST_PAIR * size_CR[:, :1].clamp_min(torch.finfo(size_CR.dtype).tiny)
        inverse_CR = torch.where(known_CR, 1 / size_CR, 0.0)
        combine_CRR = right_CRR.mT * inverse_CR[:, None, :]
        self._directions_CSR = left_CSR * known_CR[:, None, :]
        every = torch.arange(len(moved_CSR))
        base_CSR = torch.stack([self._base.pushed(every, part) for part in moved_CSR.unbind(-1)], dim=-1)
        self._responses_CSR = (came_CSR - base_CSR) @ combine_CRR

    def pushed(self, places: torch.Tensor, moved_S: torch.Tensor) -> torch.Tensor:
        """What is known of the directions that were tried; the base for the others."""
        pushed = self._base.pushed(places, moved_S)
        if self._directions_CSR is None:
            return pushed
        along = self._directions_CSR[places].mT @ moved_S[..., None]
        return pushed + (self._responses_CSR[places] @ along)[..., 0]


@final
class Tangents(AbstractCorrection):
    """The whole Jacobian of each chunk, by walking it once more from a state that differs in each number."""

    name = "whole Jacobians"

    def __init__(self) -> None:
        self._jacobian_CSS = torch.empty(0)

    def walk(self, chain: Chain, chunks: Chunks, starts_CS: torch.Tensor) -> torch.Tensor:
        """One walk, and one for each number of the state."""
        ends_CS = _plain_walk(chain, chunks, starts_CS)
        count = starts_CS.shape[1]
        step = torch.finfo(starts_CS.dtype).eps ** 0.5 * max(1.0, float(starts_CS.abs().max()))
        self._jacobian_CSS = torch.empty(len(starts_CS), count, count, dtype=starts_CS.dtype, device=starts_CS.device)
        for unit in range(count):
            nudged_CS = starts_CS.clone()
            nudged_CS[:, unit] += step
            self._jacobian_CSS[:, :, unit] = (_plain_walk(chain, chunks, nudged_CS) - ends_CS) / step
        return ends_CS

    def pushed(self, places: torch.Tensor, moved_S: torch.Tensor) -> torch.Tensor:
        """As Newton's method has it."""
        return (self._jacobian_CSS[places] @ moved_S[..., None])[..., 0]
