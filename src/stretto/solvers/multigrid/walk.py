"""The last walk over the finest grid, through which gradients flow.

Shape legend: B sequences, C chunks of all sequences, P real steps of all sequences, F features.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from stretto.solvers.multigrid.levels import Level
from stretto.solvers.multigrid.reverse_cycles import Pairs, Reversal, ReverseCycles, Reversed, gradients
from stretto.solvers.solver import Chain, Walked


def walk_finest(
    chain: Chain,
    level: Level,
    boundaries: Sequence[torch.Tensor],
    *,
    reversal: Reversal,
    report: Callable[[Reversed], None],
) -> tuple[Walked, list[torch.Tensor]]:
    """One walk over all chunks from given boundary states, through which gradients flow.

    Args:
        chain: What to walk.
        level: Its grid.
        boundaries: States before each chunk (C, ...); those before first chunks do not count.
        reversal: How to find the gradient.
        report: Told how it was found, when it was.

    Returns:
        Outputs and final states, and the states after each chunk (C, ...), through which no gradient flows.
    """
    names = list(chain.parameters)
    made = _Finest.apply(  # type: ignore[no-untyped-call]
        _Walk(chain, level, [part.detach() for part in boundaries], names, reversal, report, torch.is_grad_enabled()),
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
    level: Level
    boundaries: list[torch.Tensor]
    names: list[str]
    reversal: Reversal
    report: Callable[[Reversed], None]
    keeps: bool

    def of(self, leaves: Sequence[torch.Tensor]) -> Chain:
        """The chain with other tensors in the place of its own."""
        count = len(self.chain.states)
        parameters = dict(zip(self.names, leaves[1 + count :], strict=True))
        return dataclasses.replace(self.chain, x_PF=leaves[0], states=leaves[1 : 1 + count], parameters=parameters)


class _Finest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: _Walk, *given: torch.Tensor) -> Any:
        chunks = walk.level.chunks
        # Asked outside: in here, gradients are always off.
        needs = [needed and walk.keeps for needed in ctx.needs_input_grad[1:]]
        leaves = [t.detach().requires_grad_(needed) for t, needed in zip(given, needs, strict=True)]
        own = walk.of(leaves)
        with torch.set_grad_enabled(any(needs)):
            starts = [
                chunks.begun(state, boundary.requires_grad_(boundary.is_floating_point() and any(needs)))
                for state, boundary in zip(own.states, walk.boundaries, strict=True)
            ]
            walked = own.run(chunks.layout, chunks.side_by_side(own.x_PF), starts)
            y_PF = chunks.one_after_another(walked.y_PF)
            finals = [chunks.finals(state, end) for state, end in zip(own.states, walked.states, strict=True)]
        ctx.set_materialize_grads(False)
        ctx.walk, ctx.leaves, ctx.made, ctx.ends = walk, leaves, [y_PF, *finals], walked.states
        ends = [end.detach() for end in walked.states]
        ctx.mark_non_differentiable(*ends)
        return (y_PF.detach(), *(state.detach() for state in finals), *ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *arriving: torch.Tensor | None) -> Any:
        walk: _Walk = ctx.walk
        wanted = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        cycles = ReverseCycles(
            level=walk.level,
            reversal=walk.reversal,
            boundaries=walk.boundaries,
            ends=ctx.ends,
            outside=_paired(ctx.made, arriving),
        )
        found, told = cycles.solved(wanted)
        if told.reason:
            found = _step_after_step(walk.of(ctx.leaves), arriving, wanted)
        walk.report(told)
        by_leaf = dict(zip(map(id, wanted), found, strict=True))
        return None, *[by_leaf.get(id(leaf)) for leaf in ctx.leaves]


def _paired(made: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor | None]) -> Pairs:
    """What was made beside what arrives at it, where that is anything; behind it there may be more that arrives."""
    return [(t, d) for t, d in zip(made, arriving, strict=False) if d is not None and t.requires_grad]


def _step_after_step(
    chain: Chain, arriving: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    with torch.enable_grad():
        walked = chain.run(chain.layout, chain.x_PF, chain.states)
    return gradients(_paired([walked.y_PF, *walked.states], arriving), wanted)
