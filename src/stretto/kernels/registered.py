"""Programs as operators that are registered with PyTorch, for those who compile graphs of operators: `torch.compile`.

    stretto::recurrent             inputs -----------------------------> y, final states, kept values
    stretto::recurrent_backward    inputs, kept values, gradients -----> gradients of inputs

A graph holds nothing but tensors and plain values, so an operator gets the names of its programs, with a blank
between two of them. It has no state of its own: what the backward pass needs are further results of the forward pass.
Programs that are not a single operator in eager mode keep nothing, and are run again in the backward pass.

Shape legend: B sequences, T steps, P rows of all steps together, F features.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import Any, Final

import torch

from stretto.errors import StrettoError
from stretto.graph import Node, is_random
from stretto.kernels.autograd import run_together
from stretto.kernels.backends.base import LayerCall, LayerOperator
from stretto.kernels.layout import Layout
from stretto.kernels.program import TracedProgram

_FINDERS: Final[dict[str, Callable[[str], TracedProgram | None]]] = {}

CALLS: Final[Counter[str]] = Counter()
"""Of `stretto::recurrent`, by the names of the programs."""


def register_programs(prefix: str, find: Callable[[str], TracedProgram | None]) -> None:
    """Let `find` say which program a name with this prefix means, at each call; None if it is gone."""
    _FINDERS[prefix] = find


def _find(names: str) -> list[TracedProgram]:
    programs = []
    for name in names.split(" "):
        program = _FINDERS[name.partition(":")[0]](name)
        if program is None:
            raise _changed("is gone, or its cell was changed")
        programs.append(program)
    return programs


def _changed(what: str) -> StrettoError:
    return StrettoError(
        f"a recurrent layer of a compiled graph {what}", fix="Call torch._dynamo.reset(), and compile again."
    )


def _check(programs: Sequence[TracedProgram], inputs: Sequence[torch.Tensor]) -> None:
    """An error unless each input is what its program was made for."""
    num_steps, num_rows = inputs[0].shape[:2]
    for program, tensors in zip(programs, _split(programs, inputs), strict=True):
        graph = program.plan.graph
        wanted: list[tuple[str, Node, tuple[Any, ...]]]
        wanted = [("input", graph.x, (num_steps, num_rows, *graph.x.row_shape))]
        wanted += [("state", node, (num_rows, *node.row_shape)) for node in graph.states]
        wanted += [("parameter", node, node.shape) for node in graph.parameters.values()]
        for (kind, node, shape), tensor in zip(wanted, tensors, strict=True):
            if tuple(tensor.shape) != shape or tensor.dtype != node.dtype:
                raise StrettoError(
                    f"the {kind} of a recurrent layer has the shape {tuple(tensor.shape)} and is of {tensor.dtype}, "
                    f"and {shape} of {node.dtype} is wanted",
                    fix="Give tensors of the layer's own sizes and dtype.",
                )


def repeats(program: TracedProgram) -> bool:
    """Whether a program computes the same again from the same inputs; one that draws random numbers does not."""
    return not any(is_random(node) for node in program.plan.graph.nodes)


def parameter_names(program: TracedProgram) -> list[str]:
    """The parameters of a program in the order in which the operators take them."""
    return list(program.plan.graph.parameters)


def kept_size(program: TracedProgram) -> int:
    """How many elements the operator of a program keeps of 111 sequences of 9 steps; 0 if it has none."""
    return 0 if program.operator is None else sum(math.prod(shape) for shape in program.operator.kept_shapes(999, 111))


@cache
def register_operators() -> None:
    """Make `torch.ops.stretto.recurrent` known. Not done on import, which it would slow down."""
    define = torch.library.custom_op
    forward = define("stretto::recurrent", _forward, mutates_args=(), device_types="cpu")
    forward.register_fake(_forward_fake)
    forward.register_autograd(_differentiate, setup_context=_save)
    backward = define("stretto::recurrent_backward", _backward, mutates_args=(), device_types="cpu")
    backward.register_fake(_backward_fake)


def _split(programs: Sequence[TracedProgram], inputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The inputs of each program: x (T, B, F), initial states (B, ...), parameters."""
    remaining = iter(inputs)
    graphs = [program.plan.graph for program in programs]
    parts = [list(islice(remaining, 1 + len(graph.states) + len(graph.parameters))) for graph in graphs]
    if len(inputs) != sum(1 + len(graph.states) + len(graph.parameters) for graph in graphs):
        raise _changed("has other parameters than it had")
    return parts


def _operators(programs: Sequence[TracedProgram]) -> list[LayerOperator]:
    """Those that run the programs and say what they keep; none unless there is one for each."""
    found = [program.operator for program in programs if program.operator is not None]
    return found if len(found) == len(programs) and len({type(each) for each in found}) == 1 else []


