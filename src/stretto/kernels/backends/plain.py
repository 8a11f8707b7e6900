"""The cell called at each step, as it is: for what cannot be described as a graph, and as the reference in tests.

Shape legend: B sequences, T steps, P rows of all steps together, F features of the input.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import nn

from stretto.graph import attribute_tensors
from stretto.kernels.backends.base import AbstractBackend, LoopCoroutine, Program, TracedStep
from stretto.kernels.layout import Layout
from stretto.signature import PLAIN, Packing, StepSignature, call_step, check_outputs
from stretto.state import flatten, map_state, select_rows, unflatten


@final
class TorchBackend(AbstractBackend):
    """Runs any cell, since it knows nothing about it."""

    name: ClassVar[str] = "torch"
    description: ClassVar[str] = "the cell is called at each step, as it is"
    needs_graph: ClassVar[bool] = False
    generates_code: ClassVar[bool] = False

    def build(self, step: TracedStep) -> Program:
        """Nothing to do."""
        return PlainProgram(step.cell, step.state, step.signature)


@final
class PlainProgram(Program):
    """A Python loop over a cell; `structure` is a state of the cell, for its structure."""

    def __init__(self, cell: nn.Module, structure: Any, signature: StepSignature = PLAIN) -> None:
        self.cell = cell
        self.structure = structure
        self.signature = signature

    def coroutine(
        self,
        layout: Layout,
        x_PF: torch.Tensor,
        states: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
    ) -> LoopCoroutine:
        """Everything at once: there are no loops to ask for."""
        cell = self.cell
        own = {**dict(attribute_tensors(cell)), **dict(cell.named_parameters()), **dict(cell.named_buffers())}
        replaced = any(parameters.get(name, tensor) is not tensor for name, tensor in own.items())
        tensors = parameters if replaced else None
        state, count = unflatten(self.structure, states), layout.num_rows
        ended: list[list[torch.Tensor]] = []  # states of the sequences that are over, the shortest first
        outputs: list[torch.Tensor] = []
        sizes = [int(rows) for rows in layout.rows_T]
        for x, rows in zip(torch.split(x_PF, sizes) if sizes else (), sizes, strict=True):
            if rows < count:
                count = rows
                ended.append([part[count:] for part in flatten(state)])
                state = map_state(operator.itemgetter(slice(count)), state)
            y, state = call_step(self.cell, x, state, signature=self.signature, tensors=tensors)
            outputs.append(y if isinstance(y, torch.Tensor) else self._pack(y))
        now = flatten(state)
        if ended:
            now = [torch.cat(parts[::-1]) for parts in zip(*ended, now, strict=True)]
        if not outputs:
            with torch.no_grad():
                one = x_PF.new_zeros(1, *x_PF.shape[1:])
                rows = unflatten(self.structure, [s.new_zeros(1, *s.shape[1:]) for s in now])
                y, _ = call_step(self.cell, one, rows, signature=self.signature)
            outputs.append((y if isinstance(y, torch.Tensor) else self._pack(y))[:0])
        check_outputs(self.cell, outputs)
        return torch.cat(outputs), now
        yield []  # type: ignore[unreachable]  # what makes this a coroutine, though it asks for no loops

    def _pack(self, y: Any) -> torch.Tensor:
        """Several outputs, concatenated."""
        found = Packing.of(y)
        if self.outputs != found:
            self.outputs = found
        return found.pack(y)


def loop_over_steps(
    cell: nn.Module,
    x_BTF: Any,
    state: Any,
    *,
    real_BT: torch.Tensor | None = None,
    resets_BT: torch.Tensor | None = None,
    fresh: Any = None,
    signature: StepSignature = PLAIN,
) -> tuple[Any, Any]:
    """Outputs (B, T, ...) and the last state by operators alone, whatever a transform or a tracer makes of them.

    Args:
        cell: The cell.
        x_BTF: Its inputs, as they are: several are not packed.
        state: The state before the first step.
        real_BT: Which steps there are; outputs of the others are zero, and the state stays as it is.
        resets_BT: Before which steps the state is `fresh`.
        fresh: A state.
        signature: How the cell is called.
    """
    signature = replace(signature, inputs=None)
    outputs: list[Any] = []
    for step, parts in enumerate(zip(*(part.unbind(1) for part in flatten(x_BTF)), strict=True)):
        if resets_BT is not None:
            state = map_state(partial(select_rows, resets_BT[:, step]), fresh, state)
        y, after = call_step(cell, unflatten(x_BTF, parts), state, signature=signature)
        if real_BT is not None:
            real_B = real_BT[:, step]
            y = map_state(lambda part, real_B=real_B: select_rows(real_B, part, torch.zeros_like(part)), y)
            after = map_state(partial(select_rows, real_B), after, state)
        outputs.append(y)
        state = after
    if not outputs:
        with torch.no_grad():
            rows = map_state(lambda part: part.new_zeros(part.shape[0], *part.shape[2:]), x_BTF)
            y, _ = call_step(cell, rows, state, signature=signature)
        return map_state(lambda part: part.unsqueeze(1)[:, :0], y), state
    for parts in zip(*map(flatten, outputs), strict=True):
        check_outputs(cell, parts)
    return map_state(lambda *parts: torch.stack(parts, 1), *outputs), state
