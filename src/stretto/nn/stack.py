"""Layers of recurrent programs, one on the other and in both directions.

Shape legend: B sequences, P real steps of all sequences, F features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import final

import torch
from torch.nn import functional

from stretto.kernels import Layout, Program, SaveChoice, run_together, wavefront_chunks
from stretto.nn.recompute import recomputed, stretches
from stretto.solvers import AbstractSolver, CellVariants, Problem, Solution


@final
@dataclass(slots=True)
class Direction:
    """One program of a layer with its parameters and initial states (B, ...); `variants` are for solvers."""

    program: Program
    parameters: Mapping[str, torch.Tensor]
    states: Sequence[torch.Tensor]
    variants: CellVariants | None = None


@final
@dataclass(frozen=True, slots=True)
class SolverCall:
    """The solver of a call, and the ids of the sequences, sorted as in the layout."""

    solver: AbstractSolver
    sample_ids: tuple[int, ...] | None = None


@final
@dataclass(slots=True)
class StackResult:
    """Outputs of the last layer (P, ...), and the final states of each layer and direction (B, ...).

    With a solver, `solutions` has how they were found, for each layer and direction.
    """

    y_PF: torch.Tensor
    states: list[list[torch.Tensor]]
    solutions: list[Solution] = field(default_factory=list)


def run_stack(
    layers: Sequence[Sequence[Direction]],
    layout: Layout,
    x_PF: torch.Tensor,
    *,
    dropout: float = 0.0,
    save: SaveChoice = "auto",
    call: SolverCall | None = None,
) -> StackResult:
    """Run layers of one direction, or of two of which the second reads backwards.

    Few rows do not keep all threads busy: then the two directions run at once, and layers of one direction as a wave,
    in which a layer works on one stretch of time while the layer above works on the one before.

    With `save` "states", stretches of time are computed again in the backward pass from the state at their start. With
    a `call`, its solver runs one layer and direction after the other.
    """
    one_way = all(len(layer) == 1 for layer in layers) and save == "auto" and call is None
    chunks = wavefront_chunks([layer[0].program for layer in layers], layout) if one_way else 1
    if chunks > 1:
        return _wave([layer[0] for layer in layers], layout, x_PF, dropout=dropout, count=chunks)
    finals: list[list[torch.Tensor]] = []
    solutions: list[Solution] = []
    for number, layer in enumerate(layers):
        if number and dropout:
            x_PF = functional.dropout(x_PF, dropout)
        inputs = [reversed_rows(layout, x_PF) if reverse else x_PF for reverse in range(len(layer))]
        if call is not None:
            solved = [
                call.solver.solve(_problem(direction, layout, rows_PF, call, number=number, reverse=reverse))
                for reverse, (direction, rows_PF) in enumerate(zip(layer, inputs, strict=True))
            ]
            results = [(item.y_PF, item.states) for item in solved]
            solutions += [item.solution for item in solved]
        elif save == "states" and torch.is_grad_enabled():
            results = _in_stretches(layer, layout, inputs)
        else:
            walks = [
                direction.program.coroutine(layout, rows_PF, direction.states, direction.parameters)
                for direction, rows_PF in zip(layer, inputs, strict=True)
            ]
            results = run_together(walks)
        finals += [states for _, states in results]
        outputs = [reversed_rows(layout, y) if reverse else y for reverse, (y, _) in enumerate(results)]
        if len(outputs) > 1:
            outputs = [y if y.dim() > 1 else y[:, None] for y in outputs]
        x_PF = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    return StackResult(x_PF, finals, solutions)


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


def _in_stretches(
    layer: Sequence[Direction], layout: Layout, inputs: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    bounds = stretches(layout.num_steps, layout.num_rows)
    states = [list(direction.states) for direction in layer]
    outputs: list[list[torch.Tensor]] = [[] for _ in layer]
    parameters = [tensor for direction in layer for tensor in direction.parameters.values()]
    for first, last in pairwise(bounds):
        chunk = layout.chunk(first, last)
        rows = slice(int(layout.starts_T[first]), int(layout.starts_T[last]))

        def run(
            tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], chunk: Layout = chunk
        ) -> list[torch.Tensor]:
            remaining, named = iter(tensors), iter(weights)
            walks = []
            for direction in layer:
                x_PF = next(remaining)
                before = [next(remaining) for _ in direction.states]
                own = {name: next(named) for name in direction.parameters}
                walks.append(direction.program.coroutine(chunk, x_PF, before, own))
            return [tensor for y, after in run_together(walks) for tensor in (y, *after)]

        given = [tensor for x_PF, before in zip(inputs, states, strict=True) for tensor in (x_PF[rows], *before)]
        made = iter(recomputed(run, given, parameters))
        for index, before in enumerate(states):
            outputs[index].append(next(made))
            states[index] = [next(made) for _ in before]
    return [(torch.cat(parts), after) for parts, after in zip(outputs, states, strict=True)]


def reversed_rows(layout: Layout, x_PF: torch.Tensor) -> torch.Tensor:
    """Each sequence back to front."""
    if layout.is_even:
        steps = x_PF.reshape(layout.num_steps, layout.num_rows, *x_PF.shape[1:])
        return steps.flip(0).reshape(x_PF.shape)
    return x_PF.index_select(0, layout.on_device(layout.reversed_P, x_PF.device))


def _wave(stack: Sequence[Direction], layout: Layout, x_PF: torch.Tensor, *, dropout: float, count: int) -> StackResult:
    bounds = [layout.num_steps * index // count for index in range(count + 1)]
    chunks = [layout.chunk(first, last) for first, last in pairwise(bounds)]
    rows = [int(layout.starts_T[bound]) for bound in bounds]
    inputs = [x_PF[first:last] for first, last in pairwise(rows)]
    states = [list(direction.states) for direction in stack]
    for wave in range(count + len(stack) - 1):
        working = [(layer, wave - layer) for layer in range(len(stack)) if 0 <= wave - layer < count]
        walks = []
        for layer, index in working:
            below = functional.dropout(inputs[index], dropout) if layer and dropout else inputs[index]
            walks.append(stack[layer].program.coroutine(chunks[index], below, states[layer], stack[layer].parameters))
        for (layer, index), (y, after) in zip(working, run_together(walks), strict=True):
            inputs[index] = y
            states[layer] = after
    return StackResult(torch.cat(inputs), states)
