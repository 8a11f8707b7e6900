"""Chunks of time walked at once, and the gradient through them: by sweeps in reverse, never through iterations.

Shape legend: B sequences, C chunks of all sequences, P real steps of all sequences, F features.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from stretto.errors import StrettoError
from stretto.solvers.chunks import Chunks
from stretto.solvers.solver import Chain, Walked


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop.

    Attributes:
        tolerance: The mismatch at the boundaries that is small enough.
        most: Sweeps after which to stop all the same; as many as there are chunks are always enough.
    """

    tolerance: float
    most: int


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class Swept:
    """What sweeps came to: how many there were, and the mismatch that is left."""

    sweeps: int = 0
    residual: float = 0.0


def mismatch(arrived: Sequence[torch.Tensor], assumed: Sequence[torch.Tensor], matters_C: torch.Tensor) -> float:
    """The largest difference, over that of states above 1; not a number if a state is none."""
    worst = 0.0
    for one_C, other_C in zip(arrived, assumed, strict=True):
        if not one_C.is_floating_point() or not bool(matters_C.any()):
            continue
        here_C = matters_C.to(one_C.device)
        difference = float((one_C[here_C] - other_C[here_C]).abs().max())
        scale = max(1.0, float(one_C[here_C].abs().max()))
        if math.isnan(difference):
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
        chain, chunks = walk.chain, walk.chunks
        # Asked outside: in here, gradients are always off.
        needs = [needed and walk.keeps for needed in ctx.needs_input_grad[1:]]
        leaves = [t.detach().requires_grad_(needed) for t, needed in zip(given, needs, strict=True)]
        with torch.set_grad_enabled(any(needs)):
            x_PF, initial = leaves[0], leaves[1 : 1 + len(chain.states)]
            parameters = dict(zip(walk.names, leaves[1 + len(chain.states) :], strict=True))
            own = dataclasses.replace(chain, parameters=parameters)
            starts = [
                chunks.begun(state, boundary.requires_grad_(boundary.is_floating_point() and any(needs)))
                for state, boundary in zip(initial, walk.boundaries, strict=True)
            ]
            walked = own.run(chunks.layout, chunks.side_by_side(x_PF), starts)
            y_PF = chunks.one_after_another(walked.y_PF)
            finals = [chunks.finals(state, ends) for state, ends in zip(initial, walked.states, strict=True)]
        ctx.walk, ctx.leaves = walk, leaves
        ctx.made = (y_PF, finals, walked.states)
        ends = [state.detach() for state in walked.states]
        ctx.mark_non_differentiable(*ends)
        return (y_PF.detach(), *(state.detach() for state in finals), *ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *arriving: torch.Tensor) -> Any:
        walk: _Walk = ctx.walk
        y_PF, finals, ends = ctx.made
        outside = [(y_PF, arriving[0]), *zip(finals, arriving[1 : 1 + len(finals)], strict=True)]
        outside = [(made, d) for made, d in outside if made.requires_grad and d is not None]
        inner = [
            (end, boundary)
            for end, boundary in zip(ends, walk.boundaries, strict=True)
            if end.requires_grad and boundary.requires_grad
        ]
        adjoints = _adjoints(outside, inner, walk)
        wanted = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        outputs = [made for made, _ in outside] + [end for end, _ in inner]
        cotangents = [d for _, d in outside] + adjoints
        if not wanted or not outputs:
            return None, *[None] * len(ctx.leaves)
        found = iter(torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True, allow_unused=True))
        return None, *[next(found) if needed else None for needed in ctx.needs_input_grad[1:]]


def _adjoints(
    outside: list[tuple[torch.Tensor, torch.Tensor]],
    inner: list[tuple[torch.Tensor, torch.Tensor]],
    walk: _Walk,
) -> list[torch.Tensor]:
    """The gradient that arrives at the end of each chunk from the chunk after it: a linear recurrence, by sweeps.

    After k sweeps the last k chunks of each sequence have it exactly.
    """
    chunks, limits = walk.chunks, walk.backward
    arrives = [torch.zeros_like(end) for end, _ in inner]
    follows_C = ~chunks.is_first_C
    # The chunk before each that has one, and those themselves.
    before, after = chunks.before_C[follows_C], torch.nonzero(follows_C)[:, 0]
    swept = Swept()
    while inner and len(after) and swept.sweeps + 1 < limits.most:
        d_starts = torch.autograd.grad(
            [made for made, _ in outside] + [end for end, _ in inner],
            [boundary for _, boundary in inner],
            [d for _, d in outside] + arrives,
            retain_graph=True,
            allow_unused=True,
        )
        fresh = []
        worst = largest = 0.0
        for (end, _), d_start, old in zip(inner, d_starts, arrives, strict=True):
            new = torch.zeros_like(end)
            if d_start is not None:
                new[before.to(end.device)] = d_start[after.to(end.device)]
            worst, largest = max(worst, float((new - old).abs().max())), max(largest, float(new.abs().max()))
            fresh.append(new)
        arrives = fresh
        swept.sweeps += 1
        swept.residual = worst / largest if largest else 0.0
        if math.isnan(swept.residual):
            raise StrettoError("a gradient is no number", fix="Lower the learning rate, or walk with solver='serial'.")
        if swept.residual <= limits.tolerance:
            break
    swept.sweeps += 1
    walk.report(swept)
    return arrives
