"""The state of a recurrent net between the pieces of a long sequence.

Shape legend: B rows of the batch, M some of them.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, cast, final

import torch

from stretto.errors import StrettoError

NestedState: TypeAlias = torch.Tensor | tuple["NestedState", ...]
Initial: TypeAlias = NestedState | Callable[[int], NestedState] | None


def detach_state(state: NestedState) -> NestedState:
    """The same values without their graph, of a tensor or nested tuples of tensors."""
    return _mapped(torch.Tensor.detach, state)


def reset_rows(
    state: NestedState, rows_B: torch.Tensor, *, initial: NestedState | None = None, batch_dim: int = 0
) -> NestedState:
    """The state with some rows put back to their initial values; no gradient goes from them into the old state.

    Args:
        state: A tensor or nested tuples of tensors.
        rows_B: Which rows, true or false.
        initial: The values of these rows, in the form of `state`, with their graph if they are learnt; None for zeros.
        batch_dim: Where each tensor has its rows: 0 for `stretto.RNN`, 1 for `torch.nn.LSTM`, `GRU` and `RNN`.
    """
    if rows_B.dtype != torch.bool or rows_B.ndim != 1:
        raise StrettoError(
            f"rows are {rows_B.dtype} of shape {tuple(rows_B.shape)}", fix="Give one true or false for each row."
        )

    def reset(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        _check_rows(old, len(rows_B), batch_dim=batch_dim)
        shape = [1] * old.ndim
        shape[batch_dim] = -1
        return torch.where(rows_B.to(old.device).view(shape), new.to(old), old)

    return _mapped(reset, state, _mapped(torch.zeros_like, state) if initial is None else initial)


def take_rows(state: NestedState, rows_M: torch.Tensor, *, of: int, batch_dim: int) -> NestedState:
    """The rows with these numbers, out of a state `of` so many rows."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        _check_rows(tensor, of, batch_dim=batch_dim)
        return tensor.index_select(batch_dim, rows_M.to(tensor.device))

    return _mapped(take, state)


def put_rows(state: NestedState, rows_M: torch.Tensor, new: NestedState, *, batch_dim: int) -> NestedState:
    """The state with the rows of these numbers replaced."""
    return _mapped(lambda old, rows: old.index_copy(batch_dim, rows_M.to(old.device), rows), state, new)


def start_rows(
    state: NestedState | None, resets_B: torch.Tensor, *, initial: Initial, batch_dim: int
) -> NestedState | None:
    """The state before a chunk, or None where all rows start and the net is to make its own initial state."""
    made = initial(len(resets_B)) if callable(initial) else initial
    if resets_B.all():
        return made
    if state is None:
        raise StrettoError(
            f"{int((~resets_B).sum())} of {len(resets_B)} rows continue a sequence without a state to go on from",
            fix="Give the state that was carried when the streams were left, or begin with the first chunk.",
        )
    return reset_rows(state, resets_B, initial=made, batch_dim=batch_dim) if resets_B.any() else state


@final
class CarriedState:
    """The state between the chunks of `Streams`: detached after each one, initial in rows that start a sequence.

    Args:
        initial: What a sequence starts from: a state of all rows, or a function that makes one for a number of rows,
            such as a cell's `initial_state`. None for zeros, as `torch.nn.LSTM` has them.
        batch_dim: Where each tensor of the state has its rows: 0 for `stretto.RNN`, 1 for `torch.nn.LSTM` and its like.
        state: What to go on from, when streams are resumed.

    Attributes:
        state: What was kept last, None before that.

    Example:
        >>> carried = CarriedState(batch_dim=1)
        >>> for chunk in streams:
        ...     y_BTF, state = lstm(chunk.x_BT, carried.start(chunk.resets))
        ...     carried.keep(state)
    """

    def __init__(self, *, initial: Initial = None, batch_dim: int = 0, state: NestedState | None = None) -> None:
        self._initial = initial
        self._batch_dim = batch_dim
        self.state = state

    def start(self, resets_B: torch.Tensor) -> NestedState | None:
        """The state before a chunk, or None where all rows start and the net is to make its own initial state."""
        return start_rows(self.state, resets_B, initial=self._initial, batch_dim=self._batch_dim)

    def keep(self, state: NestedState) -> None:
        """Remember the state after a chunk, without its graph."""
        self.state = detach_state(state)


def _mapped(function: Callable[..., torch.Tensor], state: Any, *others: Any) -> NestedState:
    """`function` of the tensors in the same place of each state."""
    if isinstance(state, torch.Tensor) and all(isinstance(other, torch.Tensor) for other in others):
        return function(state, *others)
    if not isinstance(state, tuple | list) or any(
        not isinstance(other, tuple | list) or len(other) != len(state) for other in others
    ):
        raise StrettoError(
            "a state is not made of tensors in the expected form: " + " against ".join(map(_form, (state, *others))),
            fix="Give a tensor or nested tuples of tensors, everywhere in the same form.",
        )
    mapped = [_mapped(function, *inner) for inner in zip(state, *others, strict=True)]
    # A named tuple keeps its names: the net may ask for them.
    return cast("NestedState", type(state)(*mapped) if hasattr(state, "_fields") else tuple(mapped))


def _form(state: Any) -> str:
    if isinstance(state, tuple | list):
        return f"({', '.join(map(_form, state))})"
    return type(state).__name__


def _check_rows(tensor: torch.Tensor, count: int, *, batch_dim: int) -> None:
    if not -tensor.ndim <= batch_dim < tensor.ndim or tensor.shape[batch_dim] != count:
        raise StrettoError(
            f"a state of shape {tuple(tensor.shape)} does not have {count} rows in dimension {batch_dim}",
            fix="Give batch_dim, the dimension of the rows: 0 for stretto.RNN, 1 for torch.nn.LSTM, GRU and RNN.",
        )
