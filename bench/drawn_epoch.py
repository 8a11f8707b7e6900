"""What a sampler drew, in numbers: the same counts for every contestant.

Shape legend: N sequences of the set, M sequences drawn, B batches that are not empty, G steps, W ranks, K buckets.
"""

import dataclasses
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from stretto.batching import adjacent_correlation, bucket_of

Batches = list[list[int]]
Lengths = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimedDraw:
    """Batches of one rank and the time they took.

    Attributes:
        batches: Sequence numbers, batch after batch.
        plan_seconds: Until the first batch: construction, plan, buffers.
        ms_per_batch: Mean of the others; None when there is only one.
    """

    batches: Batches
    plan_seconds: float
    ms_per_batch: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochCounts:
    """One epoch over all ranks.

    Attributes:
        waste: Share of slots that are padding when each batch is padded to its longest sequence.
        waste_to_edge: The same when padded to the bucket's edge; None without fixed edges.
        cap: Slots of the largest batch, padded to its longest sequence, over `max_padded_steps`.
        coverage: Share of the set's sequences that are drawn at least once.
        repeated: Share of the set's sequences that are drawn more than once.
        batches: Batches of all ranks that are not empty.
        shapes: Distinct (rows, steps) when each batch is padded to its longest sequence.
        shapes_to_edge: The same when padded to the bucket's edge; None without fixed edges.
        serial_steps: Sum over the epoch's steps of the longest rank's length: the time steps that follow one another.
        length_straggler: Sum over steps of the longest rank's length over the sum of the mean; 1 is no waiting.
        token_straggler: The same of slots instead of lengths.
        correlation: Of the mean lengths of adjacent steps, all ranks together.
    """

    waste: float
    waste_to_edge: float | None
    cap: float
    coverage: float
    repeated: float
    batches: int
    shapes: int
    shapes_to_edge: int | None
    serial_steps: int
    length_straggler: float
    token_straggler: float
    correlation: float


def timed_draw(batches: Iterator[list[int]], *, most: int | None = None) -> TimedDraw:
    """Draw all batches, or the first `most`, with the clock on."""
    drawn: Batches = []
    first = begin = time.perf_counter()
    for batch in batches:
        drawn.append(batch)
        if len(drawn) == 1:
            first = time.perf_counter()
        if len(drawn) == most:
            break
    end = time.perf_counter()
    return TimedDraw(
        batches=drawn,
        plan_seconds=first - begin,
        ms_per_batch=(end - first) * 1e3 / (len(drawn) - 1) if len(drawn) > 1 else None,
    )


def count_epoch(
    ranks: list[Batches], *, lengths_N: Lengths, max_padded_steps: int, edges_K: Lengths | None = None
) -> EpochCounts:
    """Count what all ranks drew in one epoch.

    Args:
        ranks: The batches of each rank.
        lengths_N: Steps of each sequence of the set.
        max_padded_steps: Slots that a batch may have.
        edges_K: Edges to which the batches can be padded.
    """
    num_steps = max(map(len, ranks))
    sizes_WG = np.array([[len(b) for b in batches] + [0] * (num_steps - len(batches)) for batches in ranks])
    sequences_M = np.array([number for batches in ranks for batch in batches for number in batch], dtype=np.int64)
    lengths_M = lengths_N[sequences_M]
    filled = sizes_WG.ravel() > 0
    rows_B = sizes_WG.ravel()[filled]
    begins_B = np.cumsum(rows_B) - rows_B
    longest_B = np.maximum.reduceat(lengths_M, begins_B)
    slots_B = rows_B * longest_B
    longest_WG = np.zeros_like(sizes_WG)
    longest_WG[sizes_WG > 0] = longest_B
    step_B = np.tile(np.arange(num_steps), len(ranks))[filled]
    times_N = np.bincount(sequences_M, minlength=len(lengths_N))
    steps_G = np.bincount(step_B, weights=np.add.reduceat(lengths_M, begins_B), minlength=num_steps)
    real = int(lengths_M.sum())
    edge_B = None if edges_K is None else edges_K[bucket_of(longest_B, edges_K)]
    return EpochCounts(
        waste=1.0 - real / int(slots_B.sum()),
        waste_to_edge=None if edge_B is None else 1.0 - real / int((rows_B * edge_B).sum()),
        cap=float(slots_B.max() / max_padded_steps),
        coverage=float((times_N > 0).mean()),
        repeated=float((times_N > 1).mean()),
        batches=len(rows_B),
        shapes=_distinct(rows_B, longest_B),
        shapes_to_edge=None if edge_B is None else _distinct(rows_B, edge_B),
        serial_steps=int(longest_WG.max(axis=0).sum()),
        length_straggler=_straggler(longest_WG),
        token_straggler=_straggler(longest_WG * sizes_WG),
        correlation=adjacent_correlation(steps_G / sizes_WG.sum(axis=0)),
    )


def order_match(first: Batches, second: Batches, *, lengths_N: Lengths, ruler_K: Lengths) -> float:
    """How far two draws visit the lengths in the same order: 1 is the same, 0 is what chance gives.

    It is Cohen's kappa of the two sequences of intervals of `ruler_K` in which the batches' mean lengths lie.
    """
    one_G, other_G = (
        bucket_of(np.array([np.rint(lengths_N[batch].mean()) for batch in batches if batch]).astype(np.int64), ruler_K)
        for batches in (first, second)
    )
    shared = min(len(one_G), len(other_G))
    one_K, other_K = (np.bincount(steps_G, minlength=len(ruler_K)) / len(steps_G) for steps_G in (one_G, other_G))
    chance = float((one_K * other_K).sum())
    alike = float((one_G[:shared] == other_G[:shared]).sum() / max(len(one_G), len(other_G)))
    return (alike - chance) / (1.0 - chance) if chance < 1 else 0.0


def _distinct(rows_B: Lengths, steps_B: Lengths) -> int:
    return len(np.unique(np.stack([rows_B, steps_B]), axis=1).T)


def _straggler(values_WG: Lengths) -> float:
    return float(values_WG.max(axis=0).sum() / values_WG.mean(axis=0).sum())
