"""What the lengths of a set mean for its batches: numbers, and how a terminal shows them.

Shape legend: N sequences, G batches, M sequences in the order of the batches.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stretto.batching import BucketSampler, shuffled_slots
from stretto.data import PARTS, AbstractTargets, Labels, NoTargets, SequenceSet, StepLabels
from stretto.report.length_bars import LengthBars, span
from stretto.report.length_histogram import length_histogram

Lengths = npt.NDArray[np.int64]
TargetKind = Literal["transcripts", "labels", "labels of steps", "none"]

QUANTILES: Final = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
BUCKET_HEADER: Final = ("lengths", "sequences", "batches", "rows a batch", "padding")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketRow:
    """One bucket in one epoch.

    Attributes:
        edge: The longest that it takes.
        sequences: In the bucket.
        batches: Drawn from it in an epoch.
        rows: Most sequences of one batch.
        padding: Share of the slots of its batches that is padding.
    """

    edge: int
    sequences: int
    batches: int
    rows: int
    padding: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The lengths of a set and what they mean for its batches.

    Lengths and batches are those of the training sequences, as training will draw them, or of all sequences when
    none is marked for training. Batches are padded to their longest sequence.

    Attributes:
        name: Of the set.
        num_sequences: In all parts together.
        parts: Sequences of train, valid and test.
        num_steps: Steps of all sequences together.
        num_features: Features of a step.
        target_kind: "transcripts", "labels", "labels of steps" or "none".
        memory_mapped: Whether the features stay on disk until they are used.
        notes: What the reader did that the user should know.
        whose: The sequences whose lengths follow: "training sequences", or "sequences" for all.
        batch_size: Most sequences of a batch, as asked for.
        max_padded_steps: Most slots of a batch, as asked for.
        quantiles: Length by share of sequences, from 0 (the shortest) to 1 (the longest).
        mean: Of the lengths.
        bounds: Where the bins of the histogram begin, and the end of the last; a bin holds its begin, not its end.
        counts: Sequences in each bin.
        edges: The bucket edges.
        buckets: One row a bucket.
        batches: Of an epoch with buckets.
        shuffled_padding: Share of slots that is padding when batches are drawn from all sequences.
        padding: The same with buckets.
        slot_ratio: Slots of the shuffled batches over slots with buckets.
    """

    name: str
    num_sequences: int
    parts: Mapping[str, int]
    num_steps: int
    num_features: int
    target_kind: TargetKind
    memory_mapped: bool
    notes: Sequence[str]
    whose: str
    batch_size: int | None
    max_padded_steps: int | None
    quantiles: Mapping[float, float]
    mean: float
    bounds: Sequence[int]
    counts: Sequence[int]
    edges: Sequence[int]
    buckets: Sequence[BucketRow]
    batches: int
    shuffled_padding: float
    padding: float
    slot_ratio: float


def inspect_lengths(
    data: SequenceSet, *, batch_size: int | None, max_padded_steps: int | None, num_buckets: int | Literal["auto"]
) -> Inspection:
    """Measure the lengths of `data` and the batches that `BucketSampler` would draw from it.

    Args:
        data: The set.
        batch_size: Most sequences of a batch.
        max_padded_steps: Most slots of a batch. At least one of the two must be given.
        num_buckets: How many buckets, or "auto".
    """
    train_N = data.split_N == PARTS.index("train")
    lengths_N = data.lengths_N[train_N] if train_N.any() else data.lengths_N
    sampler = BucketSampler(
        lengths_N,
        batch_size=batch_size,
        max_padded_steps=max_padded_steps,
        num_buckets=num_buckets,
        rank=0,
        world_size=1,
    )
    report = sampler.report()
    real = int(lengths_N.sum())
    shuffled = shuffled_slots(lengths_N, batch_size=batch_size, max_padded_steps=max_padded_steps)
    histogram = length_histogram(lengths_N)
    return Inspection(
        name=data.name,
        num_sequences=len(data),
        parts={part: int((data.split_N == number).sum()) for number, part in enumerate(PARTS)},
        num_steps=data.num_steps,
        num_features=data.num_features,
        target_kind=_kind(data.targets),
        memory_mapped=data.memory_mapped,
        notes=data.notes,
        whose="training sequences" if train_N.any() else "sequences",
        batch_size=batch_size,
        max_padded_steps=max_padded_steps,
        quantiles={share: float(np.quantile(lengths_N, share)) for share in QUANTILES},
        mean=float(lengths_N.mean()),
        bounds=histogram.bounds,
        counts=histogram.counts,
        edges=sampler.edges.tolist(),
        buckets=_buckets(sampler, lengths_N),
        batches=report.batches,
        shuffled_padding=1.0 - real / shuffled,
        padding=report.padding,
        slot_ratio=shuffled * (1.0 - report.padding) / real,
    )


