"""The plan of one epoch: which sequences make a step, in which order, and each rank's share.

    members      shuffle, then sort by bucket (stable)        | bucket 0        | bucket 1           | bucket 2 |
    groups       cut each bucket into groups of rows x ranks  | g0   | g1  | g2 | g3     | g4     |..| g7   | g8|
    order        shuffle the groups                           g4  g0  g8  g2  g7  g1  g3 ...
    shares       cut each group evenly among the ranks        rank 0 | rank 1 | rank 2

All ranks work on the same bucket at the same time, so none waits for a longer sequence of another; and each computes
the whole plan by itself, so nothing is communicated.

Shape legend: N sequences, M members (sequences in the plan), K buckets, G groups (one update each), W
ranks, B batches (every share of a group that is not empty).
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
    """Every member exactly once: group g is `order_M[offsets_G[g]:offsets_G[g + 1]]`, all of one bucket.

    Attributes:
        order_M: Sequence numbers, group by group.
        offsets_G: Where each group begins, and the end.
        bucket_G: The bucket of each group.
    """

    order_M: Indices
    offsets_G: Indices
    bucket_G: Indices

    @property
    def num_batches(self) -> int:
        """Batches of each rank, one per group."""
        return len(self.bucket_G)

    def share(self, group: int, *, rank: int, world_size: int) -> list[int]:
        """One rank's batch of a group: an even share, empty when there are fewer sequences than ranks."""
        begin = int(self.offsets_G[group])
        count = int(self.offsets_G[group + 1]) - begin
        first, last = count * rank // world_size, count * (rank + 1) // world_size
        share: list[int] = self.order_M[begin + first : begin + last].tolist()
        return share

    def share_offsets(self, world_size: int) -> Indices:
        """Where the shares of all ranks begin in `order_M`: group by group, rank by rank, and the end."""
        counts_G = np.diff(self.offsets_G)
        first_GW = counts_G[:, None] * np.arange(world_size) // world_size
        return np.append((self.offsets_G[:-1, None] + first_GW).ravel(), self.offsets_G[-1])

    def unused(self, batches_done: int) -> Indices:
        """The members that are not in the first `batches_done` groups, in ascending order."""
        return np.sort(self.order_M[self.offsets_G[batches_done] :])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplerReport:
    """The batches of one epoch over all ranks.

    Attributes:
        epoch: Its number.
        num_sequences: Sequences in its batches.
        num_buckets: Buckets that hold a sequence.
        batches: Batches per rank, the same on every rank.
        shapes: Distinct (rows, steps) when each batch is padded to its longest sequence.
        shapes_to_edge: The same when padded to the bucket's edge.
        padding: Fraction of the padded steps that are padding, when each batch is padded to its longest sequence.
        padding_to_edge: The same when padded to the bucket's edge.
        largest_batch: Most padded steps of one batch, padded to the edge: what memory must hold.
        most_rows: Most sequences of one batch.
        straggler: Longest rank's length, summed over batches, over the mean length of ranks; 1 means nobody waits.
        correlation: Of the mean lengths of adjacent batches.
    """

    epoch: int
    num_sequences: int
    num_buckets: int
    batches: int
    shapes: int
    shapes_to_edge: int
    padding: float
    padding_to_edge: float
    largest_batch: int
    most_rows: int
    straggler: float
    correlation: float

    def __str__(self) -> str:
        rows = [
            ("sequences", f"{self.num_sequences:,}"),
            ("buckets", f"{self.num_buckets}"),
            ("batches", f"{self.batches:,}"),
            ("distinct shapes", f"{self.shapes:,} ({self.shapes_to_edge} padded to the edge)"),
            ("padding", f"{self.padding:.1%} of padded steps ({self.padding_to_edge:.1%} padded to the edge)"),
            ("largest batch", f"{self.largest_batch:,} padded steps, at most {self.most_rows} sequences"),
            ("straggler factor", f"{self.straggler:.3f}"),
            ("adjacent correlation", f"{self.correlation:+.3f}"),
        ]
        return "\n".join(f"{name:<21}{value}" for name, value in rows)


