"""Where sweeps begin: of several guesses, the one that a first sweep leaves nearest to itself.

Shape legend: C chunks of all sequences.
"""

import dataclasses
import math
from typing import final

import torch

from stretto.solvers.chunks import Chunks
from stretto.solvers.shooting.boundaries import assumed
from stretto.solvers.shooting.escalation import Escalation
from stretto.solvers.shooting.memory import PROBED
from stretto.solvers.shooting.trajectory_cache import TrajectoryCache
from stretto.solvers.solver import Chain
from stretto.solvers.sweep import mismatch


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where to begin, and what came of a first sweep from there.

    Attributes:
        states: Before each chunk (C, ...).
        ends: After each chunk (C, ...).
        residual: The largest mismatch between the two.
        told: Where the states are from, in words.
        work: Steps that were walked for all guesses, over those that there are.
    """

    states: list[torch.Tensor]
    ends: list[torch.Tensor]
    residual: float
    told: str
    work: float


def nearest_start(
    chain: Chain, chunks: Chunks, escalation: Escalation, *, cache: TrajectoryCache | None, tolerance: float
) -> Start:
    """Of the states of the last visit, those burnt in and the initial ones, those that a sweep leaves nearest.

    Args:
        chain: What is walked.
        chunks: How it is cut.
        escalation: Makes the sweeps.
        cache: Where sequences were when they were last seen.
        tolerance: A guess that is so near is taken at once.
    """
    burn_in = chunks.length // PROBED
    ways: list[tuple[TrajectoryCache | None, int]] = [] if cache is None else [(cache, burn_in)]
    ways += [(None, burn_in), (None, 0)] if burn_in else [(None, 0)]
    tried: list[Start] = []
    work = 0.0
    for held, steps in ways:
        guess = assumed(chain, chunks, cache=held, burn_in=steps)
        work += guess.work
        if held is not None and not guess.known:
            continue
        ends = escalation.walk(guess.states)
        work += 1.0
        residual = mismatch([chunks.arrived(end) for end in ends], guess.states, ~chunks.is_first_C)
        tried.append(Start(states=guess.states, ends=ends, residual=residual, told=guess.told, work=work))
        if residual <= tolerance:
            break
    best = min(tried, key=lambda start: (math.isnan(start.residual), start.residual))
    return dataclasses.replace(best, work=work)
