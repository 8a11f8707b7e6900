"""Gradients through chunks of time: one bridge to autograd, and reverse sweeps.

Forward, all chunks run at once. Each maps the state before it to the state after it, and where a solver has converged
the end of one chunk is the start of the next:

      h_0                 start_1               start_2
       |                     |                     |
    [chunk 0] -> end_0    [chunk 1] -> end_1    [chunk 2] -> end_2 = h_T
                 end_0 = start_1       end_1 = start_2

The gradient never goes through the iterations that found the starts. It solves the adjoint recurrence, which is linear
and runs in reverse: with J_c the Jacobian of chunk c and g the gradients that come from the loss,

    d_start_c = J_c' d_end_c + g_c,          d_end_c = d_start_{c+1} + g_end_c.

The unknowns are the gradients that arrive at the end of each chunk from the chunk after it, `arriving`. A reverse
sweep pulls them back through all chunks at once, by autograd, and passes what comes out at each start to the chunk
before. After k sweeps the last k chunks of each sequence are exact. `ReverseSweeps` repeats that until nothing changes;
multigrid's `ReverseCycles` solves the same recurrence with coarse grids.

Shape legend: B sequences, C chunks of all sequences, P real steps of all sequences, F features.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias, final

import torch

from stretto.kernels import differentiate, differentiate_by_torch, is_transformed, without_weights
from stretto.solvers.base import Problem, Solution, residual_norm
from stretto.solvers.chunks import Chunks

MaybeTensor: TypeAlias = torch.Tensor | None


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class AdjointStats:
    """How the gradient was found."""

    iterations: float = 0
    """Sweeps or cycles; a part of a sweep counts as such."""
    residual: float = 0.0
    """The change that is left, relative to the largest gradient."""
    failure: str = ""
    """Why it has to be found sequentially instead; empty if it was found."""
    arriving: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """The gradients that arrive at the end of each chunk (C, ...)."""


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class ChunkGraph:
    """The autograd graph of a run over chunks, and the gradients that come from outside.

    All tensors are in the order of the chunks. The outputs are in two parts where the first steps of each chunk can be
    differentiated alone.
    """

    chunks: Chunks
    x_PF: torch.Tensor
    starts: list[torch.Tensor]
    parameters: list[torch.Tensor]
    outputs: list[torch.Tensor]
    ends: list[torch.Tensor]
    d_outputs: Sequence[MaybeTensor] = ()
    d_ends: Sequence[torch.Tensor] = ()

    def sweep(self, arriving: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One reverse sweep: what arrives at the ends of chunks next, without gradients of weights."""
        with without_weights():
            return self.hand_back(differentiate(self._pairs(arriving), self.starts))

    def pull_back(self, arriving: Sequence[torch.Tensor]) -> tuple[list[MaybeTensor], list[MaybeTensor]]:
        """The gradients of the input and the parameters, None where not needed, and of the states before each chunk."""
        leaves = [self.x_PF, *self.parameters]
        found = differentiate(self._pairs(arriving), [*leaves, *self.starts])
        return found[: len(leaves)], found[len(leaves) :]

    def _pairs(self, arriving: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, MaybeTensor]]:
        """All that was computed, beside the gradients that arrive there."""
        d_ends = [own + more for own, more in zip(self.d_ends, arriving, strict=True)]
        return list(zip([*self.outputs, *self.ends], [*self.d_outputs, *d_ends], strict=True))

    def pull_back_first_steps(self) -> list[MaybeTensor]:
        """The gradients of the states before each chunk that come from the outputs of its first steps alone."""
        with without_weights():
            return differentiate([(self.outputs[0], self.d_outputs[0])], self.starts)

    def hand_back(self, d_starts: Sequence[MaybeTensor]) -> list[torch.Tensor]:
        """What leaves the start of each chunk arrives at the end of the chunk before."""
        later, arriving = self.chunks.later_D, []
        previous = self.chunks.previous_C[later]
        for end, d_start in zip(self.ends, d_starts, strict=True):
            d_end = torch.zeros_like(end)
            if d_start is not None:
                d_end.index_copy_(0, previous.to(end.device), d_start.index_select(0, later.to(end.device)))
            arriving.append(d_end)
        return arriving


