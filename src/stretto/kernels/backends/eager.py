"""The loop run with PyTorch's operators: the reference, and what solvers run where no code can be generated.

The same nodes are in the loop as in generated code; hoisting, sinking and deferral do not depend on the backend.
"""

from typing import Any, ClassVar, final

import torch

from stretto.graph import BatchDim, Body, Kind, Node, concrete_shape, run
from stretto.kernels.backends.base import (
    AbstractBackend,
    AbstractKernel,
    Cotangents,
    LoopCall,
    LoopGradients,
    LoopResult,
    Program,
    TracedStep,
)
from stretto.kernels.program import TracedProgram


@final
class EagerBackend(AbstractBackend):
    """Runs every cell that could be traced, on every device."""

    name: ClassVar[str] = "eager"
    description: ClassVar[str] = "the loops run operator by operator"
    generates_code: ClassVar[bool] = False

    @property
    def is_reference(self) -> bool:
        """It is what generated code is compared with."""
        return True

    def build(self, step: TracedStep) -> Program:
        """Kernels that interpret the loops."""
        assert step.plan is not None
        return TracedProgram(step.plan, [[EagerKernel(body) for body in level] for level in step.bodies])


@final
class EagerKernel(AbstractKernel):
    """One operator after another, sequentially."""

    @classmethod
    def under_autograd(cls, body: Body) -> "EagerKernel":
        """A kernel whose forward autograd can differentiate."""
        return cls(body.under_autograd or body)

    def forward(self, call: LoopCall, *, keep: bool) -> LoopResult:
        """Run all steps."""
        body, layout = self.body, call.layout
        wanted = [*body.next_states, *body.outputs, *(body.saved if keep else [])]
        history: dict[Node, list[torch.Tensor]] = {node: [] for node in wanted}
        states = list(call.states)
        for step in range(layout.num_steps):
            start, count = int(layout.starts_T[step]), int(layout.rows_T[step])
            values = self._inputs(call, states, start, count)
            run(body.forward, values, count)
            for node, rows in history.items():
                rows.append(values[node])
            states = [_extend(values[node], state) for node, state in zip(body.next_states, states, strict=True)]
        count = len(body.next_states)
        made = [_stack(history[node], node, call) for node in wanted]
        return LoopResult(
            after=made[:count],
            outputs=made[count : count + len(body.outputs)],
            finals=states,
            saved=made[count + len(body.outputs) :],
        )

    def backward(self, call: LoopCall, result: LoopResult, cotangents: Cotangents) -> LoopGradients:
        """Run all steps backward."""
        body, layout = self.body, call.layout
        carried = [
            torch.zeros_like(state) if final is None else final
            for state, final in zip(call.states, cotangents.finals, strict=True)
        ]
        constants = [torch.zeros_like(tensor) for tensor in call.constants]
        ports = {kind: body.ports_of(kind) for kind in Kind}
        wanted = [*(port.gradient for port in ports[Kind.PER_STEP] if port.gradient is not None), *body.to_deferred]
        history: dict[Node, list[torch.Tensor]] = {node: [] for node in wanted}
        made = result.by_node(body)
        before = [layout.shift(after, state) for after, state in zip(result.after, call.states, strict=True)]
        for step in reversed(range(layout.num_steps)):
            start, count = int(layout.starts_T[step]), int(layout.rows_T[step])
            here = slice(start, start + count)
            values = self._inputs(call, [tensor[here] for tensor in before], start, count)
            values.update((node, tensor[_span(node, here)]) for node, tensor in made.items())
            for node, carry, arriving in zip(body.state_gradients, carried, cotangents.after, strict=True):
                # The backward step was recorded on rows that lie one after another.
                values[node] = (carry[:count] if arriving is None else carry[:count] + arriving[here]).contiguous()
            for node, arriving, emitted in zip(body.output_gradients, cotangents.outputs, result.outputs, strict=True):
                rows_here = _span(node, here)
                values[node] = (
                    torch.zeros_like(emitted[rows_here]) if arriving is None else arriving[rows_here].contiguous()
                )
            run(body.backward, values, count)
            for node, rows in history.items():
                rows.append(values[node])
            carried = [
                _extend(torch.zeros_like(carry[:count]) if port.gradient is None else values[port.gradient], carry)
                for port, carry in zip(ports[Kind.STATE], carried, strict=True)
            ]
            for index, port in enumerate(ports[Kind.CONSTANT]):
                if port.gradient is not None:
                    more = values[port.gradient]
                    constants[index] = _extend(constants[index][: len(more)] + more, constants[index])
        stacked = {node: _stack(rows[::-1], node, call) for node, rows in history.items()}
        return LoopGradients(
            states=carried,
            per_step=[None if port.gradient is None else stacked[port.gradient] for port in ports[Kind.PER_STEP]],
            constants=[
                None if port.gradient is None else tensor
                for port, tensor in zip(ports[Kind.CONSTANT], constants, strict=True)
            ],
            to_deferred=[stacked[node] for node in body.to_deferred],
        )

    def _inputs(self, call: LoopCall, states: list[torch.Tensor], start: int, count: int) -> dict[Node, Any]:
        values: dict[Node, Any] = {}
        tensors = {
            Kind.STATE: [state[:count] for state in states],
            Kind.PER_STEP: [
                tensor[_span(port.node, slice(start, start + count))]
                for port, tensor in zip(self.body.ports_of(Kind.PER_STEP), call.per_step, strict=True)
            ],
            Kind.WEIGHT: call.weights,
            Kind.CONSTANT: [
                tensor[_span(port.node, slice(count))]
                for port, tensor in zip(self.body.ports_of(Kind.CONSTANT), call.constants, strict=True)
            ],
        }
        for kind, given in tensors.items():
            values.update((port.node, tensor) for port, tensor in zip(self.body.ports_of(kind), given, strict=True))
        return values


def _span(node: Node, rows: slice) -> slice:
    """The rows of a value that has several for each row of the batch."""
    first = node.shape[0]
    assert isinstance(first, BatchDim)
    return slice((rows.start or 0) * first.factor, rows.stop * first.factor)


def _extend(running: torch.Tensor, all_rows: torch.Tensor) -> torch.Tensor:
    """Rows of sequences still running, with the others as they were."""
    return running if len(running) == len(all_rows) else torch.cat([running, all_rows[len(running) :]])


def _stack(rows: list[torch.Tensor], node: Node, call: LoopCall) -> torch.Tensor:
    if rows:
        return torch.cat(rows)
    like = (call.states or call.per_step)[0]
    return torch.zeros(concrete_shape(node.shape, 0), dtype=node.dtype, device=like.device)
