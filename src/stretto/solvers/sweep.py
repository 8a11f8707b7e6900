"""Chunks of time walked at once, and the gradient through them: by sweeps in reverse, never through iterations.

Shape legend: B sequences, C chunks of all sequences, P real steps of all sequences, F features.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, final

import torch

from stretto.solvers.chunks import Chunks
from stretto.solvers.reverse_sweep import ChunkGraph, Limits, ReverseSweep, Swept
from stretto.solvers.solver import Chain, Walked


def mismatch(arrived: Sequence[torch.Tensor], assumed: Sequence[torch.Tensor], matters_C: torch.Tensor) -> float:
    """The largest difference, over that of states above 1; not a number if a state is none, or without bound."""
    worst = 0.0
    for one_C, other_C in zip(arrived, assumed, strict=True):
        if not one_C.is_floating_point() or not bool(matters_C.any()):
            continue
        here_C = matters_C.to(one_C.device)
        difference = float((one_C[here_C] - other_C[here_C]).abs().max())
        scale = max(1.0, float(one_C[here_C].abs().max()))
        if not math.isfinite(difference):
            return math.nan
        worst = max(worst, difference / scale)
    return worst


def walk_chunks(
    chain: Chain,
    chunks: Chunks,
    boundaries: Sequence[torch.Tensor],
    *,
    backward: Limits,
    report: Callable[[Swept], None],
) -> tuple[Walked, list[torch.Tensor]]:
    """One sweep from given boundary states, through which gradients flow.

    Args:
        chain: What to walk.
        chunks: How it is cut.
        boundaries: States before each chunk (C, ...); those before first chunks do not count.
        backward: When to stop sweeping in reverse.
        report: Told what the sweeps in reverse came to, when there were any.

    Returns:
        Outputs and final states, and the states after each chunk (C, ...), through which no gradient flows.
    """
    names = list(chain.parameters)
    made = _Chunked.apply(  # type: ignore[no-untyped-call]
        _Walk(chain, chunks, [part.detach() for part in boundaries], names, backward, report, torch.is_grad_enabled()),
        chain.x_PF,
        *chain.states,
        *(chain.parameters[name] for name in names),
    )
    count = len(chain.states)
    return Walked(y_PF=made[0], states=list(made[1 : 1 + count])), list(made[1 + count :])


@final
@dataclasses.dataclass(slots=True)
class _Walk:
    chain: Chain
    chunks: Chunks
    boundaries: list[torch.Tensor]
    names: list[str]
    backward: Limits
    report: Callable[[Swept], None]
    keeps: bool


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: _Walk, *given: torch.Tensor) -> Any:
        chain, chunks, count = walk.chain, walk.chunks, len(walk.chain.states)
        # Asked outside: in here, gradients are always off.
        needs = [needed and walk.keeps for needed in ctx.needs_input_grad[1:]]
        x_PF = chunks.side_by_side(given[0]).detach().requires_grad_(needs[0])
        initial = given[1 : 1 + count]
        starts = [
            chunks.begun(state, boundary).detach().requires_grad_(boundary.is_floating_point() and any(needs))
            for state, boundary in zip(initial, walk.boundaries, strict=True)
        ]
        parameters = [t.detach().requires_grad_(n) for t, n in zip(given[1 + count :], needs[1 + count :], strict=True)]
        own = dataclasses.replace(chain, parameters=dict(zip(walk.names, parameters, strict=True)))
        with torch.set_grad_enabled(any(needs)):
            graph = _walked(own, walk, x_PF, starts)
        graph.parameters = parameters
        ctx.set_materialize_grads(False)
        ctx.walk, ctx.graph, ctx.needs = walk, graph, needs
        ends = [end.detach() for end in graph.ends]
        y_PF = graph.parts[0] if len(graph.parts) == 1 else torch.cat(graph.parts)
        finals = [chunks.finals(state, end) for state, end in zip(initial, ends, strict=True)]
        ctx.mark_non_differentiable(*ends)
        return (chunks.one_after_another(y_PF.detach()), *finals, *ends)

    @staticmethod
    def backward(ctx: Any, *arriving: torch.Tensor | None) -> Any:
        walk: _Walk = ctx.walk
        if torch.is_grad_enabled():
            return None, *_again(walk.chain, arriving, ctx.needs)
        graph: ChunkGraph = ctx.graph
        chunks, count = walk.chunks, len(graph.starts)
        d_y, d_finals = arriving[0], arriving[1 : 1 + count]
        d_parts: Sequence[torch.Tensor | None] = [None] * len(graph.parts)
        if d_y is not None:
            d_parts = torch.split(chunks.side_by_side(d_y), [len(part) for part in graph.parts])
        outside = []
        for end, d_final in zip(graph.ends, d_finals, strict=True):
            d_end = torch.zeros_like(end)
            if d_final is not None:
                d_end[chunks.last_B.to(end.device)] = d_final[: len(chunks.last_B)]
            outside.append(d_end)
        reverse = ReverseSweep(walk.chunks, walk.backward, graph, d_parts, outside)
        found, d_starts = reverse.solved()
        walk.report(reverse.swept)
        d_x = found[0]
        d_states = []
        for d_start, d_final, end in zip(d_starts, d_finals, graph.ends, strict=True):
            d_states.append(_to_initial(chunks, d_start, d_final, end))
        gradients = [None if d_x is None else chunks.one_after_another(d_x), *d_states, *found[1:]]
        return None, *[g if needed else None for g, needed in zip(gradients, ctx.needs, strict=True)]


def _again(chain: Chain, arriving: Sequence[torch.Tensor | None], needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """The gradient as something that can itself be differentiated: step after step, under autograd."""
    given = [chain.x_PF, *chain.states, *chain.parameters.values()]
    # Aliases: what leads from one of these tensors to another elsewhere is not followed here.
    own = [tensor.view_as(tensor) for tensor in given]
    states, parameters = own[1 : 1 + len(chain.states)], own[1 + len(chain.states) :]
    twin = dataclasses.replace(chain, parameters=dict(zip(chain.parameters, parameters, strict=True)))
    walked = twin.run(chain.layout, own[0], states)
    made = [walked.y_PF, *walked.states]
    pairs = [(t, d) for t, d in zip(made, arriving, strict=False) if d is not None and t.requires_grad]
    wanted = [tensor for tensor, needed in zip(own, needs, strict=True) if needed]
    found = iter(
        torch.autograd.grad([t for t, _ in pairs], wanted, [d for _, d in pairs], create_graph=True, allow_unused=True)
        if pairs
        else [None] * len(wanted)
    )
    return [next(found) if needed else None for needed in needs]


def _to_initial(
    chunks: Chunks, d_start: torch.Tensor | None, d_final: torch.Tensor | None, end: torch.Tensor
) -> torch.Tensor:
    """What arrives at the initial states: from first chunks, and past sequences without steps."""
    d_initial = end.new_zeros(chunks.whole.num_rows, *end.shape[1:])
    if d_start is not None:
        first_C = chunks.is_first_C
        d_initial[chunks.sequence_C[first_C].to(end.device)] = d_start[first_C.to(end.device)]
    if d_final is not None:
        d_initial[len(chunks.last_B) :] = d_final[len(chunks.last_B) :]
    return d_initial


def _walked(chain: Chain, walk: _Walk, x_PF: torch.Tensor, starts: list[torch.Tensor]) -> ChunkGraph:
    layout, lead = walk.chunks.layout, walk.backward.lead
    cuts = [0, layout.num_steps]
    if 0 < lead < layout.num_steps and torch.is_grad_enabled():
        cuts.insert(1, lead)
    states, parts = starts, []
    for first, last in pairwise(cuts):
        rows = slice(int(layout.starts_T[first]), int(layout.starts_T[last]))
        piece = layout if len(cuts) == 2 else layout.chunk(first, last)
        walked = chain.run(piece, x_PF[rows], states)
        states = walked.states
        parts.append(walked.y_PF)
    return ChunkGraph(x_PF=x_PF, starts=starts, parameters=[], parts=parts, ends=states)
