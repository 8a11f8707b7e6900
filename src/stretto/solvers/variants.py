"""Other steps made of a cell, for solvers that need more than the step itself: a coarse one, a gate, a Jacobian.

Shape legend: B sequences, P real steps of all sequences, F features.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import nn

from stretto.kernels import Layout, PlainProgram, Program, run_together
from stretto.state import unflatten

AnyProgram: TypeAlias = Program | PlainProgram
Builder: TypeAlias = Callable[[nn.Module, tuple[int, ...], torch.dtype], AnyProgram]
"""Makes a step runnable, once for each module: from the module, the shape of a row of its input, and its dtype."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """What can be made of a cell.

    Attributes:
        cell: The cell.
        state: Any state of it, for its structure.
        build: Traces and compiles.
        held: Modules that were made before, by name; they hold the cell as their attribute `cell`.
    """

    cell: nn.Module
    state: Any
    build: Builder
    held: dict[str, nn.Module]

    def module(self, name: str, make: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """The module of this name, made of the cell if it is not there or is of another cell.

        It keeps the cell as its attribute `cell`; its states have the structure of the cell's.
        """
        held = self.held.get(name)
        if held is None or held.cell is not self.cell:
            held = self.held[name] = make(self.cell)
        return held

    def run(
        self,
        module: nn.Module,
        layout: Layout,
        x_PF: torch.Tensor,
        states: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Walk with a module of `module`; parameters are the cell's, by their names there."""
        program = self.build(module, tuple(x_PF.shape[1:]), x_PF.dtype)
        own = {f"cell.{name}": tensor for name, tensor in parameters.items()}
        ((y_PF, finals),) = run_together([program.parts(layout, x_PF, states, own)])
        return y_PF, list(finals)

    def nested(self, states: Sequence[Any]) -> Any:
        """Parts in the structure of the cell's state."""
        return unflatten(self.state, states)
