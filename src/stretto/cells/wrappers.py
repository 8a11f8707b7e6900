"""Cells around another cell: zoneout and dropout of the state."""

from collections.abc import Sequence
from typing import Any, final

import torch

from stretto.cells.cell import Cell, State, expect_tensor, expect_tuple
from stretto.checks import check_float
from stretto.errors import StrettoError
from stretto.state import flatten


class _AbstractWrapper(Cell):
    """Holds the cell inside and knows the structure of its state."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        if not isinstance(cell, Cell):
            raise StrettoError(
                f"{type(self).__name__} got {_describe(cell)} in the place of a cell",
                fix="Give an instance of stretto.Cell; stretto.cells.cell_from makes one of torch's cells.",
            )
        self.cell = cell
        state = cell.initial_state(1)
        self.single = isinstance(state, torch.Tensor)
        self.num_parts = len(flatten(state))

    @property
    def input_size(self) -> int | None:
        """Features per step, if the cell inside says."""
        size = getattr(self.cell, "input_size", None)
        return size if isinstance(size, int) else None

    @property
    def passive_parts(self) -> int:
        """How many tensors at the end of the state are not units of the net."""
        return int(getattr(self.cell, "passive_parts", 0))

    def _check_probability(self, p: Any) -> float:
        return check_float(p, name="p", at_least=0.0, below=1.0, owner=type(self).__name__)


def _describe(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


@final
class Zoneout(_AbstractWrapper):
    """Zoneout, after Krueger et al. (2017): in training each unit of the state keeps its old value with probability p.

    Each step draws a new mask. In evaluation a unit has its expected value, p of the old plus 1 - p of the new one. If
    the cell's output is a part of its new state, such as the h of an LSTM, the output is that part after zoneout.

    Args:
        cell: The cell inside.
        p: A probability for all parts of the state, or one for each, such as (0.05, 0.5) for the h and c of an LSTM.
            A single one spares the passive parts: the counter of `Clockwork`, the memory of `AttentionCell` and the
            masks of `RecurrentDropout`.
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
        self.p = tuple(self._check_probability(each) for each in given)

    def initial_state(self, batch_size: int) -> State:
        """The initial state of the cell inside."""
        return self.cell.initial_state(batch_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step of the cell inside, mixed with the state before."""
        if self.single:
            expect_tensor(state, cell=self)
        else:
            expect_tuple(state, self.num_parts, cell=self)
        y, new_state = self.cell(x_t, state)
        olds, news = flatten(state), flatten(new_state)
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

    def with_input_size(self, input_size: int) -> "Zoneout":
        """A new wrapper around a new cell for `input_size`."""
        return Zoneout(self.cell.with_input_size(input_size), p=self.p)

    def extra_repr(self) -> str:
        """The probabilities."""
        return f"p={self.p}"


@final
class RecurrentDropout(_AbstractWrapper):
    """Dropout of the state with one mask per sequence, after Gal and Ghahramani (2016).

    In training the cell reads its state through a mask that zeroes units with probability p and scales the others by
    1 / (1 - p). `initial_state` draws a mask for each sequence, and the end of the state holds it unchanged. In
    evaluation the state is read as it is. A cell that passes h on directly, such as a GRU, has this path masked and
    scaled too: keep p small there.

    Args:
        cell: The cell inside.
        p: The probability that a unit is dropped.
        masked: Which parts of the cell's state are masked, by index: by default the first, the h of an LSTM.
    """

    def __init__(self, cell: Cell, *, p: float = 0.25, masked: Sequence[int] = (0,)) -> None:
        super().__init__(cell)
        self.p = self._check_probability(p)
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
        inner = flatten(self.cell.initial_state(batch_size))
        return *inner, *(self._draw(inner[index]) for index in self.masked)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step of the cell inside from the masked state."""
        parts = expect_tuple(state, self.num_parts + len(self.masked), cell=self)
        inner, masks = list(parts[: self.num_parts]), parts[self.num_parts :]
        if self.training:
            for index, mask in zip(self.masked, masks, strict=True):
                inner[index] = inner[index] * mask
        y, new_state = self.cell(x_t, inner[0] if self.single else tuple(inner))
        return y, (*flatten(new_state), *masks)

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return torch.ones_like(like)
        return torch.bernoulli(torch.full_like(like, 1 - self.p)) / (1 - self.p)

    def with_input_size(self, input_size: int) -> "RecurrentDropout":
        """A new wrapper around a new cell for `input_size`."""
        return RecurrentDropout(self.cell.with_input_size(input_size), p=self.p, masked=self.masked)

    def extra_repr(self) -> str:
        """The probability and the masked parts."""
        return f"p={self.p}, masked={self.masked}"