def plan_epoch(
    members_M: Indices,
    *,
    lengths_N: Indices,
    buckets: Buckets,
    world_size: int,
    rng: np.random.Generator | None,
) -> EpochPlan:
    """Cut the members into groups of one bucket each, shared by all ranks; a pure function of its arguments.

    `rng` draws membership and order; None sorts both by length.
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
    if rng is not None:
        order_M = order_M[np.arange(len(order_M)) + np.repeat(begins_G - offsets_G[:-1], sizes_G)]
    return EpochPlan(order_M=order_M, offsets_G=offsets_G, bucket_G=bucket_G)


def adjacent_correlation(values_G: npt.NDArray[np.float64]) -> float:
    """The correlation of each value with the next; 0 when it is not defined."""
    if len(values_G) < 3:
        return 0.0
    now, following = values_G[:-1] - values_G[:-1].mean(), values_G[1:] - values_G[1:].mean()
    scale = float(np.sqrt((now**2).sum() * (following**2).sum()))
    return float((now * following).sum()) / scale if scale > 0 else 0.0


def _uncorrelated_order(mean_G: npt.NDArray[np.float64], *, rng: np.random.Generator) -> Indices:
    """A random order in which the length of a group says nothing about the next one's.

    A single shuffle of G groups has a chance correlation of about 1 / sqrt(G), which for a small epoch is a run of
    short or long batches that shows in the loss; so shuffle again until it is negligible, or keep the best of 32.
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


def measure_plan(
    plan: EpochPlan, *, lengths_N: npt.NDArray[np.int64], buckets: Buckets, world_size: int, epoch: int
) -> SamplerReport:
    """The batches of a plan over all ranks, in numbers."""
    offsets = plan.share_offsets(world_size)
    sizes_GW = np.diff(offsets).reshape(plan.num_batches, world_size)
    filled = sizes_GW.ravel() > 0
    lengths_M = lengths_N[plan.order_M]
    longest_B = np.maximum.reduceat(lengths_M, offsets[:-1][filled])
    rows_B = sizes_GW.ravel()[filled]
    edge_B = np.repeat(buckets.edges_K[plan.bucket_G], world_size)[filled]
    longest_GW = np.zeros(sizes_GW.size, dtype=np.int64)
    longest_GW[filled] = longest_B
    longest_GW = longest_GW.reshape(sizes_GW.shape)
    mean_G = np.add.reduceat(lengths_M, plan.offsets_G[:-1]) / np.diff(plan.offsets_G)
    real = int(lengths_M.sum())
    return SamplerReport(
        epoch=epoch,
        num_sequences=len(plan.order_M),
        num_buckets=len(np.unique(plan.bucket_G)),
        batches=plan.num_batches,
        shapes=len(np.unique(np.stack([rows_B, longest_B]), axis=1).T),
        shapes_to_edge=len(np.unique(np.stack([rows_B, edge_B]), axis=1).T),
        padding=1.0 - real / int((rows_B * longest_B).sum()),
        padding_to_edge=1.0 - real / int((rows_B * edge_B).sum()),
        largest_batch=int((rows_B * edge_B).max()),
        most_rows=int(rows_B.max()),
        straggler=float(longest_GW.max(axis=1).sum() / longest_GW.mean(axis=1).sum()),
        correlation=adjacent_correlation(mean_G),
    )


def shuffled_padded_steps(
    lengths_N: npt.NDArray[np.int64], *, batch_size: int | None, max_padded_steps: int | None, seed: int = 0
) -> int:
    """The padded steps of an epoch of plain shuffled batches: what buckets are measured against.

    Each batch is padded to its longest sequence. With a cap, a batch is closed when the next sequence would exceed
    `max_padded_steps` or `batch_size` rows.
    """
    order_N = np.random.default_rng(seed).permutation(lengths_N)
    if max_padded_steps is None:
        begins_G = np.arange(0, len(order_N), batch_size)
        sizes_G = np.diff(np.append(begins_G, len(order_N)))
        return int((np.maximum.reduceat(order_N, begins_G) * sizes_G).sum())
    total = rows = longest = 0
    for length in order_N.tolist():
        wider = max(longest, length)
        if (rows + 1) * wider > max_padded_steps or rows == batch_size:
            total, rows, wider = total + rows * longest, 0, length
        rows, longest = rows + 1, wider
    return total + rows * longest
