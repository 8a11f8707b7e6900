"""Loops as one operator of autograd, with weight gradients computed after them.

Shape legend: B sequences, P rows of all steps together.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from stretto.graph import Kind, Node
from stretto.kernels.eager import EagerKernel
from stretto.kernels.folded import Earlier
from stretto.kernels.kernel import AbstractKernel, Cotangents, Gradients, Inputs, Outputs
from stretto.kernels.layout import Layout


@final
class _Asked(threading.local):
    weights: bool = True


_asked = _Asked()


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Backward passes inside leave out the gradients of weights: autograd does not tell a loop that nobody asked."""
    before, _asked.weights = _asked.weights, False
    try:
        yield
    finally:
        _asked.weights = before


@dataclass(slots=True)
class LoopResult:
    """States after each step and emitted values (P, ...), and the final states (B, ...), of one loop."""

    after: list[torch.Tensor]
    emits: list[torch.Tensor]
    finals: list[torch.Tensor]


@dataclass(slots=True)
class LoopRequest:
    """A loop to run, over which batch, from what."""

    kernel: AbstractKernel
    layout: Layout
    inputs: Inputs


def run_loops(requests: Sequence[LoopRequest]) -> list[LoopResult]:
    """Run loops that do not depend on each other."""
    tensors = [
        tensor
        for request in requests
        for part in (request.inputs.states, request.inputs.steps, request.inputs.once, request.inputs.kept)
        for tensor in part
    ]
    kernels, layouts = [request.kernel for request in requests], [request.layout for request in requests]
    made = _Loops.apply(kernels, layouts, *tensors)  # type: ignore[no-untyped-call]
    results: list[LoopResult] = []
    remaining = iter(made)
    for request in requests:
        count, emitted = len(request.kernel.body.next_states), len(request.kernel.body.outputs)
        results.append(
            LoopResult(
                after=[next(remaining) for _ in range(count)],
                emits=[next(remaining) for _ in range(emitted)],
                finals=[next(remaining) for _ in range(count)],
            )
        )
    return results


def truth(tensor: torch.Tensor, node: Node) -> torch.Tensor:
    """A value as the node has it: generated code stores truth values and counts as real numbers."""
    if node.dtype is None or tensor.dtype == node.dtype:
        return tensor
    return tensor != 0 if node.dtype is torch.bool else tensor.to(node.dtype)


def taken_apart(kernels: Sequence[AbstractKernel], tensors: Sequence[torch.Tensor]) -> list[Inputs]:
    """Inputs of each loop from one row of tensors."""
    remaining = iter(tensors)
    found = []
    for kernel in kernels:
        parts = {kind: [next(remaining) for _ in kernel.body.ports_of(kind)] for kind in Kind}
        found.append(Inputs(parts[Kind.STATE], parts[Kind.PER_STEP], parts[Kind.WEIGHT], parts[Kind.CONSTANT]))
    return found


class _Loops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: list[AbstractKernel], layouts: list[Layout], *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        given = taken_apart(kernels, tensors)
        keep = any(ctx.needs_input_grad)
        made = kernels[0].forward_together(kernels, layouts, given, keep=keep)
        flat = [tensor for item in made for tensor in (*item.after, *item.emits, *item.finals)]
        ctx.kernels, ctx.layouts = kernels, layouts
        if keep:
            ctx.save_for_backward(*tensors, *flat, *(tensor for item in made for tensor in item.saved))
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        kernels: list[AbstractKernel] = ctx.kernels
        layouts: list[Layout] = ctx.layouts
        # Taken out once: what is stored elsewhere, or computed again, is brought back once only.
        stored = ctx.saved_tensors
        count = sum(len(kernel.body.ports) for kernel in kernels)
        tensors, flat = stored[:count], stored[count : count + len(cotangents)]
        saved = stored[count + len(cotangents) :]
        if torch.is_grad_enabled():
            return None, None, *_again(kernels, layouts, tensors, cotangents, ctx.needs_input_grad[2:])
        given = taken_apart(kernels, tensors)
        made, arriving = _split(kernels, flat, saved), _split(kernels, cotangents, saved)
        received = [Cotangents([*item.after], [*item.emits], [*item.finals]) for item in arriving]
        found = kernels[0].backward_together(kernels, layouts, given, made, received)
        needed = iter(ctx.needs_input_grad[2:])
        gradients: list[torch.Tensor | None] = []
        for kernel, layout, item, output, gradient in zip(kernels, layouts, given, made, found, strict=True):
            wanted = {kind: [next(needed) for _ in kernel.body.ports_of(kind)] for kind in Kind}
            once = [needs and _asked.weights for needs in wanted[Kind.WEIGHT]]
            weights = deferred(kernel, layout, item, output, found=gradient, wanted=once)
            gradients += [*gradient.states, *gradient.steps, *weights, *gradient.kept]
        return None, None, *gradients