class AbstractAdjoint(ABC):
    """Solves the adjoint recurrence of a run over chunks."""

    lead_steps: int = 0
    """Steps at the start of each chunk that can be differentiated alone."""

    @abstractmethod
    def solve(self, graph: ChunkGraph) -> tuple[list[MaybeTensor], list[MaybeTensor], AdjointStats]:
        """The gradients of the input and the parameters, of the states before each chunk, and how they were found.

        With a `failure`, the gradients are ignored.
        """


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReverseSweeps(AbstractAdjoint):
    """The adjoint by sweeps in reverse."""

    tolerance: float
    """The change that is small enough, relative to the largest gradient."""
    max_sweeps: int
    """As many as a sequence has chunks are always enough."""
    lead_steps: int = 0
    """Make a first guess from so many steps at the start of each chunk."""
    arriving: Sequence[torch.Tensor] | None = None
    """A first guess from elsewhere (C, ...)."""

    def solve(self, graph: ChunkGraph) -> tuple[list[MaybeTensor], list[MaybeTensor], AdjointStats]:
        """Sweep until nothing changes.

        Only the last sweep computes gradients of weights. It is also the check: with a good first guess it is the only
        one, and further sweeps follow only where it disagrees.
        """
        stats = AdjointStats()
        arriving = self._first_guess(graph, stats)
        is_last = not len(graph.chunks.later_D) or self.max_sweeps <= 1
        if not is_last and not self.lead_steps and self.arriving is None:
            is_last, arriving = True, self._converge(graph, arriving, stats)
        while True:
            d_leaves, d_starts = graph.pull_back(arriving)
            fresh = graph.hand_back(d_starts)
            stats.iterations += 1
            stats.residual = residual_norm(fresh, arriving, kind="gradient")
            if is_last or stats.residual <= self.tolerance or stats.iterations >= self.max_sweeps:
                break
            is_last, arriving = True, self._converge(graph, fresh, stats)
        stats.arriving = fresh
        return d_leaves, d_starts, stats

    def _first_guess(self, graph: ChunkGraph, stats: AdjointStats) -> list[torch.Tensor]:
        if self.arriving is not None:
            return [part.to(end) for part, end in zip(self.arriving, graph.ends, strict=True)]
        if len(graph.outputs) == 1 or not len(graph.chunks.later_D) or graph.d_outputs[0] is None:
            return [torch.zeros_like(end) for end in graph.ends]
        stats.iterations += self.lead_steps / graph.chunks.length
        return graph.hand_back(graph.pull_back_first_steps())

    def _converge(self, graph: ChunkGraph, arriving: list[torch.Tensor], stats: AdjointStats) -> list[torch.Tensor]:
        """Sweep until nothing changes, or all sweeps but one are made.

        A gradient that is NaN spreads to all chunks before, as it would in a sequential backward pass.
        """
        while stats.iterations + 1 < self.max_sweeps:
            fresh = graph.sweep(arriving)
            stats.iterations += 1
            change = residual_norm(fresh, arriving, kind="gradient")
            arriving = fresh
            if change <= self.tolerance:
                break
        return arriving


