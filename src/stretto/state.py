"""Tensors in a structure: the state of a cell, and what goes into a step and comes out.

Shape legend: B sequences, S all units of a state.

A structure is a tensor, or tuples, named tuples, lists, dicts and whatever else is registered as a pytree with PyTorch,
nested in any way. Everything that takes one apart does it with these functions:

    flatten      (h, {"c": c, "m": m})  ->  [h, c, m]        dicts in the order of their keys' names
    unflatten    the way back, with other values in the same structure
    map_state    a function of every tensor
    is_alike     whether two have the same structure, and tensors of the same shapes and dtypes
    pack         [h_BH, c_BH]  ->  one tensor (B, S), the parts concatenated
    unpack       the way back
    select_rows  rows of one tensor where a mask is set, elsewhere of another
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

from stretto.errors import StrettoError

Item = TypeVar("Item")


def flatten(state: Any) -> list[torch.Tensor]:
    """The tensors of a state, part by part."""
    if isinstance(state, torch.Tensor):
        return [state]
    return [tensor for item in children(state) for tensor in flatten(item)]


def children(state: Any) -> Sequence[Any]:
    """What a structure consists of, one level down; nothing for None.

    Raises:
        StrettoError: It is not a structure of tensors.
    """
    if isinstance(state, (tuple, list)):
        return state
    if isinstance(state, dict):
        return [state[key] for key in sorted(state, key=str)]
    if state is None:
        return ()
    node = _pytree.SUPPORTED_NODES.get(type(state))
    if node is None:
        raise StrettoError(
            f"a state must be a tensor or a tuple of tensors, and this is {type(state).__name__}",
            fix="Return tensors from initial_state and forward, one for each part of the state, in nested tuples, "
            "lists, dicts, named tuples or classes registered with torch.utils._pytree.register_dataclass.",
        )
    return list(node.flatten_fn(state)[0])


def unflatten(state: Any, values: Sequence[Item]) -> Any:
    """`values` in the structure of `state`, which keeps its types and names."""
    remaining = iter(values)

    def fill(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return next(remaining)
        items = [fill(item) for item in children(part)]
        if isinstance(part, (tuple, list)):
            return type(part)(*items) if hasattr(part, "_fields") else items if isinstance(part, list) else tuple(items)
        if isinstance(part, dict):
            made = part.copy()
            made.update(zip(sorted(part, key=str), items, strict=True))
            return made
        if part is None:
            return None
        node = _pytree.SUPPORTED_NODES[type(part)]
        return node.unflatten_fn(items, node.flatten_fn(part)[1])

    return fill(state)


def map_state(change: Callable[..., Item], state: Any, *others: Any) -> Any:
    """`change` applied to the tensors in the same place of each state; its results in their structure.

    Raises:
        StrettoError: The states differ in structure.
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
    """The parts (B, ...) of states, flattened and concatenated: (B, S)."""
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


def select_rows(mask_B: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Rows of `one` (B, ...) where the mask is set, elsewhere of `other`."""
    return torch.where(mask_B.reshape(-1, *[1] * (one.dim() - 1)), one, other)


def describe(state: Any) -> str:
    """The structure in words: "(Tensor, (Tensor, Tensor))"."""
    if isinstance(state, torch.Tensor):
        return "Tensor"
    if isinstance(state, (tuple, list)):
        return f"({', '.join(map(describe, state))})"
    if isinstance(state, dict):
        return f"{{{', '.join(f'{key}: {describe(state[key])}' for key in sorted(state, key=str))}}}"
    if type(state) in _pytree.SUPPORTED_NODES:
        return f"{type(state).__name__}({', '.join(map(describe, children(state)))})"
    return type(state).__name__


def describe_rows(state: Any, *, num_lead: int = 1) -> str:
    """Shape, dtype and device of each tensor, without the leading dimensions: "(4,) torch.float32 on cpu"."""
    return ", ".join(f"{tuple(part.shape[num_lead:])} {part.dtype} on {part.device}" for part in flatten(state))


def describe_difference(one: Any, other: Any) -> tuple[str, str]:
    """Two states that are not alike, in words: by their structures, or their rows, or how many rows they have."""
    if describe(one) != describe(other):
        return f"the structure {describe(one)}", f"the structure {describe(other)}"
    if describe_rows(one) != describe_rows(other):
        return f"rows of {describe_rows(one)}", f"rows of {describe_rows(other)}"
    return f"the shapes {describe_rows(one, num_lead=0)}", f"the shapes {describe_rows(other, num_lead=0)}"


def structure_of(state: Any) -> Hashable:
    """Types and names of a structure without its tensors; equal for states that look the same to a cell."""
    if isinstance(state, torch.Tensor):
        return torch.Tensor
    names = tuple(sorted(state, key=str)) if isinstance(state, dict) else ()
    return type(state), names, tuple(map(structure_of, children(state)))


def is_alike(one: Any, other: Any, *, compares_tensors: bool = True) -> bool:
    """Whether two states have the same structure, tuples equal to lists, and tensors of the same shapes and dtypes."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor):
            return False
        if not compares_tensors:
            return True
        return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    if isinstance(one, (tuple, list)):
        if not isinstance(other, (tuple, list)):
            return False
    elif type(one) is not type(other) or (isinstance(one, dict) and one.keys() != other.keys()):
        return False
    items = children(one), children(other)
    return len(items[0]) == len(items[1]) and all(
        is_alike(a, b, compares_tensors=compares_tensors) for a, b in zip(*items, strict=True)
    )
