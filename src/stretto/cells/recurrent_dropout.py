"""Dropout of the state with one mask for a whole sequence, after Gal and Ghahramani (2016)."""

from collections.abc import Sequence
from typing import final

import torch

from stretto.cells.arguments import probability
from stretto.cells.cell import Cell, State
from stretto.cells.state import parts, several
from stretto.cells.wrapper import AbstractWrapper
from stretto.errors import StrettoError


@final
class RecurrentDropout(AbstractWrapper):
    """In training the cell reads its state through a mask that zeroes units with probability p and scales the rest.

    The mask is drawn in `initial_state`, for each sequence its own, and carried unchanged at the end of the state, so
    that one sequence meets one mask. The scale is 1 / (1 - p). In evaluation the state is read as it is. Cells that
    carry h itself forward, such as a GRU, have this path masked and scaled too: keep p small with those.

    Args:
        cell: The cell inside.
        p: The probability that a unit is dropped.
        masked: Which parts of the cell's state are masked, by index: the first by default, the h of an LSTM.
    """

    def __init__(self, cell: Cell, *, p: float = 0.25, masked: Sequence[int] = (0,)) -> None:
        super().__init__(cell)
        self.p = probability(p, name="p", cell=self)
        self.masked = tuple(masked) if isinstance(masked, Sequence) else ()
        if not self.masked or [index for index in range(self.num_parts) if index in self.masked] != sorted(self.masked):
            raise StrettoError(
                f"RecurrentDropout got masked={masked!r} for {type(cell).__name__}, "
                f"whose state has {self.num_parts} parts",
                fix=f"Name at least one part, each once, from 0 to {self.num_parts - 1}.",
            )

    @property
    def passive_parts(self) -> int:
        """Those of the cell inside, and the masks."""
        return super().passive_parts + len(self.masked)

    def initial_state(self, batch_size: int) -> State:
        """The initial state of the cell inside and fresh masks, all ones in evaluation."""
        inner = parts(self.cell.initial_state(batch_size))
        return *inner, *(self._draw(inner[index]) for index in self.masked)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step of the cell inside from the masked state."""
        carried = several(state, self.num_parts + len(self.masked), cell=self)
        inner, masks = list(carried[: self.num_parts]), carried[self.num_parts :]
        if self.training:
            for index, mask in zip(self.masked, masks, strict=True):
                inner[index] = inner[index] * mask
        y, changed = self.cell(x_t, inner[0] if self.single else tuple(inner))
        return y, (*parts(changed), *masks)

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return torch.ones_like(like)
        return torch.bernoulli(torch.full_like(like, 1 - self.p)) / (1 - self.p)

    def resized(self, input_size: int) -> "RecurrentDropout":
        """A new wrapper around the cell inside, made again for `input_size`."""
        return RecurrentDropout(self.cell.resized(input_size), p=self.p, masked=self.masked)

    def extra_repr(self) -> str:
        """The probability and the masked parts."""
        return f"p={self.p}, masked={self.masked}"
