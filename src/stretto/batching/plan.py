"""The plan of one epoch: which sequences make a step, in which order, and each rank's share.

Shape legend: M members (sequences that the plan deals out), K buckets, G steps (groups of sequences).
"""

import dataclasses

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

CORRELATION_GOAL = 0.02
ORDER_DRAWS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Where the sequences lie and how many of a bucket fit in one rank's batch."""

    edges_K: Indices
    bucket_N: Indices
    rows_K: Indices


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """Every member exactly once: step g deals out `order_M[offsets_G[g]:offsets_G[g + 1]]`, all of one bucket.

    Attributes:
        order_M: Sequence numbers, step after step.
        offsets_G: Where each step begins; one more entry than there are steps.
        bucket_G: The bucket of each step.
    """

    order_M: Indices
    offsets_G: Indices
    bucket_G: Indices

    @property
    def num_steps(self) -> int:
        """Steps of the epoch, the same on every rank."""
        return len(self.bucket_G)

    def share(self, step: int, *, rank: int, world_size: int) -> list[int]:
        """The sequences of one rank in one step: an even part, empty when there are fewer sequences than ranks."""
        begin = int(self.offsets_G[step])
        count = int(self.offsets_G[step + 1]) - begin
        first, last = count * rank // world_size, count * (rank + 1) // world_size
        share: list[int] = self.order_M[begin + first : begin + last].tolist()
        return share

    def share_offsets(self, world_size: int) -> Indices:
        """Where the shares of all ranks begin in `order_M`: step by step, rank by rank, and the end."""
        counts_G = np.diff(self.offsets_G)
        first_GW = counts_G[:, None] * np.arange(world_size) // world_size
        return np.append((self.offsets_G[:-1, None] + first_GW).ravel(), self.offsets_G[-1])

    def unused(self, steps_used: int) -> Indices:
        """The members that no step before `steps_used` dealt, in ascending order."""
        return np.sort(self.order_M[self.offsets_G[steps_used] :])


def plan_epoch(
    members_M: Indices,
    *,
    lengths_N: Indices,
    buckets: Buckets,
    world_size: int,
    rng: np.random.Generator | None,
) -> EpochPlan:
    """Deal the members out in steps of one bucket each; a pure function of its arguments.

    Args:
        members_M: The sequences to deal.
        lengths_N: Steps of every sequence of the set.
        buckets: Their buckets and how many a rank takes.
        world_size: Ranks that share each step.
        rng: New membership and order; None keeps both sorted by length.
    """
    mixed_M = members_M[np.argsort(lengths_N[members_M], kind="stable")] if rng is None else rng.permutation(members_M)
    # A small integer type lets NumPy's stable sort be a radix sort.
    small = np.int16 if len(buckets.edges_K) <= np.iinfo(np.int16).max else np.int64
    bucket_M = buckets.bucket_N[mixed_M].astype(small)
    order_M = mixed_M[np.argsort(bucket_M, kind="stable")]
    counts_K = np.bincount(bucket_M, minlength=len(buckets.edges_K))
    group_K = buckets.rows_K * world_size
    steps_K = -(-counts_K // group_K)
    bucket_G = np.repeat(np.arange(len(counts_K)), steps_K)
    within_G = np.arange(len(bucket_G)) - np.repeat(np.cumsum(steps_K) - steps_K, steps_K)
    begins_G = (np.cumsum(counts_K) - counts_K)[bucket_G] + within_G * group_K[bucket_G]
    sizes_G = np.diff(np.append(begins_G, len(order_M)))
    if rng is not None:
        mean_G = np.add.reduceat(lengths_N[order_M], begins_G) / sizes_G
        shuffled_G = _uncorrelated_order(mean_G, rng=rng)
        bucket_G, begins_G, sizes_G = bucket_G[shuffled_G], begins_G[shuffled_G], sizes_G[shuffled_G]
        offsets_G = np.append(0, np.cumsum(sizes_G))
        order_M = order_M[np.arange(len(order_M)) + np.repeat(begins_G - offsets_G[:-1], sizes_G)]
    else:
        offsets_G = np.append(0, np.cumsum(sizes_G))
    return EpochPlan(order_M=order_M, offsets_G=offsets_G, bucket_G=bucket_G)


def adjacent_correlation(values_G: npt.NDArray[np.float64]) -> float:
    """The correlation of each value with the next; 0 when it is not defined."""
    if len(values_G) < 3:
        return 0.0
    now, following = values_G[:-1] - values_G[:-1].mean(), values_G[1:] - values_G[1:].mean()
    scale = float(np.sqrt((now**2).sum() * (following**2).sum()))
    return float((now * following).sum()) / scale if scale > 0 else 0.0


def _uncorrelated_order(mean_G: npt.NDArray[np.float64], *, rng: np.random.Generator) -> Indices:
    """A random order in which a step's length says nothing of the next one's.

    A single shuffle of G steps has a chance correlation of about 1 / sqrt(G), which for a small epoch is a run of
    short or long batches that the loss shows; so shuffle again until it is negligible, or keep the best of 32.
    """
    best, least = rng.permutation(len(mean_G)), float("inf")
    for draw in range(ORDER_DRAWS):
        order_G = best if draw == 0 else rng.permutation(len(mean_G))
        correlation = abs(adjacent_correlation(mean_G[order_G]))
        if correlation < least:
            best, least = order_G, correlation
        if least <= CORRELATION_GOAL:
            break
    return best
