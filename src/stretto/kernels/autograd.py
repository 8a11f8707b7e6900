"""Loops as one operator of autograd, with weight gradients computed after them.

    forward    inputs of all loops ----> after, outputs, finals            (saved values stay with autograd)
    backward   gradients of those  ----> backward loops ----> gradients of states, per_step, constants
                                              |
                                         to_deferred ----> one product over the rows of all steps: gradients of weights

Shape legend: B sequences, P rows of all steps together.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from stretto.graph import Kind, Node
from stretto.kernels.backends.base import (
    AbstractKernel,
    Cotangents,
    LayerCall,
    LoopCall,
    LoopGradients,
    LoopResult,
)
from stretto.kernels.backends.eager import EagerKernel
from stretto.kernels.backward import differentiate_by_torch, is_transformed, laid_out_like, wants_weights
from stretto.kernels.batched_ops import Earlier, as_node_dtype
from stretto.kernels.layout import Layout


def run_together(calls: Sequence[LayerCall]) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Run programs that do not depend on each other, their loops at once.

    Returns:
        Outputs of all rows and final states, of each program.
    """
    operators = [call.program.operator for call in calls]
    if len({type(operator) for operator in operators}) == 1:
        pairs = zip(operators, calls, strict=True)
        if all(operator is not None and operator.fits(call) for operator, call in pairs):
            return operators[0].run_all(calls)  # type: ignore[union-attr]
    programs = [call.program.coroutine(call.layout, call.x_PF, call.states, call.parameters) for call in calls]
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
        answers = {index: list(islice(results, len(calls))) for index, calls in asking.items()}
    return [_own(calls[index], *finished[index]) for index in range(len(programs))]


def run_by_torch(call: LayerCall) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A program by torch's operators alone, which transforms of `torch.func` can see through."""
    coroutine, answer = call.program.coroutine(call.layout, call.x_PF, call.states, call.parameters), None
    while True:
        try:
            asked = coroutine.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        answer = [EagerKernel.under_autograd(each.kernel.body).forward(each, keep=False) for each in asked]


