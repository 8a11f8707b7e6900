"""The plan of one epoch: which sequences make a step, in which order, and each rank's share.

    members      shuffle, then sort by bucket (stable)        | bucket 0        | bucket 1           | bucket 2 |
    groups       cut each bucket into groups of rows x ranks  | g0   | g1  | g2 | g3     | g4     |..| g7   | g8|
    order        shuffle the groups                           g4  g0  g8  g2  g7  g1  g3 ...
    shares       cut each group evenly among the ranks        rank 0 | rank 1 | rank 2

All ranks work on the same bucket at the same time, so none waits for a longer sequence of another; and each computes
the whole plan by itself, so nothing is communicated.

Lengths are of shape (N,), or (N, 2) for pairs: then steps are those of both sides, each padded to its own longest.

Shape legend: N sequences, M members (sequences in the plan), K buckets, G groups (one update each), W
ranks, B batches (every share of a group that is not empty), D sides (one, or two for pairs).
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
        shuffled_padding: The same for shuffled batches of these sequences, without buckets.
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
    shuffled_padding: float
    largest_batch: int
    most_rows: int
    straggler: float
    correlation: float

    @property
    def padded_steps_ratio(self) -> float:
        """How many times more padded steps shuffled batches have."""
        return (1.0 - self.padding) / (1.0 - self.shuffled_padding)

    def __str__(self) -> str:
        rows = [
            ("sequences", f"{self.num_sequences:,}"),
            ("buckets", f"{self.num_buckets}"),
            ("batches", f"{self.batches:,}"),
            ("distinct shapes", f"{self.shapes:,} ({self.shapes_to_edge} padded to the edge)"),
            ("padding", f"{self.padding:.1%} of padded steps ({self.padding_to_edge:.1%} padded to the edge)"),
            ("without buckets", f"{self.shuffled_padding:.1%}: {self.padded_steps_ratio:.1f} times the padded steps"),
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
    largest_first: bool = False,
) -> EpochPlan:
    """Cut the members into groups of one bucket each, shared by all ranks; a pure function of its arguments.

    `rng` draws membership and order; None sorts both by length. `largest_first` moves the group to the front that has
    the rank's batch of most padded steps.
    """
    steps_N = steps_of(lengths_N)
    mixed_M = members_M[np.argsort(steps_N[members_M], kind="stable")] if rng is None else rng.permutation(members_M)
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
        mean_G = np.add.reduceat(steps_N[order_M], begins_G) / sizes_G
        shuffled_G = _draw_uncorrelated_order(mean_G, rng=rng)
        bucket_G, begins_G, sizes_G = bucket_G[shuffled_G], begins_G[shuffled_G], sizes_G[shuffled_G]
    plan = _arrange(order_M, begins_G=begins_G, sizes_G=sizes_G, bucket_G=bucket_G)
    if not largest_first or not len(bucket_G):
        return plan
    rows_GW, longest_GWD = _measure_shares(plan, lengths_N=lengths_N, world_size=world_size)
    largest = int((rows_GW * longest_GWD.sum(axis=2)).max(axis=1).argmax())
    places_G = np.r_[largest, np.delete(np.arange(len(bucket_G)), largest)]
    return _arrange(
        plan.order_M,
        begins_G=plan.offsets_G[:-1][places_G],
        sizes_G=np.diff(plan.offsets_G)[places_G],
        bucket_G=plan.bucket_G[places_G],
    )


def steps_of(lengths: Indices) -> Indices:
    """The steps of each sequence, or of both sides of each pair."""
    return lengths if lengths.ndim == 1 else lengths.sum(axis=1)


def _arrange(order_M: Indices, *, begins_G: Indices, sizes_G: Indices, bucket_G: Indices) -> EpochPlan:
    """The groups that begin at these places of `order_M`, one after the other."""
    offsets_G = np.append(0, np.cumsum(sizes_G))
    order_M = order_M[np.arange(len(order_M)) + np.repeat(begins_G - offsets_G[:-1], sizes_G)]
    return EpochPlan(order_M=order_M, offsets_G=offsets_G, bucket_G=bucket_G)


def _measure_shares(plan: EpochPlan, *, lengths_N: Indices, world_size: int) -> tuple[Indices, Indices]:
    """Sequences (G, W) of each rank's batches, and their longest (G, W, D), 0 where there are none."""
    offsets = plan.share_offsets(world_size)
    rows = np.diff(offsets)
    lengths_MD = lengths_N.reshape(len(lengths_N), -1)[plan.order_M]
    longest = np.zeros((len(rows), lengths_MD.shape[1]), dtype=np.int64)
    longest[rows > 0] = np.maximum.reduceat(lengths_MD, offsets[:-1][rows > 0])
    return rows.reshape(plan.num_batches, world_size), longest.reshape(plan.num_batches, world_size, -1)


