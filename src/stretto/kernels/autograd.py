"""Loops as one operator of autograd, with weight gradients computed after them.

    forward    inputs of all loops ----> after, outputs, finals            (saved values stay with autograd)
    backward   gradients of those  ----> backward loops ----> gradients of states, per_step, constants
                                              |
                                         to_deferred ----> one product over the rows of all steps: gradients of weights

Shape legend: B sequences, P rows of all steps together.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch

from stretto.graph import Kind, Node
from stretto.kernels.backends.base import (
    AbstractKernel,
    Cotangents,
    LoopCall,
    LoopCoroutine,
    LoopGradients,
    LoopResult,
)
from stretto.kernels.backends.eager import EagerKernel
from stretto.kernels.batched_ops import Earlier, as_node_dtype
from stretto.kernels.layout import Layout


@final
class _WeightGradients(threading.local):
    wanted: bool = True


_weight_gradients = _WeightGradients()


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Backward passes inside leave out the gradients of weights: autograd cannot tell a loop that they are unused."""
    before, _weight_gradients.wanted = _weight_gradients.wanted, False
    try:
        yield
    finally:
        _weight_gradients.wanted = before


def run_together(programs: Sequence[LoopCoroutine]) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Run programs that do not depend on each other, their loops at once.

    Returns:
        Outputs of all rows and final states, of each program.
    """
    finished: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    answers: dict[int, list[LoopResult] | None] = dict.fromkeys(range(len(programs)))
    while answers:
        asking: dict[int, list[LoopCall]] = {}
        for index, answer in answers.items():
            try:
                asking[index] = programs[index].send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                finished[index] = end.value
        results = iter(run_loops([call for calls in asking.values() for call in calls]) if asking else [])
        answers = {index: [next(results) for _ in calls] for index, calls in asking.items()}
    return [finished[index] for index in range(len(programs))]


def run_loops(calls: Sequence[LoopCall]) -> list[LoopResult]:
    """Run loops that do not depend on each other; results are without saved values."""
    kernels, layouts = [call.kernel for call in calls], [call.layout for call in calls]
    tensors = [tensor for call in calls for tensor in call.tensors]
    made = _Loops.apply(kernels, layouts, *tensors)  # type: ignore[no-untyped-call]
    return [LoopResult(*parts) for parts in _per_loop(kernels, made)]


def _calls(
    kernels: Sequence[AbstractKernel], layouts: Sequence[Layout], tensors: Sequence[torch.Tensor]
) -> list[LoopCall]:
    """The calls of loops whose inputs lie in one row; each body's ports are in the order of `Kind`."""
    remaining = iter(tensors)
    return [
        LoopCall(kernel, layout, *([next(remaining) for _ in kernel.body.ports_of(kind)] for kind in Kind))
        for kernel, layout in zip(kernels, layouts, strict=True)
    ]


def _per_loop(kernels: Sequence[AbstractKernel], flat: Sequence[Any]) -> list[list[list[Any]]]:
    """States after each step, outputs and final states of each loop, which lie in one row."""
    remaining = iter(flat)
    sizes = [(len(kernel.body.next_states), len(kernel.body.outputs)) for kernel in kernels]
    return [
        [[next(remaining) for _ in range(count)] for count in (states, outputs, states)] for states, outputs in sizes
    ]


def _kernel_class(kernels: Sequence[AbstractKernel]) -> type[AbstractKernel]:
    """What runs all of them: their own class, which may run them at once, or the base class, one after another."""
    kinds = {type(kernel) for kernel in kernels}
    return kinds.pop() if len(kinds) == 1 else AbstractKernel