def _rows(programs: Sequence[TracedProgram], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs with x as rows, all laid out as every program can read them."""
    made = []
    for x_TBF, *rest in _split(programs, inputs):
        made += [x_TBF.reshape(-1, *x_TBF.shape[2:]).contiguous(), *(tensor.contiguous() for tensor in rest)]
    return made


def _run(programs: Sequence[TracedProgram], layout: Layout, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    calls = []
    for program, (x_PF, *rest) in zip(programs, _split(programs, rows), strict=True):
        count = len(program.plan.graph.states)
        parameters = dict(zip(parameter_names(program), rest[count:], strict=True))
        calls.append(LayerCall(program, layout, x_PF, rest[:count], parameters))
    return [tensor for y, finals in run_together(calls) for tensor in (y, *finals)]


def _forward(inputs: list[torch.Tensor], programs: str, keep: bool) -> list[torch.Tensor]:
    found = _find(programs)
    _check(found, inputs)
    CALLS[programs] += 1
    layout = Layout.even(num_steps=inputs[0].shape[0], num_rows=inputs[0].shape[1])
    rows, operators = _rows(found, inputs), _operators(found)
    if operators:
        results, kept = operators[0].run_forward(operators, layout, rows, keep=keep)
        return [*results, *(kept if keep else [])]
    with torch.no_grad():
        return _distinct(_run(found, layout, rows), inputs)


def _distinct(made: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results that are contiguous and share memory neither with each other nor with what was given."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in given}
    results = []
    for tensor in made:
        own = tensor.contiguous()
        own = own.clone() if own.untyped_storage().data_ptr() in seen else own
        seen.add(own.untyped_storage().data_ptr())
        results.append(own)
    return results


def _forward_fake(inputs: list[torch.Tensor], programs: str, keep: bool) -> list[torch.Tensor]:
    found = _find(programs)
    _check(found, inputs)
    num_steps, num_rows = inputs[0].shape[:2]
    total = num_steps * num_rows
    made = []
    for program in found:
        graph = program.plan.graph
        made.append(inputs[0].new_empty(total, *graph.y.row_shape, dtype=graph.y.dtype))
        made += [inputs[0].new_empty(num_rows, *state.row_shape, dtype=state.dtype) for state in graph.states]
    if keep:
        shapes = [shape for operator in _operators(found) for shape in operator.kept_shapes(total, num_rows)]
        made += [inputs[0].new_empty(shape) for shape in shapes]
    return made


def _backward(
    inputs: list[torch.Tensor],
    kept: list[torch.Tensor],
    cotangents: list[torch.Tensor | None],
    programs: str,
    needed: list[bool],
) -> list[torch.Tensor]:
    found = _find(programs)
    _check(found, inputs)
    layout = Layout.even(num_steps=inputs[0].shape[0], num_rows=inputs[0].shape[1])
    rows, operators = _rows(found, inputs), _operators(found)
    if operators:
        gradients = operators[0].run_backward(operators, layout, rows, kept, cotangents, needed=needed)
    else:
        gradients = _run_again(found, layout, rows, cotangents, needed)
    pairs = zip(inputs, gradients, needed, strict=True)
    return _distinct([_shaped(d, tensor) for tensor, d, needs in pairs if needs], inputs)


def _shaped(gradient: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if gradient is None else gradient.reshape(tensor.shape)


def _run_again(
    programs: Sequence[TracedProgram],
    layout: Layout,
    rows: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    # The dispatcher has left autograd behind when it comes to the code of an operator.
    excluded = torch._C._dispatch_tls_local_exclude_set() & torch._C._after_autograd_keyset
    included = torch._C._dispatch_tls_local_include_set()
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(included, excluded):
        leaves = [tensor.detach().requires_grad_(needs) for tensor, needs in zip(rows, needed, strict=True)]
        made = _run(programs, layout, leaves)
        linked = [(out, d) for out, d in zip(made, cotangents, strict=True) if d is not None and out.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        outs, ds = [out for out, _ in linked], [d for _, d in linked]
        found = iter(torch.autograd.grad(outs, wanted, ds, allow_unused=True) if linked else [None] * len(wanted))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _backward_fake(
    inputs: list[torch.Tensor],
    kept: list[torch.Tensor],  # noqa: ARG001
    cotangents: list[torch.Tensor | None],  # noqa: ARG001
    programs: str,  # noqa: ARG001
    needed: list[bool],
) -> list[torch.Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor, needs in zip(inputs, needed, strict=True) if needs]


def _num_results(programs: str) -> list[int]:
    """Of each program: y and final states."""
    return [1 + len(program.plan.graph.states) for program in _find(programs)]


def _save(ctx: Any, inputs: tuple[list[torch.Tensor], str, bool], output: list[torch.Tensor]) -> None:
    tensors, ctx.programs, _ = inputs
    ctx.set_materialize_grads(False)
    counts = _num_results(ctx.programs)
    ctx.num_inputs, ctx.num_results = len(tensors), sum(counts)
    ctx.save_for_backward(*tensors, *output[ctx.num_results :])


def _differentiate(ctx: Any, cotangents: list[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], None, None]:
    inputs, kept = list(ctx.saved_tensors[: ctx.num_inputs]), list(ctx.saved_tensors[ctx.num_inputs :])
    needed = list(ctx.needs_input_grad[0])
    arriving = [None if d is None else d.contiguous() for d in cotangents[: ctx.num_results]]
    found = iter(torch.ops.stretto.recurrent_backward(inputs, kept, arriving, ctx.programs, needed))
    return [next(found) if needs else None for needs in needed], None, None