def adjacent_correlation(values_G: npt.NDArray[np.float64]) -> float:
    """The correlation of each value with the next; 0 when it is not defined."""
    if len(values_G) < 3:
        return 0.0
    now, following = values_G[:-1] - values_G[:-1].mean(), values_G[1:] - values_G[1:].mean()
    scale = float(np.sqrt((now**2).sum() * (following**2).sum()))
    return float((now * following).sum()) / scale if scale > 0 else 0.0


def _draw_uncorrelated_order(mean_G: npt.NDArray[np.float64], *, rng: np.random.Generator) -> Indices:
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
    plan: EpochPlan,
    *,
    lengths_N: npt.NDArray[np.int64],
    buckets: Buckets,
    world_size: int,
    epoch: int,
    batch_size: int | None,
    max_padded_steps: int | None,
) -> SamplerReport:
    """The batches of a plan over all ranks, in numbers, beside shuffled ones of the same limits."""
    rows_GW, longest_GWD = _measure_shares(plan, lengths_N=lengths_N, world_size=world_size)
    filled_GW = rows_GW > 0
    rows_B, longest_BD = rows_GW[filled_GW], longest_GWD[filled_GW]
    edges_KD = buckets.edges_K.reshape(len(buckets.edges_K), -1)
    edge_BD = edges_KD[np.repeat(plan.bucket_G, world_size)[filled_GW.ravel()]]
    padded_B, to_edge_B = rows_B * longest_BD.sum(axis=1), rows_B * edge_BD.sum(axis=1)
    steps_M = steps_of(lengths_N)[plan.order_M]
    longest_GW = longest_GWD.sum(axis=2)
    mean_G = np.add.reduceat(steps_M, plan.offsets_G[:-1]) / np.diff(plan.offsets_G)
    real = int(steps_M.sum())
    shuffled = shuffled_padded_steps(
        lengths_N[np.sort(plan.order_M)], batch_size=batch_size, max_padded_steps=max_padded_steps
    )
    return SamplerReport(
        epoch=epoch,
        num_sequences=len(plan.order_M),
        num_buckets=len(np.unique(plan.bucket_G)),
        batches=plan.num_batches,
        shapes=len(np.unique(np.column_stack([rows_B, longest_BD]), axis=0)),
        shapes_to_edge=len(np.unique(np.column_stack([rows_B, edge_BD]), axis=0)),
        padding=1.0 - real / int(padded_B.sum()),
        padding_to_edge=1.0 - real / int(to_edge_B.sum()),
        shuffled_padding=1.0 - real / shuffled,
        largest_batch=int(to_edge_B.max()),
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
    order_ND = np.random.default_rng(seed).permutation(lengths_N).reshape(len(lengths_N), -1)
    if max_padded_steps is None:
        begins_G = np.arange(0, len(order_ND), batch_size)
        sizes_G = np.diff(np.append(begins_G, len(order_ND)))
        return int((np.maximum.reduceat(order_ND, begins_G).sum(axis=1) * sizes_G).sum())
    total, rows, longest = 0, 0, [0] * order_ND.shape[1]
    for lengths in order_ND.tolist():
        wider = [*map(max, longest, lengths)]
        if (rows + 1) * sum(wider) > max_padded_steps or rows == batch_size:
            total, rows, wider = total + rows * sum(longest), 0, lengths
        rows, longest = rows + 1, wider
    return total + rows * sum(longest)