def differentiable_chunks(
    problem: Problem,
    chunks: Chunks,
    boundaries: Sequence[torch.Tensor],
    *,
    adjoint: AbstractAdjoint,
    solution: Solution,
    on_backward: Callable[[AdjointStats], None] | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Run all chunks at once from given boundary states, with gradients by an adjoint solver.

    The gradient can itself be differentiated: a backward pass with `create_graph` runs sequentially under autograd.

    Args:
        problem: What to run.
        chunks: How it is cut.
        boundaries: States before each chunk (C, ...); those before first chunks do not count.
        adjoint: Finds the gradient.
        solution: Gets the statistics of each backward pass.
        on_backward: Called with them.

    Returns:
        Outputs (P, ...), final states (B, ...), and the states after each chunk (C, ...), which have no gradient.
    """

    def report(stats: AdjointStats) -> None:
        solution.backward_iterations, solution.backward_residual = math.ceil(stats.iterations), stats.residual
        if on_backward is not None:
            on_backward(stats)

    own = problem.as_leaves()
    needs_grad = any(tensor.requires_grad for tensor in own.inputs)
    x_PF = chunks.to_chunks(problem.x_PF.detach()).requires_grad_(own.x_PF.requires_grad)
    starts = chunks.starts(*([part.detach() for part in parts] for parts in (problem.states, boundaries)))
    for start in starts:
        start.requires_grad_(start.is_floating_point() and needs_grad)
    with torch.set_grad_enabled(needs_grad):
        outputs, ends = _run_chunks(own, chunks, x_PF, starts, lead_steps=adjoint.lead_steps)
    parameters = list(own.parameters.values())
    graph = ChunkGraph(chunks=chunks, x_PF=x_PF, starts=starts, parameters=parameters, outputs=outputs, ends=ends)
    y_PF, *states = _Bridge.apply(problem, graph, adjoint, report, *problem.inputs)  # type: ignore[no-untyped-call]
    return y_PF, states, [end.detach() for end in ends]


class _Bridge(torch.autograd.Function):
    """What a graph over chunks has computed, with the gradient that an adjoint solver finds in it."""

    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        graph: ChunkGraph,
        adjoint: AbstractAdjoint,
        report: Callable[[AdjointStats], None],
        *given: torch.Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.problem, ctx.graph, ctx.adjoint, ctx.report = problem, graph, adjoint, report
        y_PF = graph.outputs[0] if len(graph.outputs) == 1 else torch.cat(graph.outputs)
        finals = graph.chunks.final_states(given[1 : 1 + len(graph.ends)], [end.detach() for end in graph.ends])
        return (graph.chunks.to_sequences(y_PF.detach()), *finals)

    @staticmethod
    def backward(ctx: Any, d_y_PF: MaybeTensor, *d_finals: MaybeTensor) -> Any:
        problem: Problem = ctx.problem
        chunks: Chunks = ctx.graph.chunks
        _, _, _, _, *needs = ctx.needs_input_grad
        if torch.is_grad_enabled() or any(is_transformed(d) for d in (d_y_PF, *d_finals)):
            return None, None, None, None, *_sequential_gradients(problem, [d_y_PF, *d_finals], needs)
        graph: ChunkGraph = dataclasses.replace(ctx.graph, d_ends=_d_ends(chunks, ctx.graph.ends, d_finals))
        graph.d_outputs = [None] * len(graph.outputs)
        if d_y_PF is not None:
            graph.d_outputs = torch.split(chunks.to_chunks(d_y_PF), [len(part) for part in graph.outputs])
        d_leaves, d_starts, stats = ctx.adjoint.solve(graph)
        if stats.failure:
            found = _sequential_gradients(problem, [d_y_PF, *d_finals], needs)
        else:
            d_x_PF, *d_parameters = d_leaves
            d_x_PF = None if d_x_PF is None else chunks.to_sequences(d_x_PF)
            d_states = [
                _d_initial(chunks, d_start, d_final, end)
                for d_start, d_final, end in zip(d_starts, d_finals, graph.ends, strict=True)
            ]
            found = [d_x_PF, *d_states, *d_parameters]
        ctx.report(stats)
        return None, None, None, None, *(d if needed else None for d, needed in zip(found, needs, strict=True))


def _run_chunks(
    problem: Problem, chunks: Chunks, x_PF: torch.Tensor, starts: list[torch.Tensor], *, lead_steps: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, in two parts if the first steps are to be differentiated alone, and the states after each chunk."""
    layout = chunks.layout
    cuts = [0, layout.num_steps]
    if 0 < lead_steps < layout.num_steps and torch.is_grad_enabled():
        cuts.insert(1, lead_steps)
    states, outputs = starts, []
    for first, last in pairwise(cuts):
        rows = slice(int(layout.starts_T[first]), int(layout.starts_T[last]))
        part = layout if len(cuts) == 2 else layout.chunk(first, last)
        y_PF, states = problem.run(part, x_PF[rows], states)
        outputs.append(y_PF)
    return outputs, states


def _d_ends(chunks: Chunks, ends: Sequence[torch.Tensor], d_finals: Sequence[MaybeTensor]) -> list[torch.Tensor]:
    """What the loss asks of the states after each chunk: something only at the end of a sequence."""
    d_ends = []
    for end, d_final in zip(ends, d_finals, strict=True):
        d_end = torch.zeros_like(end)
        if d_final is not None:
            d_end[chunks.last_B.to(end.device)] = d_final[: len(chunks.last_B)]
        d_ends.append(d_end)
    return d_ends


def _d_initial(chunks: Chunks, d_start: MaybeTensor, d_final: MaybeTensor, end: torch.Tensor) -> torch.Tensor:
    """The gradient of the initial states: from first chunks, and straight through sequences without steps."""
    d_initial = end.new_zeros(chunks.whole.num_rows, *end.shape[1:])
    if d_start is not None:
        first_C = chunks.is_first_C
        d_initial[chunks.sequence_C[first_C].to(end.device)] = d_start[first_C.to(end.device)]
    if d_final is not None:
        d_initial[len(chunks.last_B) :] = d_final[len(chunks.last_B) :]
    return d_initial


def _sequential_gradients(
    problem: Problem, arriving: Sequence[MaybeTensor], needs: Sequence[bool]
) -> list[MaybeTensor]:
    """The gradient of a sequential run under autograd, in the order input, states, parameters."""

    by_torch = any(is_transformed(d) for d in arriving)

    def run(own: list[torch.Tensor]) -> list[torch.Tensor]:
        y_PF, states = problem.with_inputs(own).run_all(by_torch=by_torch)
        return [y_PF, *states]

    return differentiate_by_torch(run, problem.inputs, arriving, needs)
