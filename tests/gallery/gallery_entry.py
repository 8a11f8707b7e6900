"""What the gallery knows of a cell: how to make it, what a step takes, and what it must not be able to do.

A cell is a module as its users write it. Shapes are given for one row, as a whole number for a vector, or as a
`torch.Size`; they may be in tuples, named tuples and dicts, as the cell takes them. A function of (B,) or (B, T) makes
what is not drawn from normal numbers.

Shape legend: B sequences, T steps, F features of the input, H hidden units.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

F: Final = 5
H: Final = 8
B: Final = 5
T: Final = 7
INITIAL_SCALE: Final = 0.1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One cell of the gallery.

    Attributes:
        make: Makes the module.
        field: The module of the gallery in which it is.
        inputs: What a step reads besides the state.
        state: What it carries.
        constants: What is the same at every step, or None.
        step: (cell, state, inputs[, constants]) -> (state, output), or a state that is the output too; None if the cell
            is called as cell(x, state).
        is_random: Whether a step draws numbers. Then B x H is a multiple of 16, so that a loop draws the same ones.
        reason: Why it cannot be compiled: words of what `explain` says. Empty if it can.
    """

    make: Callable[[], nn.Module]
    field: str
    inputs: Any
    state: Any
    constants: Any
    step: Callable[..., Any] | None
    is_random: bool
    reason: str


GALLERY: Final[dict[str, Entry]] = {}


def shown(
    *,
    inputs: Any = F,
    state: Any = H,
    constants: Any = None,
    make: Callable[[Any], nn.Module] | None = None,
    step: Callable[..., Any] | None = None,
    is_random: bool = False,
    reason: str = "",
) -> Callable[[type], type]:
    """Put a class of cells into the gallery."""

    def add(kind: type) -> type:
        assert kind.__name__ not in GALLERY
        GALLERY[kind.__name__] = Entry(
            make=lambda: _make(kind) if make is None else make(kind),
            field=kind.__module__.removeprefix("gallery_"),
            inputs=inputs,
            state=state,
            constants=constants,
            step=step,
            is_random=is_random,
            reason=reason,
        )
        return kind

    return add


def _make(kind: Callable[..., nn.Module]) -> nn.Module:
    sizes = {"input_size": F, "hidden_size": H}
    return kind(**{name: size for name, size in sizes.items() if name in inspect.signature(kind).parameters})


def draw(shapes: Any, *sizes: int, scale: float = 1.0, dtype: torch.dtype) -> Any:
    """Numbers for every shape, with these sizes in front."""
    if shapes is None:
        return None

    def one(shape: Any) -> torch.Tensor:
        if callable(shape):
            made: torch.Tensor = shape(*sizes)
            return made.to(dtype) if made.is_floating_point() else made
        rest = (shape,) if isinstance(shape, int) else tuple(shape)
        return scale * torch.randn(*sizes, *rest, dtype=torch.float64).to(dtype)

    return pytree.tree_map(one, shapes, is_leaf=lambda part: isinstance(part, torch.Size))


def call(entry: Entry, cell: nn.Module, state: Any, inputs: Any, constants: Any) -> tuple[Any, Any]:
    """One step, as (state, output); a tensor alone is both."""
    if entry.step is not None:
        result = entry.step(cell, state, inputs, *(() if entry.constants is None else (constants,)))
        return (result, result) if isinstance(result, torch.Tensor) else result
    result = cell(inputs, state)
    structure = pytree.tree_structure(state)
    if isinstance(result, tuple) and len(result) == 2 and pytree.tree_structure(result[1]) == structure:
        return result[1], result[0]
    assert pytree.tree_structure(result) == structure
    return result, result if isinstance(result, torch.Tensor) else pytree.tree_leaves(result)[0]
