"""The cell called step after step, as it is: for what cannot be described as a graph, and as the reference in tests.

Shape legend: B sequences, P rows of all steps together, F features of the input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.func import functional_call

from stretto.graph import call_cell
from stretto.kernels.layout import Layout
from stretto.kernels.program import Walk
from stretto.state import flatten, unflatten


@final
@dataclass(slots=True)
class PlainProgram:
    """A Python loop over a cell; `structure` is a state of the cell, for its structure."""

    cell: nn.Module
    structure: Any

    def parts(
        self,
        layout: Layout,
        x_PF: torch.Tensor,
        states: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
    ) -> Walk:
        """Outputs of all rows and the final states."""
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
            fresh = flatten(after)
            now = [
                new if count == len(old) else torch.cat([new, old[count:]]) for new, old in zip(fresh, now, strict=True)
            ]
        if not outputs:
            with torch.no_grad():
                one = x_PF.new_zeros(1, *x_PF.shape[1:])
                y, _ = call_cell(self.cell, one, unflatten(self.structure, [s.new_zeros(1, *s.shape[1:]) for s in now]))
            outputs.append(y[:0])
        return torch.cat(outputs), now
        yield []  # type: ignore[unreachable]  # what makes this a walk, though one that asks for no loops