def render(inspection: Inspection) -> RenderableType:
    """The inspection for a terminal of any width."""
    counts = Table.grid(padding=(0, 3))
    for name, value in count_rows(inspection):
        counts.add_row(Text(name, style="dim"), Text(_printable(value)))
    quantiles = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    row = []
    for name, value in quantile_rows(inspection):
        quantiles.add_column(name, justify="right")
        row.append(value)
    quantiles.add_row(*row)
    buckets = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for name in BUCKET_HEADER:
        buckets.add_column(name, justify="right")
    for cells in bucket_rows(inspection):
        buckets.add_row(*cells)
    title = Text(_printable(inspection.name), style="bold")
    lengths = f"Lengths of the {sum(inspection.counts):,} {inspection.whose}"
    parts: list[RenderableType] = [title, "", _indented(counts)]
    parts += ["", Text.assemble((lengths, "bold"), (", bucket edges at the side", "dim")), ""]
    bars = LengthBars(
        bounds=inspection.bounds,
        counts=inspection.counts,
        edges=inspection.edges,
        longest=int(inspection.quantiles[1.0]),
    )
    parts += [_indented(quantiles), "", _indented(bars)]
    parts += ["", Text(f"Buckets with {batch_rule(inspection)}", style="bold"), "", _indented(buckets)]
    parts += ["", Text(verdict(inspection), style="bold")]
    return Group(*parts)


def count_rows(inspection: Inspection) -> list[tuple[str, str]]:
    """What the set holds, as names and values."""
    parts = ", ".join(f"{count:,} {part}" for part, count in inspection.parts.items())
    where = "memory-mapped from disk" if inspection.memory_mapped else "in memory"
    return [
        ("sequences", f"{inspection.num_sequences:,} ({parts})"),
        ("steps", f"{inspection.num_steps:,}"),
        ("features", f"{inspection.num_features:,} a step, {where}"),
        ("targets", inspection.target_kind),
        *(("note", note) for note in inspection.notes),
    ]


def quantile_rows(inspection: Inspection) -> list[tuple[str, str]]:
    """The quantiles and the mean of the lengths, as names and values."""
    names = {0.0: "shortest", 0.5: "median", 1.0: "longest"}
    rows = [(names.get(share, f"{share:.0%}"), _plain(length)) for share, length in inspection.quantiles.items()]
    return [*rows, ("mean", _plain(inspection.mean))]


def bucket_rows(inspection: Inspection) -> list[tuple[str, ...]]:
    """The buckets, as cells under `BUCKET_HEADER`."""
    lows = [int(inspection.quantiles[0.0]), *(edge + 1 for edge in inspection.edges[:-1])]
    return [
        (
            span(low, bucket.edge),
            f"{bucket.sequences:,}",
            f"{bucket.batches:,}",
            f"{bucket.rows:,}",
            f"{bucket.padding:.1%}",
        )
        for low, bucket in zip(lows, inspection.buckets, strict=True)
    ]


def batch_rule(inspection: Inspection) -> str:
    """What bounds a batch, in words."""
    rules = [
        f"at most {inspection.batch_size:,} sequences" if inspection.batch_size is not None else "",
        f"at most {inspection.max_padded_steps:,} slots" if inspection.max_padded_steps is not None else "",
    ]
    return " and ".join(filter(None, rules)) + " a batch"


def verdict(inspection: Inspection) -> str:
    """Before and after, in one sentence."""
    num, ratio = len(inspection.edges), inspection.slot_ratio
    saved = f"{ratio:.2f}x fewer slots" if ratio >= 1 else f"{1 / ratio:.2f}x more slots"
    return (
        f"Padding: {inspection.shuffled_padding:.1%} of slots when shuffled, {inspection.padding:.1%} in "
        f"{num} {'bucket' if num == 1 else 'buckets'}: {saved}."
    )


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2))


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _printable(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _kind(targets: AbstractTargets) -> TargetKind:
    if isinstance(targets, NoTargets):
        return "none"
    if isinstance(targets, StepLabels):
        return "labels of steps"
    return "labels" if isinstance(targets, Labels) else "transcripts"


def _buckets(sampler: BucketSampler, lengths_N: Lengths) -> tuple[BucketRow, ...]:
    plan = sampler.plan
    sizes_G = np.diff(plan.offsets_G)
    slots_G = np.maximum.reduceat(lengths_N[plan.order_M], plan.offsets_G[:-1]) * sizes_G
    real_G = np.add.reduceat(lengths_N[plan.order_M], plan.offsets_G[:-1])
    rows = []
    for number, edge in enumerate(sampler.edges.tolist()):
        own_G = plan.bucket_G == number
        rows.append(
            BucketRow(
                edge=edge,
                sequences=int(sizes_G[own_G].sum()),
                batches=int(own_G.sum()),
                rows=int(sizes_G[own_G].max()),
                padding=1.0 - int(real_G[own_G].sum()) / int(slots_G[own_G].sum()),
            )
        )
    return tuple(rows)
