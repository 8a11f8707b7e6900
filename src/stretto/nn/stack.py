"""Layers of recurrent programs, one on the other and in both directions.

Shape legend: B sequences, P real steps of all sequences, F features.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, final

import torch
from torch.nn import functional

from stretto.kernels import (
    LayerCall,
    Layout,
    Program,
    SaveChoice,
    Shown,
    differentiate_by_torch,
    is_transformed,
    run_by_torch,
    run_together,
    wavefront_chunks,
)
from stretto.solvers import AbstractSolver, CellVariants, Problem, Solution

MIN_STRETCH_STEPS = 32
MIN_STRETCH_ROWS = 1024


@final
@dataclass(slots=True)
class Direction:
    """One program of a layer with its parameters and initial states (B, ...); `variants` are for solvers."""

    program: Program
    parameters: Mapping[str, torch.Tensor]
    states: Sequence[torch.Tensor]
    variants: CellVariants | None = None

    def tensors(self) -> list[torch.Tensor]:
        """States and parameters, for autograd functions, which take them flat."""
        return [*self.states, *self.parameters.values()]

    def with_tensors(self, tensors: Iterator[torch.Tensor]) -> "Direction":
        """The same with other states and parameters, the next ones of `tensors`."""
        states = [next(tensors) for _ in self.states]
        return replace(self, states=states, parameters={name: next(tensors) for name in self.parameters})


@final
@dataclass(frozen=True, slots=True)
class SolverCall:
    """The solver of a call, and the ids of the sequences, sorted as in the layout."""

    solver: AbstractSolver
    sample_ids: tuple[int, ...] | None = None


@final
@dataclass(slots=True)
class StackResult:
    """Outputs of the last layer (P, ...), or as they are shown, and final states of each layer and direction (B, ...).

    With a solver, `solutions` has how they were found, for each layer and direction.
    """

    y_PF: torch.Tensor
    states: list[list[torch.Tensor]]
    solutions: list[Solution] = field(default_factory=list)


def assemble(
    direction: Callable[[int, tuple[int, ...]], Direction],
    *,
    output_shape: Callable[[int, tuple[int, ...]], tuple[int, ...]],
    features: tuple[int, ...],
    num_layers: int,
    num_directions: int,
) -> list[list[Direction]]:
    """Layers of one or two directions, each layer fed with the outputs of the one below, directions side by side.

    Args:
        direction: Makes one direction of a layer from its index, in the order of torch's states (layer 0 forward,
            layer 0 backward, layer 1 forward, ...), and the shape of one step of its input.
        output_shape: The shape of one step of its output; not asked of the last layer.
        features: The shape of one step of the input.
        num_layers: Layers.
        num_directions: 1 or 2.
    """
    layers = []
    for number in range(num_layers):
        indices = range(number * num_directions, (number + 1) * num_directions)
        layers.append([direction(index, features) for index in indices])
        if number + 1 < num_layers:
            shapes = [output_shape(index, features) for index in indices]
            if len(shapes) > 1:
                shapes = [shape or (1,) for shape in shapes]  # side by side, as `run_stack` lays them
            features = (*shapes[0][:-1], *([sum(shape[-1] for shape in shapes)] if shapes[0] else []))
    return layers


def run_stack(
    layers: Sequence[Sequence[Direction]],
    layout: Layout,
    x_PF: torch.Tensor,
    *,
    dropout: float = 0.0,
    save: SaveChoice = "auto",
    call: SolverCall | None = None,
    shown: Shown = "",
) -> StackResult:
    """Run layers of one direction, or of two of which the second reads backwards.

    Few rows do not keep all threads busy: then the two directions run at once, and layers of one direction as a wave,
    in which a layer works on one stretch of time while the layer above works on the one before.

    With `save` "states", stretches of time are computed again in the backward pass from the state at their start. With
    a `call`, its solver runs one layer and direction after the other. `shown` is as in `LayerCall`.
    """
    one_way = all(len(layer) == 1 for layer in layers) and save == "auto" and call is None
    chunks = wavefront_chunks([layer[0].program for layer in layers], layout) if one_way else 1
    if chunks > 1:
        return _run_wave([layer[0] for layer in layers], layout, x_PF, dropout=dropout, count=chunks, shown=shown)
    finals: list[list[torch.Tensor]] = []
    solutions: list[Solution] = []
    is_own = False
    for number, layer in enumerate(layers):
        if number and dropout:
            x_PF = functional.dropout(x_PF, dropout)
        inputs = [reverse_rows(layout, x_PF) if reverse else x_PF for reverse in range(len(layer))]
        if call is not None:
            solved = [
                call.solver.solve(_problem(direction, layout, rows_PF, call, number=number, reverse=reverse))
                for reverse, (direction, rows_PF) in enumerate(zip(layer, inputs, strict=True))
            ]
            results = [(item.y_PF, item.states) for item in solved]
            solutions += [item.solution for item in solved]
        elif save == "states" and torch.is_grad_enabled():
            results = _run_in_stretches(layer, layout, inputs)
        else:
            # Two directions are put into memory of their own, side by side.
            own = shown if number + 1 == len(layers) and len(layer) == 1 else ""
            is_own = own != ""
            results = _run_at_once(((each, layout, rows_PF) for each, rows_PF in zip(layer, inputs, strict=True)), own)
        finals += [states for _, states in results]
        outputs = [reverse_rows(layout, y) if reverse else y for reverse, (y, _) in enumerate(results)]
        if len(outputs) > 1:
            outputs = [y if y.dim() > 1 else y[:, None] for y in outputs]
        if number + 1 == len(layers) and shown and not is_own:
            outputs = [_as_shown(layout, y, shown) for y in outputs]
            x_PF = outputs[0].clone() if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        else:
            x_PF = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    return StackResult(x_PF, finals, solutions)


def _as_shown(layout: Layout, y_PF: torch.Tensor, shown: Shown) -> torch.Tensor:
    return y_PF.reshape(layout.num_steps, -1, *y_PF.shape[1:]) if shown == "steps" else y_PF


def _run_at_once(
    calls: Iterable[tuple[Direction, Layout, torch.Tensor]], shown: Shown = "", *, by_torch: bool = False
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    made = [LayerCall(each.program, layout, x, each.states, each.parameters, shown) for each, layout, x in calls]
    return [run_by_torch(call) for call in made] if by_torch else run_together(made)


def _problem(
    direction: Direction, layout: Layout, x_PF: torch.Tensor, call: SolverCall, *, number: int, reverse: int
) -> Problem:
    assert direction.variants is not None
    return Problem(
        program=direction.program,
        variants=direction.variants,
        layout=layout,
        x_PF=x_PF,
        states=direction.states,
        parameters=direction.parameters,
        sample_ids=call.sample_ids,
        name=f"{number}.{reverse}",
        reverse=bool(reverse),
    )


def _run_in_stretches(
    layer: Sequence[Direction], layout: Layout, inputs: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    def run(chunk: Layout, tensors: Sequence[torch.Tensor], *, by_torch: bool = False) -> list[torch.Tensor]:
        remaining = iter(tensors)
        given = [(next(remaining), direction.with_tensors(remaining)) for direction in layer]
        results = _run_at_once(((direction, chunk, x_PF) for x_PF, direction in given), by_torch=by_torch)
        return [tensor for y, after in results for tensor in (y, *after)]

    current, outputs = list(layer), []
    for first, last in pairwise(_stretches(layout.num_steps, layout.num_rows)):
        rows = slice(int(layout.starts_T[first]), int(layout.starts_T[last]))
        tensors = [t for x_PF, each in zip(inputs, current, strict=True) for t in (x_PF[rows], *each.tensors())]
        made = iter(_Recompute.apply(partial(run, layout.chunk(first, last)), *tensors))  # type: ignore[no-untyped-call]
        for index, each in enumerate(current):
            outputs.append(next(made))
            current[index] = replace(each, states=[next(made) for _ in each.states])
    return [(torch.cat(outputs[index :: len(layer)]), list(each.states)) for index, each in enumerate(current)]


def reverse_rows(layout: Layout, x_PF: torch.Tensor) -> torch.Tensor:
    """Each sequence back to front."""
    if layout.is_even:
        steps = x_PF.reshape(layout.num_steps, layout.num_rows, *x_PF.shape[1:])
        return steps.flip(0).reshape(x_PF.shape)
    return x_PF.index_select(0, layout.on_device("reversed_P", x_PF.device))


def _run_wave(
    stack: Sequence[Direction], layout: Layout, x_PF: torch.Tensor, *, dropout: float, count: int, shown: Shown
) -> StackResult:
    bounds = [layout.num_steps * index // count for index in range(count + 1)]
    chunks = [layout.chunk(first, last) for first, last in pairwise(bounds)]
    rows = [int(layout.starts_T[bound]) for bound in bounds]
    inputs = [x_PF[first:last] for first, last in pairwise(rows)]
    stack = list(stack)
    for wave in range(count + len(stack) - 1):
        working = [(layer, wave - layer) for layer in range(len(stack)) if 0 <= wave - layer < count]
        calls = []
        for layer, index in working:
            below = functional.dropout(inputs[index], dropout) if layer and dropout else inputs[index]
            calls.append((stack[layer], chunks[index], below))
        for (layer, index), (y, after) in zip(working, _run_at_once(calls), strict=True):
            inputs[index] = y
            stack[layer] = replace(stack[layer], states=after)
    inputs = [_as_shown(chunk, y, shown) for chunk, y in zip(chunks, inputs, strict=True)]
    return StackResult(torch.cat(inputs), [list(direction.states) for direction in stack])


def _stretches(num_steps: int, num_rows: int) -> list[int]:
    """Where to cut time: about as many stretches as steps in each, but none too short to be worth a call."""
    shortest = max(MIN_STRETCH_STEPS, MIN_STRETCH_ROWS // max(num_rows, 1), math.isqrt(num_steps))
    count = max(1, num_steps // shortest)
    return [num_steps * index // count for index in range(count + 1)]


class _Recompute(torch.autograd.Function):
    """The result of `run`, which is run again in the backward pass instead of storing what it computes.

    `torch.utils.checkpoint` stores it while it runs forward, which takes longer, or it has no second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[..., list[torch.Tensor]], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        ctx.rng_state = torch.get_rng_state()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        tensors: Sequence[torch.Tensor] = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        if any(is_transformed(d) for d in cotangents):

            def again(given: list[torch.Tensor]) -> list[torch.Tensor]:
                with torch.random.fork_rng(devices=[]):
                    torch.set_rng_state(ctx.rng_state)
                    return ctx.run(given, by_torch=True)  # type: ignore[no-any-return]

            return None, *differentiate_by_torch(again, tensors, cotangents, needed)
        is_double = torch.is_grad_enabled()
        if is_double:
            # Aliases: what leads from one of these tensors to another outside is not followed here.
            tensors = [tensor.view_as(tensor) for tensor in tensors]
        else:
            tensors = [t.detach().requires_grad_(needs) for t, needs in zip(tensors, needed, strict=True)]
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.rng_state)
            made = ctx.run(tensors)
        linked = [(t, d) for t, d in zip(made, cotangents, strict=True) if d is not None and t.requires_grad]
        wanted = [tensor for tensor, needs in zip(tensors, needed, strict=True) if needs]
        found = iter(
            torch.autograd.grad(
                [t for t, _ in linked], wanted, [d for _, d in linked], create_graph=is_double, allow_unused=True
            )
            if linked and wanted
            else [None] * len(wanted)
        )
        return None, *(next(found) if needs else None for needs in needed)