class _Loops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: list[AbstractKernel], layouts: list[Layout], *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        keep = any(ctx.needs_input_grad)
        made = _kernel_class(kernels).forward_all(_calls(kernels, layouts, tensors), keep=keep)
        flat = [tensor for item in made for tensor in (*item.after, *item.outputs, *item.finals)]
        ctx.kernels, ctx.layouts = kernels, layouts
        if keep:
            ctx.save_for_backward(*tensors, *flat, *(tensor for item in made for tensor in item.saved))
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        kernels: list[AbstractKernel] = ctx.kernels
        layouts: list[Layout] = ctx.layouts
        # Read once: what autograd stores elsewhere, or computes again, is brought back at each read.
        stored = ctx.saved_tensors
        count = sum(len(kernel.body.ports) for kernel in kernels)
        tensors, flat = stored[:count], stored[count : count + len(cotangents)]
        saved = iter(stored[count + len(cotangents) :])
        if torch.is_grad_enabled():
            return None, None, *_differentiable(kernels, layouts, tensors, cotangents, ctx.needs_input_grad[2:])
        calls = _calls(kernels, layouts, tensors)
        results = [
            LoopResult(after, outputs, finals, saved=[next(saved) for _ in kernel.body.saved])
            for kernel, (after, outputs, finals) in zip(kernels, _per_loop(kernels, flat), strict=True)
        ]
        arriving = [Cotangents(*parts) for parts in _per_loop(kernels, cotangents)]
        found = _kernel_class(kernels).backward_all(calls, results, arriving)
        needed = iter(ctx.needs_input_grad[2:])
        gradients: list[torch.Tensor | None] = []
        for call, result, gradient in zip(calls, results, found, strict=True):
            wanted = {kind: [next(needed) for _ in call.kernel.body.ports_of(kind)] for kind in Kind}
            asked = [needs and _weight_gradients.wanted for needs in wanted[Kind.WEIGHT]]
            weights = _deferred(call, result, gradient, asked)
            gradients += [*gradient.states, *gradient.per_step, *weights, *gradient.constants]
        return None, None, *gradients


def _deferred(
    call: LoopCall, result: LoopResult, gradients: LoopGradients, asked: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Gradients of what stays the same over all steps: one operation over the rows of all of them."""
    body, layout, deferral = call.kernel.body, call.layout, call.kernel.deferral
    ports = body.ports_of(Kind.WEIGHT)
    wanted = [port.gradient if needs else None for port, needs in zip(ports, asked, strict=True)]
    if not any(node is not None for node in wanted):
        return [None] * len(ports)
    values: dict[Node, Any] = dict(zip(body.to_deferred, gradients.to_deferred, strict=True))
    for nodes, tensors in (
        (body.next_states, result.after),
        (body.outputs, result.outputs),
        (body.saved, result.saved),
    ):
        values.update((node, as_node_dtype(tensor, node)) for node, tensor in zip(nodes, tensors, strict=True))
    values.update((port.node, tensor) for port, tensor in zip(ports, call.weights, strict=True))
    per_step = body.ports_of(Kind.PER_STEP)
    values.update((port.node, tensor) for port, tensor in zip(per_step, call.per_step, strict=True))
    read = deferral.read | {node for node in wanted if node is not None}
    for port, after, initial in zip(body.ports_of(Kind.STATE), result.after, call.states, strict=True):
        if port.node in read and port.node not in values:
            even = layout.is_even and layout.num_steps > 1
            values[port.node] = Earlier(initial, after) if even else layout.shift(after, initial)
    for port, constant in zip(body.ports_of(Kind.CONSTANT), call.constants, strict=True):
        if port.node in read:
            values[port.node] = layout.spread(constant)
    deferral.run(values, layout.total)
    return [
        None if node is None else values[node].reshape(port.source.shape)
        for node, port in zip(wanted, ports, strict=True)
    ]


def _differentiable(
    kernels: list[AbstractKernel],
    layouts: list[Layout],
    tensors: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    """The gradient as something that can itself be differentiated: the loops once more, under autograd."""
    # Aliases: what leads from one of these tensors to another outside of the loops is not followed here.
    tensors = [tensor.view_as(tensor) for tensor in tensors]
    flat: list[torch.Tensor] = []
    for call in _calls(kernels, layouts, tensors):
        made = EagerKernel(call.kernel.body).forward(call, keep=False)
        flat += [*made.after, *made.outputs, *made.finals]
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
