"""The tensors in the state of a cell."""

import torch
from torch import nn

from stretto.cells.cell import State
from stretto.errors import StrettoError


def one(state: State, *, cell: nn.Module) -> torch.Tensor:
    """The state of a cell that carries a single tensor."""
    if not isinstance(state, torch.Tensor):
        raise _unfitting(state, "one tensor", cell)
    return state


def several(state: State, count: int, *, cell: nn.Module) -> tuple[torch.Tensor, ...]:
    """The state of a cell that carries a tuple of `count` tensors."""
    if isinstance(state, torch.Tensor) or len(state) != count:
        raise _unfitting(state, f"a tuple of {count} tensors", cell)
    return state


def parts(state: State) -> tuple[torch.Tensor, ...]:
    """All tensors of any state."""
    return (state,) if isinstance(state, torch.Tensor) else tuple(state)


def _unfitting(state: State, wanted: str, cell: nn.Module) -> StrettoError:
    given = "one tensor" if isinstance(state, torch.Tensor) else f"{len(state)} tensors"
    return StrettoError(
        f"{type(cell).__name__} got a state of {given}, its state is {wanted}",
        fix="Start from the cell's initial_state(batch_size) and pass on the state that each step returns.",
    )
