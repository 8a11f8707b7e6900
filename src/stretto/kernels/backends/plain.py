"""The cell called at each step, as it is: for what cannot be described as a graph, and as the reference in tests.

Shape legend: B sequences, T steps, P rows of all steps together, F features of the input.
"""

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import nn

from stretto.graph import call_cell, check_outputs
from stretto.kernels.backends.base import AbstractBackend, LoopCoroutine, Program, TracedStep
from stretto.kernels.layout import Layout
from stretto.state import flatten, map_state, unflatten


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
        tensors = parameters if replaced else None
        state, count = unflatten(self.structure, states), layout.num_rows
        ended: list[list[torch.Tensor]] = []  # states of the sequences that are over, the shortest first
        outputs: list[torch.Tensor] = []
        for x in torch.split(x_PF, [int(rows) for rows in layout.rows_T]) if layout.num_steps else ():
            if len(x) < count:
                count = len(x)
                ended.append([part[count:] for part in flatten(state)])
                state = map_state(operator.itemgetter(slice(count)), state)
            y, state = call_cell(self.cell, x, state, tensors=tensors)
            outputs.append(y)
        now = flatten(state)
        if ended:
            now = [torch.cat(parts[::-1]) for parts in zip(*ended, now, strict=True)]
        if not outputs:
            with torch.no_grad():
                one = x_PF.new_zeros(1, *x_PF.shape[1:])
                y, _ = call_cell(self.cell, one, unflatten(self.structure, [s.new_zeros(1, *s.shape[1:]) for s in now]))
            outputs.append(y[:0])
        check_outputs(self.cell, outputs)
        return torch.cat(outputs), now
        yield []  # type: ignore[unreachable]  # what makes this a coroutine, though it asks for no loops


def loop_over_steps(
    cell: nn.Module, x_BTF: torch.Tensor, state: Any, *, real_BT: torch.Tensor | None = None
) -> tuple[torch.Tensor, Any]:
    """Outputs (B, T, ...) and the last state by operators alone, whatever a transform or a tracer makes of them.

    Args:
        cell: The cell.
        x_BTF: Its inputs.
        state: The state before the first step.
        real_BT: Which steps there are; outputs of the others are zero, and the state stays as it is.
    """
    outputs = []
    for step, x_BF in enumerate(x_BTF.unbind(1)):
        y, after = call_cell(cell, x_BF, state)
        if real_BT is not None:
            real_B = real_BT[:, step]
            y = _keep(real_B, y, torch.zeros_like(y))
            after = map_state(partial(_keep, real_B), after, state)
        outputs.append(y)
        state = after
    if not outputs:
        with torch.no_grad():
            y, _ = call_cell(cell, x_BTF.new_zeros(x_BTF.shape[0], *x_BTF.shape[2:]), state)
        return y.unsqueeze(1)[:, :0], state
    check_outputs(cell, outputs)
    return torch.stack(outputs, 1), state


def _keep(real_B: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return torch.where(real_B.reshape(-1, *[1] * (new.dim() - 1)), new, old)