def _own(call: LayerCall, y_PF: torch.Tensor, finals: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Results in memory of their own: what the operators of a step make may be read backward, or be an input."""
    y = y_PF.reshape(call.shape_of(y_PF.shape[1:])).clone() if call.shown else y_PF
    return y, [state.clone() for state in finals]


def run_loops(calls: Sequence[LoopCall]) -> list[LoopResult]:
    """Run loops that do not depend on each other; results are without saved values."""
    if not torch.is_grad_enabled():
        return [LoopResult(item.after, item.outputs, item.finals) for item in _run_forward(calls, keep=False)]
    tensors = [tensor for call in calls for tensor in call.tensors]
    made = _Loops.apply(calls, torch.is_grad_enabled(), *tensors)  # type: ignore[no-untyped-call]
    return [LoopResult(*parts) for parts in _split(made, [call.kernel.num_results for call in calls])]


def _run_forward(calls: Sequence[LoopCall], *, keep: bool) -> list[LoopResult]:
    return _kernel_class([call.kernel for call in calls]).forward_all(calls, keep=keep)


def _split(flat: Iterable[Any], sizes: Iterable[Sequence[int]]) -> list[list[list[Any]]]:
    """Items that lie in one row, as lists of these sizes for each loop."""
    remaining = iter(flat)
    return [[list(islice(remaining, size)) for size in of_loop] for of_loop in sizes]


def _calls(
    kernels: Sequence[AbstractKernel], layouts: Sequence[Layout], tensors: Sequence[torch.Tensor]
) -> list[LoopCall]:
    parts = _split(tensors, [kernel.num_inputs for kernel in kernels])
    return [LoopCall(kernel, layout, *own) for kernel, layout, own in zip(kernels, layouts, parts, strict=True)]


def _kernel_class(kernels: Sequence[AbstractKernel]) -> type[AbstractKernel]:
    """What runs all of them: their own class, which may run them at once, or the base class, one after another."""
    kinds = {type(kernel) for kernel in kernels}
    return kinds.pop() if len(kinds) == 1 else AbstractKernel


class _Loops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, calls: Sequence[LoopCall], has_grad_mode: bool, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        # Under no_grad parameters say all the same that they need gradients.
        keep = has_grad_mode and any(ctx.needs_input_grad) and not torch.is_inference_mode_enabled()
        # Not the calls: only tensors that autograd saves are checked for changes, moved elsewhere or computed again.
        ctx.kernels, ctx.layouts = [call.kernel for call in calls], [call.layout for call in calls]
        made = _run_forward(calls, keep=keep)
        flat = [tensor for item in made for tensor in (*item.after, *item.outputs, *item.finals)]
        if keep:
            saved = [tensor for item in made for tensor in item.saved]
            copies = [call.states[index].clone() for call in calls for index in call.kernel.copied_states]
            ctx.save_for_backward(*tensors, *copies, *(tensor.data for tensor in flat), *saved)
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        kernels: list[AbstractKernel] = ctx.kernels
        needed = ctx.needs_input_grad[2:]
        # Read once: what autograd stores elsewhere, or computes again, is brought back at each read.
        stored = ctx.saved_tensors
        tensors, rest = stored[: len(needed)], stored[len(needed) :]
        if torch.is_grad_enabled() or any(is_transformed(item) for item in cotangents):

            def run(given: list[torch.Tensor]) -> list[torch.Tensor]:
                made = [
                    EagerKernel.under_autograd(call.kernel.body).forward(call, keep=False)
                    for call in _calls(kernels, ctx.layouts, given)
                ]
                return [tensor for item in made for tensor in (*item.after, *item.outputs, *item.finals)]

            return None, None, *differentiate_by_torch(run, tensors, cotangents, needed)
        calls = _calls(kernels, ctx.layouts, tensors)
        count = sum(len(kernel.copied_states) for kernel in kernels)
        copies, rest = iter(rest[:count]), rest[count:]
        in_loop = [_with_copies(call, copies) for call in calls]
        sizes = [kernel.num_results for kernel in kernels]
        saved = _split(rest[len(cotangents) :], [[len(kernel.body.saved)] for kernel in kernels])
        made = _split(rest[: len(cotangents)], sizes)
        results = [LoopResult(*parts, *own) for parts, own in zip(made, saved, strict=True)]
        arriving = [Cotangents(*parts) for parts in _split(cotangents, sizes)]
        found = _kernel_class(kernels).backward_all(in_loop, results, arriving)
        gradients: list[torch.Tensor | None] = []
        for call, result, gradient, (_, _, asked, _) in zip(
            calls, results, found, _split(needed, [kernel.num_inputs for kernel in kernels]), strict=True
        ):
            weights = [
                None if found is None else laid_out_like(found, weight)
                for found, weight in zip(_deferred(call, result, gradient, asked), call.weights, strict=True)
            ]
            gradients += [*gradient.states, *gradient.per_step, *weights, *gradient.constants]
        return None, None, *gradients


def _with_copies(call: LoopCall, copies: Iterator[torch.Tensor]) -> LoopCall:
    """The loop with the next copies of initial states, where it has some."""
    copied = call.kernel.copied_states
    if not copied:
        return call
    states = [next(copies) if index in copied else state for index, state in enumerate(call.states)]
    return LoopCall(call.kernel, call.layout, states, call.per_step, call.weights, call.constants)


def _deferred(
    call: LoopCall, result: LoopResult, gradients: LoopGradients, asked: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Gradients of what stays the same over all steps: one operation over the rows of all of them."""
    body, layout, deferral = call.kernel.body, call.layout, call.kernel.deferral
    ports = body.ports_of(Kind.WEIGHT)
    wanted = [port.gradient if needs else None for port, needs in zip(ports, asked, strict=True)]
    if not wants_weights() or not any(node is not None for node in wanted):
        return [None] * len(ports)
    values: dict[Node, Any] = dict(zip(body.to_deferred, gradients.to_deferred, strict=True))
    values.update((node, as_node_dtype(tensor, node)) for node, tensor in result.by_node(body).items())
    for kind, given in ((Kind.WEIGHT, call.weights), (Kind.PER_STEP, call.per_step)):
        values.update((port.node, tensor) for port, tensor in zip(body.ports_of(kind), given, strict=True))
    read = deferral.read.union(wanted)
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
