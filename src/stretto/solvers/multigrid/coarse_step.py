"""The step of a coarse grid: a cell's own `coarse_step`, and a forcing term that ties it to the finer grid.

Shape legend: B sequences, G input features and units of the state side by side, D units of the state.
"""

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn

from stretto.errors import StrettoError
from stretto.solvers.solver import Chain
from stretto.state import flatten, unflatten


@final
class ForcedCoarseStep(nn.Module):
    """One step over `dt` steps of a cell, plus what comes with its input.

    A row of its input is the cell's input and the forcing term, flattened and side by side; its output is the state
    after the step, flattened.

    Args:
        cell: A cell with a `coarse_step`.
        dt: How many steps it spans.
        features: Sizes of a row of the cell's input.
    """

    def __init__(self, cell: nn.Module, *, dt: float, features: tuple[int, ...]) -> None:
        super().__init__()
        self.cell = cell
        self.dt = dt
        self.features = features

    def forward(self, row_BG: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        """The step."""
        at = math.prod(self.features)
        x = _shaped(row_BG[:, :at], self.features)
        after = self.cell.coarse_step(x, state, self.dt)  # type: ignore[operator]
        forced = []
        for part in _fitting(self.cell, after, state):
            size = math.prod(part.shape[1:])
            forced.append(part + _shaped(row_BG[:, at : at + size], tuple(part.shape[1:])))
            at += size
        return joined(forced), unflatten(state, forced)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts of a state, flattened and side by side (B, D)."""
    flat = [part if part.dim() == 2 else part[:, None] if part.dim() == 1 else part.flatten(1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def parted(state_BD: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A state as it was before it was joined; `parts` are any others, for their shapes."""
    shapes = [tuple(part.shape[1:]) for part in parts]
    pieces = torch.split(state_BD, [math.prod(shape) for shape in shapes], dim=1)
    return [_shaped(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]


def why_no_coarse_step(chain: Chain) -> str:
    """What keeps a chain from having coarse grids; empty if nothing does."""
    cell = chain.variants.cell
    if not callable(getattr(cell, "coarse_step", None)):
        return f"{type(cell).__name__} has no coarse_step"
    if not chain.states:
        return f"{type(cell).__name__} has no state"
    kinds = list(dict.fromkeys(tensor.dtype for tensor in (chain.x_PF, *chain.states)))
    if len(kinds) > 1 or not kinds[0].is_floating_point:
        return f"the input and the state are of {' and '.join(map(str, kinds))}"
    return ""


def _shaped(flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return flat if len(shape) == 1 else flat.reshape(-1, *shape)


def _fitting(cell: nn.Module, after: Any, before: Any) -> list[torch.Tensor]:
    given, wanted = _told(after), _told(before)
    if given != wanted:
        raise StrettoError(
            f"{type(cell).__name__}.coarse_step returned {given} and its state is {wanted}",
            fix="Return the next state alone from coarse_step(x_t, state, dt), as it was given.",
        )
    return flatten(after)


def _told(state: Any) -> str:
    """Structure, shapes and dtypes, in words."""
    if isinstance(state, torch.Tensor):
        return f"{tuple(state.shape)} of {state.dtype}"
    if isinstance(state, (tuple, list)):
        return f"({', '.join(map(_told, state))})"
    return type(state).__name__
