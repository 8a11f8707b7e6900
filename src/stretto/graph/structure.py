"""States of any structure as a flat list of tensors, and back."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from stretto.errors import StrettoError

Item = TypeVar("Item")


def flatten(state: Any) -> list[torch.Tensor]:
    """The tensors of a state: a tensor, or nested tuples and lists of them."""
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, (tuple, list)):
        return [tensor for item in state for tensor in flatten(item)]
    raise StrettoError(
        f"a state must be a tensor or a tuple of tensors, and this is {type(state).__name__}",
        fix="Return tensors from initial_state and forward, one for each part of the state.",
    )


def like(state: Any, values: Sequence[Item]) -> Any:
    """`values` in the structure of `state`."""
    remaining = iter(values)

    def fill(part: Any) -> Any:
        if isinstance(part, (tuple, list)):
            items = [fill(item) for item in part]
            return type(part)(*items) if hasattr(part, "_fields") else tuple(items)
        return next(remaining)

    return fill(state)


def mapped(state: Any, change: Callable[[torch.Tensor], Item]) -> Any:
    """The same structure with every tensor passed through `change`."""
    return like(state, [change(tensor) for tensor in flatten(state)])
