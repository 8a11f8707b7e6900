"""What a sampler's epoch looks like in numbers.

Shape legend: B batches (every share of every step that is not empty), G steps, W ranks.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from stretto.batching.plan import Buckets, EpochPlan, adjacent_correlation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplerReport:
    """The batches of one epoch over all ranks.

    Attributes:
        epoch: Which epoch.
        num_sequences: Sequences dealt out.
        num_buckets: Buckets that hold a sequence.
        batches: Steps, the same on every rank.
        shapes: Distinct (rows, steps) when each batch is padded to its longest sequence.
        shapes_to_edge: The same when padded to the bucket's edge.
        padding: Share of slots that are padding when each batch is padded to its longest sequence.
        padding_to_edge: The same when padded to the bucket's edge.
        largest_batch: Most slots of one batch, padded to the edge: what memory must hold.
        most_rows: Most sequences of one batch.
        straggler: Sum over steps of the longest rank's length over the sum of the mean length; 1 is no waiting.
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
            ("padding", f"{self.padding:.1%} of slots ({self.padding_to_edge:.1%} padded to the edge)"),
            ("largest batch", f"{self.largest_batch:,} slots, at most {self.most_rows} sequences"),
            ("straggler factor", f"{self.straggler:.3f}"),
            ("adjacent correlation", f"{self.correlation:+.3f}"),
        ]
        return "\n".join(f"{name:<21}{value}" for name, value in rows)


def report_on(
    plan: EpochPlan, *, lengths_N: npt.NDArray[np.int64], buckets: Buckets, world_size: int, epoch: int
) -> SamplerReport:
    """Measure a plan over all ranks."""
    offsets = plan.share_offsets(world_size)
    sizes_GW = np.diff(offsets).reshape(plan.num_steps, world_size)
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
        batches=plan.num_steps,
        shapes=len(np.unique(np.stack([rows_B, longest_B]), axis=1).T),
        shapes_to_edge=len(np.unique(np.stack([rows_B, edge_B]), axis=1).T),
        padding=1.0 - real / int((rows_B * longest_B).sum()),
        padding_to_edge=1.0 - real / int((rows_B * edge_B).sum()),
        largest_batch=int((rows_B * edge_B).max()),
        most_rows=int(rows_B.max()),
        straggler=float(longest_GW.max(axis=1).sum() / longest_GW.mean(axis=1).sum()),
        correlation=adjacent_correlation(mean_G),
    )
