"""The loop run with PyTorch's operators: the reference, and what runs where no code can be generated.

The same nodes are in the loop as in generated code; hoisting, sinking and deferral do not depend on who runs it.
"""

from typing import Any, final

import torch

from stretto.graph import BatchDim, Kind, Node, concrete_shape, run
from stretto.kernels.kernel import AbstractKernel, Cotangents, Gradients, Inputs, Outputs
from stretto.kernels.layout import Layout


@final
class EagerKernel(AbstractKernel):
    """One operator after another, step after step."""

    def forward(self, layout: Layout, inputs: Inputs, *, keep: bool) -> Outputs:
        """Run all steps."""
        body = self.body
        wanted = [*body.next_states, *body.outputs, *(body.saved if keep else [])]
        history: dict[Node, list[torch.Tensor]] = {node: [] for node in wanted}
        states = list(inputs.states)
        for step in range(layout.num_steps):
            start, count = int(layout.starts_T[step]), int(layout.rows_T[step])
            values = self._given(inputs, states, start, count)
            run(body.forward, values, count)
            for node, rows in history.items():
                rows.append(values[node])
            states = [_onto(values[node], state) for node, state in zip(body.next_states, states, strict=True)]
        count = len(body.next_states)
        made = [_stacked(history[node], node, inputs) for node in wanted]
        return Outputs(
            after=made[:count],
            emits=made[count : count + len(body.outputs)],
            finals=states,
            saved=made[count + len(body.outputs) :],
        )

    def backward(self, layout: Layout, inputs: Inputs, outputs: Outputs, cotangents: Cotangents) -> Gradients:
        """Run all steps backward."""
        body = self.body
        carried = [
            torch.zeros_like(state) if final is None else final
            for state, final in zip(inputs.states, cotangents.finals, strict=True)
        ]
        kept = [torch.zeros_like(tensor) for tensor in inputs.kept]
        ports = {kind: body.ports_of(kind) for kind in Kind}
        wanted = [*(port.gradient for port in ports[Kind.PER_STEP] if port.gradient is not None), *body.to_deferred]
        history: dict[Node, list[torch.Tensor]] = {node: [] for node in wanted}
        before = [layout.shifted(after, state) for after, state in zip(outputs.after, inputs.states, strict=True)]
        for step in reversed(range(layout.num_steps)):
            start, count = int(layout.starts_T[step]), int(layout.rows_T[step])
            here = slice(start, start + count)
            values = self._given(inputs, [tensor[here] for tensor in before], start, count)
            for nodes, tensors in (
                (body.next_states, outputs.after),
                (body.outputs, outputs.emits),
                (body.saved, outputs.saved),
            ):
                values.update((node, tensor[_span(node, here)]) for node, tensor in zip(nodes, tensors, strict=True))
            for node, carry, arriving in zip(body.state_gradients, carried, cotangents.after, strict=True):
                # The backward step was recorded on rows that lie one after another.
                values[node] = (carry[:count] if arriving is None else carry[:count] + arriving[here]).contiguous()
            for node, arriving, emitted in zip(body.output_gradients, cotangents.emits, outputs.emits, strict=True):
                rows_here = _span(node, here)
                values[node] = (
                    torch.zeros_like(emitted[rows_here]) if arriving is None else arriving[rows_here].contiguous()
                )
            run(body.backward, values, count)
            for node, rows in history.items():
                rows.append(values[node])
            carried = [
                _onto(torch.zeros_like(carry[:count]) if port.gradient is None else values[port.gradient], carry)
                for port, carry in zip(ports[Kind.STATE], carried, strict=True)
            ]
            for index, port in enumerate(ports[Kind.CONSTANT]):
                if port.gradient is not None:
                    kept[index] = _onto(kept[index][:count] + values[port.gradient], kept[index])
        stacked = {node: _stacked(rows[::-1], node, inputs) for node, rows in history.items()}
        return Gradients(
            states=carried,
            steps=[None if port.gradient is None else stacked[port.gradient] for port in ports[Kind.PER_STEP]],
            kept=[
                None if port.gradient is None else tensor
                for port, tensor in zip(ports[Kind.CONSTANT], kept, strict=True)
            ],
            handed=[stacked[node] for node in body.to_deferred],
        )

    def _given(self, inputs: Inputs, states: list[torch.Tensor], start: int, count: int) -> dict[Node, Any]:
        values: dict[Node, Any] = {}
        tensors = {
            Kind.STATE: [state[:count] for state in states],
            Kind.PER_STEP: [
                tensor[_span(port.node, slice(start, start + count))]
                for port, tensor in zip(self.body.ports_of(Kind.PER_STEP), inputs.steps, strict=True)
            ],
            Kind.WEIGHT: inputs.once,
            Kind.CONSTANT: [tensor[:count] for tensor in inputs.kept],
        }
        for kind, given in tensors.items():
            values.update((port.node, tensor) for port, tensor in zip(self.body.ports_of(kind), given, strict=True))
        return values


def _span(node: Node, rows: slice) -> slice:
    """The rows of a value that has several for each row of the batch."""
    first = node.shape[0]
    assert isinstance(first, BatchDim)
    return slice(rows.start * first.factor, rows.stop * first.factor)


def _onto(going: torch.Tensor, all_rows: torch.Tensor) -> torch.Tensor:
    """Rows that are still going, with the others as they were."""
    return going if len(going) == len(all_rows) else torch.cat([going, all_rows[len(going) :]])


def _stacked(rows: list[torch.Tensor], node: Node, inputs: Inputs) -> torch.Tensor:
    if rows:
        return torch.cat(rows)
    like = (inputs.states or inputs.steps)[0]
    return torch.zeros(concrete_shape(node.shape, 0), dtype=node.dtype, device=like.device)
