"""Zoneout: units that now and then keep their value, after Krueger et al. (2017)."""

from collections.abc import Sequence
from typing import final

import torch

from stretto.cells.arguments import probability
from stretto.cells.cell import Cell, State
from stretto.cells.state import one, parts, several
from stretto.cells.wrapper import AbstractWrapper
from stretto.errors import StrettoError


@final
class Zoneout(AbstractWrapper):
    """In training each unit of the state keeps its earlier value with probability p, drawn anew at every step.

    In evaluation a unit moves the expected part of the way: p of the earlier value plus 1 - p of the new one. Where the
    cell's output is a part of its new state, as the h of an LSTM, the output is that part after zoneout.

    Args:
        cell: The cell inside.
        p: A probability for all parts of the state, or one for each, such as (0.05, 0.5) for the h and c of an LSTM.
            One for all spares the counter of `Clockwork`, the memory of `AttentionCell` and the masks of
            `RecurrentDropout`.
    """

    def __init__(self, cell: Cell, *, p: float | Sequence[float] = 0.1) -> None:
        super().__init__(cell)
        if isinstance(p, Sequence):
            given = tuple(p)
        else:
            given = (p,) * (self.num_parts - self.passive_parts) + (0.0,) * self.passive_parts
        if len(given) != self.num_parts:
            raise StrettoError(
                f"Zoneout got p={p!r} for {type(cell).__name__}, whose state has {self.num_parts} parts",
                fix="Give one probability for all parts, or one for each.",
            )
        self.p = tuple(probability(share, name="p", cell=self) for share in given)

    def initial_state(self, batch_size: int) -> State:
        """The initial state of the cell inside."""
        return self.cell.initial_state(batch_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step of the cell inside, mixed with the state before."""
        olds = (one(state, cell=self),) if self.single else several(state, self.num_parts, cell=self)
        y, changed = self.cell(x_t, state)
        news = parts(changed)
        mixed = tuple(self._mix(old, new, p) for old, new, p in zip(olds, news, self.p, strict=True))
        for new, after in zip(news, mixed, strict=True):
            if y is new:
                y = after
                break
        return y, mixed[0] if self.single else mixed

    def _mix(self, old: torch.Tensor, new: torch.Tensor, p: float) -> torch.Tensor:
        if p == 0:
            return new
        if self.training:
            return torch.where(torch.rand_like(new) < p, old, new)
        return p * old + (1 - p) * new

    def resized(self, input_size: int) -> "Zoneout":
        """A new wrapper around the cell inside, made again for `input_size`."""
        return Zoneout(self.cell.resized(input_size), p=self.p)

    def extra_repr(self) -> str:
        """The probabilities."""
        return f"p={self.p}"
