"""The state of a cell: a tensor, or nested tuples of tensors. Shape legend: B sequences, S all units of a state.

Everything that takes states apart does it with these five functions:

    flatten      (h, (c, m))  ->  [h, c, m]
    unflatten    the way back, with other values in the same structure
    map_state    a function of every tensor
    pack         [h_BH, c_BH]  ->  one tensor (B, S), the parts side by side
    unpack       the way back
"""

import math
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


def unflatten(state: Any, values: Sequence[Item]) -> Any:
    """`values` in the structure of `state`; a named tuple keeps its names, a list becomes a tuple."""
    remaining = iter(values)

    def fill(part: Any) -> Any:
        if isinstance(part, (tuple, list)):
            items = [fill(item) for item in part]
            return type(part)(*items) if hasattr(part, "_fields") else tuple(items)
        return next(remaining)

    return fill(state)


def map_state(change: Callable[..., Item], state: Any, *others: Any) -> Any:
    """`change` of the tensors in the same place of each state, in their structure.

    Raises:
        StrettoError: The states are not nested alike.
    """
    forms = [describe(one) for one in (state, *others)]
    if len(set(forms)) > 1:
        raise StrettoError(
            f"states differ in structure: {' against '.join(forms)}",
            fix="Give a tensor or nested tuples of tensors, everywhere in the same structure.",
        )
    columns = zip(flatten(state), *map(flatten, others), strict=True)
    return unflatten(state, [change(*tensors) for tensors in columns])


def pack(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts (B, ...) of states, flattened and side by side: (B, S)."""
    flat = [part if part.dim() == 2 else part.reshape(len(part), math.prod(part.shape[1:])) for part in states]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def unpack(states_BS: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts again, with the shapes that those of `like` have after the first dimension."""
    shapes = [tuple(part.shape[1:]) for part in like]
    parts = torch.split(states_BS, [math.prod(shape) for shape in shapes], dim=1)
    return [
        part if len(shape) == 1 else part.reshape(len(states_BS), *shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]


def describe(state: Any) -> str:
    """The structure in words: "(Tensor, (Tensor, Tensor))"."""
    if isinstance(state, (tuple, list)):
        return f"({', '.join(map(describe, state))})"
    return "Tensor" if isinstance(state, torch.Tensor) else type(state).__name__
