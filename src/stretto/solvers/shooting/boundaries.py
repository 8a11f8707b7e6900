"""Where chunks start: from what was there last time, from burning in, or from the state before the first step.

Shape legend: B sequences, C chunks of all sequences, D those that are not the first of theirs.
"""

import dataclasses
from collections.abc import Sequence
from typing import final

import torch

from stretto.solvers.chunks import Chunks
from stretto.solvers.shooting.memory import burnt_in
from stretto.solvers.shooting.trajectory_cache import Place, TrajectoryCache
from stretto.solvers.solver import Chain


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What is assumed of the boundaries.

    Attributes:
        states: Before each chunk (C, ...).
        adjoints: The gradients that arrive at the end of each chunk (C, ...), where they are carried; None if not.
        known: Sequences of several chunks that were seen before.
        told: The same in words; empty without a cache.
        work: Steps that were walked for it, over those that there are.
    """

    states: list[torch.Tensor]
    adjoints: list[torch.Tensor] | None
    known: int
    told: str
    work: float


def assumed(chain: Chain, chunks: Chunks, *, cache: TrajectoryCache | None, burn_in: int) -> Assumed:
    """From the cache where a sequence is in it; else by burning in so many steps; else from the initial state."""
    states = [state.detach().index_select(0, chunks.sequence_C.to(state.device)) for state in chain.states]
    known = _recall(chain, chunks, states, cache)
    fresh_D = chunks.later_D[[int(chunks.sequence_C[place]) not in known for place in chunks.later_D]]
    work = 0.0
    if burn_in and len(fresh_D):
        steps = min(burn_in, chunks.length)
        began = [part[fresh_D.to(part.device)] for part in states]
        for part, end in zip(states, burnt_in(chain, chunks, steps, began, places=fresh_D), strict=True):
            part[fresh_D.to(part.device)] = end
        work = steps * len(fresh_D) / max(1, chain.layout.total)
    told = ""
    if cache is not None:
        told = f", {len(known)} of {len(chunks.inner)} sequences from where they were last time"
    adjoints = _recalled_adjoints(chain, chunks, states, cache) if cache is not None and cache.adjoints else None
    return Assumed(states=states, adjoints=adjoints, known=len(known), told=told, work=work)


def remember(chain: Chain, chunks: Chunks, arrived: Sequence[torch.Tensor], *, cache: TrajectoryCache | None) -> None:
    """Keep what arrived at the boundaries (C, ...); of a sequence with states that are no numbers, nothing."""
    if cache is not None:
        for sequence, places_D in chunks.inner.items():
            held = [part[places_D.to(part.device)] for part in arrived]
            if all(bool(torch.isfinite(part).all()) for part in held):
                cache.put(_place(chain, chunks, sequence), held)


def remember_adjoints(
    chain: Chain, chunks: Chunks, arriving: Sequence[torch.Tensor], *, cache: TrajectoryCache | None
) -> None:
    """Keep the gradients that arrive at the ends of chunks (C, ...), if the cache is to carry them."""
    if cache is not None and cache.adjoints:
        for sequence, places_D in chunks.inner.items():
            held = [part[chunks.before_C[places_D].to(part.device)] for part in arriving]
            cache.put(_place(chain, chunks, sequence, adjoint=True), held)


def _recall(
    chain: Chain, chunks: Chunks, states: Sequence[torch.Tensor], cache: TrajectoryCache | None
) -> frozenset[int]:
    """Write what is held of each sequence into `states` (C, ...); the sequences it was held of."""
    if cache is None:
        return frozenset()
    found = set()
    for sequence, places_D in chunks.inner.items():
        held = _fitting(cache.get(_place(chain, chunks, sequence)), states, len(places_D))
        if held is not None:
            found.add(sequence)
            for state, part in zip(states, held, strict=True):
                state[places_D.to(state.device)] = part.to(state)
    return frozenset(found)


def _recalled_adjoints(
    chain: Chain, chunks: Chunks, states: Sequence[torch.Tensor], cache: TrajectoryCache
) -> list[torch.Tensor]:
    arriving = [torch.zeros_like(state) for state in states]
    for sequence, places_D in chunks.inner.items():
        held = _fitting(cache.get(_place(chain, chunks, sequence, adjoint=True)), states, len(places_D))
        if held is not None:
            for arrives, part in zip(arriving, held, strict=True):
                arrives[chunks.before_C[places_D].to(arrives.device)] = part.to(arrives)
    return arriving


def _fitting(held: list[torch.Tensor] | None, states: Sequence[torch.Tensor], count: int) -> list[torch.Tensor] | None:
    """What is held, if it is of as many boundaries and of the shapes there are."""
    if held is None or [part.shape for part in held] != [(count, *state.shape[1:]) for state in states]:
        return None
    return held


def _place(chain: Chain, chunks: Chunks, sequence: int, *, adjoint: bool = False) -> Place:
    assert chain.sample_ids is not None
    name = f"{chain.name} adjoint" if adjoint else chain.name
    return Place(chain=name, sample_id=chain.sample_ids[sequence], length=chunks.length)
