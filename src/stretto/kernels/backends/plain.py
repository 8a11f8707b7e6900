"""The cell called at each step, as it is: for what cannot be described as a graph, and as the reference in tests.

Shape legend: B sequences, P rows of all steps together, F features of the input.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import nn
from torch.func import functional_call

from stretto.graph import call_cell
from stretto.kernels.backends.base import AbstractBackend, LoopCoroutine, Program, TracedStep
from stretto.kernels.layout import Layout
from stretto.state import flatten, unflatten


@final
class TorchBackend(AbstractBackend):
    """Runs any cell, since it knows nothing about it."""

    name: ClassVar[str] = "torch"
    description: ClassVar[str] = "the cell is called at each step, as it is"
    needs_graph: ClassVar[bool] = False
    generates_code: ClassVar[bool] = False

    def build(self, step: TracedStep) -> Program:
        """Nothing to do."""
        return PlainProgram(step.cell, step.state)


@final
class PlainProgram(Program):
    """A Python loop over a cell; `structure` is a state of the cell, for its structure."""

    def __init__(self, cell: nn.Module, structure: Any) -> None:
        self.cell = cell
        self.structure = structure

    def coroutine(
        self,
        layout: Layout,
        x_PF: torch.Tensor,
        states: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
    ) -> LoopCoroutine:
        """Everything at once: there are no loops to ask for."""
        own = {**dict(self.cell.named_parameters()), **dict(self.cell.named_buffers())}
        replaced = any(parameters[name] is not tensor for name, tensor in own.items())
        now = list(states)
        outputs = []
        for step in range(layout.num_steps):
            start, count = int(layout.starts_T[step]), int(layout.rows_T[step])
            x, before = x_PF[start : start + count], unflatten(self.structure, [s[:count] for s in now])
            y, after = (
                functional_call(self.cell, dict(parameters), (x, before))
                if replaced
                else call_cell(self.cell, x, before)
            )
            outputs.append(y)
            now = [
                new if count == len(old) else torch.cat([new, old[count:]])
                for new, old in zip(flatten(after), now, strict=True)
            ]
        if not outputs:
            with torch.no_grad():
                one = x_PF.new_zeros(1, *x_PF.shape[1:])
                y, _ = call_cell(self.cell, one, unflatten(self.structure, [s.new_zeros(1, *s.shape[1:]) for s in now]))
            outputs.append(y[:0])
        return torch.cat(outputs), now
        yield []  # type: ignore[unreachable]  # what makes this a coroutine, though it asks for no loops