def _split(kernels: list[AbstractKernel], flat: Sequence[Any], saved: Sequence[torch.Tensor]) -> list[Outputs]:
    remaining, stored = iter(flat), iter(saved)
    found = []
    for kernel in kernels:
        count, emitted = len(kernel.body.next_states), len(kernel.body.outputs)
        after = [next(remaining) for _ in range(count)]
        emits = [next(remaining) for _ in range(emitted)]
        found.append(
            Outputs(after, emits, [next(remaining) for _ in range(count)], [next(stored) for _ in kernel.body.saved])
        )
    return found


def deferred(
    kernel: AbstractKernel,
    layout: Layout,
    inputs: Inputs,
    outputs: Outputs,
    *,
    found: Gradients,
    wanted: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Gradients of what stays the same over all steps: one operation over the rows of all of them."""
    body = kernel.body
    ports = body.ports_of(Kind.WEIGHT)
    asked = [port.gradient if needs else None for port, needs in zip(ports, wanted, strict=True)]
    if not any(node is not None for node in asked):
        return [None] * len(ports)
    values: dict[Node, Any] = dict(zip(body.to_deferred, found.handed, strict=True))
    for nodes, tensors in (
        (body.next_states, outputs.after),
        (body.outputs, outputs.emits),
        (body.saved, outputs.saved),
    ):
        values.update((node, truth(tensor, node)) for node, tensor in zip(nodes, tensors, strict=True))
    values.update((port.node, tensor) for port, tensor in zip(ports, inputs.once, strict=True))
    values.update((port.node, tensor) for port, tensor in zip(body.ports_of(Kind.PER_STEP), inputs.steps, strict=True))
    read = kernel.deferral.read | {node for node in asked if node is not None}
    for port, after, initial in zip(body.ports_of(Kind.STATE), outputs.after, inputs.states, strict=True):
        if port.node in read and port.node not in values:
            even = layout.is_even and layout.num_steps > 1
            values[port.node] = Earlier(initial, after) if even else layout.shifted(after, initial)
    for port, kept in zip(body.ports_of(Kind.CONSTANT), inputs.kept, strict=True):
        if port.node in read:
            values[port.node] = layout.spread(kept)
    kernel.deferral.run(values, layout.total)
    return [
        None if node is None else values[node].reshape(port.source.shape)
        for node, port in zip(asked, ports, strict=True)
    ]


def _again(
    kernels: list[AbstractKernel],
    layouts: list[Layout],
    tensors: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    """The gradient as something that can itself be differentiated: the loops once more, under autograd."""
    # Aliases: what leads from one of these tensors to another outside of the loops is not followed here.
    tensors = [tensor.view_as(tensor) for tensor in tensors]
    given = taken_apart(kernels, tensors)
    flat: list[torch.Tensor] = []
    for kernel, layout, item in zip(kernels, layouts, given, strict=True):
        made = EagerKernel(kernel.body).forward(layout, item, keep=False)
        flat += [*made.after, *made.emits, *made.finals]
    linked = [(out, d) for out, d in zip(flat, cotangents, strict=True) if d is not None and out.requires_grad]
    wanted = [tensor for tensor, needs in zip(tensors, needed, strict=True) if needs]
    found = iter(
        torch.autograd.grad(
            [out for out, _ in linked], wanted, [d for _, d in linked], create_graph=True, allow_unused=True
        )
        if linked
        else [None] * len(wanted)
    )
    return [next(found) if needs else None for needs in needed]
