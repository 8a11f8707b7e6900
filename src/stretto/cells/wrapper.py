"""What cells around another cell share."""

from typing import Any

import torch

from stretto.cells.cell import Cell
from stretto.cells.state import parts
from stretto.errors import StrettoError


class AbstractWrapper(Cell):
    """Holds the cell inside and knows the make-up of its state.

    A cell may end its state with parts that are no units of the net, such as a step counter, a mask or a record of
    earlier states, and say how many there are in `passive_parts`. Wrappers leave them alone unless told otherwise.

    Args:
        cell: The cell inside.
    """

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        if not isinstance(cell, Cell):
            raise StrettoError(
                f"{type(self).__name__} got {_kind(cell)} in the place of a cell",
                fix="Give an instance of stretto.Cell; stretto.cells.cell_from makes one of torch's cells.",
            )
        self.cell = cell
        state = cell.initial_state(1)
        self.single = isinstance(state, torch.Tensor)
        self.num_parts = len(parts(state))

    @property
    def input_size(self) -> int | None:
        """Features of a step, if the cell inside says."""
        size = getattr(self.cell, "input_size", None)
        return size if isinstance(size, int) else None

    @property
    def passive_parts(self) -> int:
        """How many parts at the end of the state are no units of the net."""
        return int(getattr(self.cell, "passive_parts", 0))


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
