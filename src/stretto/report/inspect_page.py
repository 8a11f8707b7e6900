"""What the lengths of a set mean for its batches: the numbers, how a terminal shows them, and their page.

Shape legend: N sequences, G batches, M sequences in the order of the batches, H bins of the histogram.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, final

import numpy as np
import numpy.typing as npt
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stretto.batching import BucketSampler
from stretto.data import PARTS, Labels, NoTargets, SequenceSet, StepLabels
from stretto.files import write_text_atomically
from stretto.report.figures import lengths_figure
from stretto.report.page import columns, facts, headline, join, page, paragraph, times_fewer

Lengths = npt.NDArray[np.int64]
TARGET_KINDS: Final[Mapping[type, str]] = {NoTargets: "none", StepLabels: "labels of steps", Labels: "labels"}

QUANTILES: Final = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
BUCKET_HEADER: Final = ("lengths", "sequences", "batches", "largest batch", "padding")
USUAL_SHARE: Final = 0.99
"""Share of the sequences, the shortest, that the histogram resolves finely."""
USUAL_BINS, MAX_BINS = 60, 240
MAX_LINES: Final = 18
MIN_BAR_WIDTH, MAX_BAR_WIDTH = 8, 60
MAX_EDGES_LISTED: Final = 4
EIGHTHS: Final = "▏▎▍▌▋▊▉"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthHistogram:
    """How many sequences have which length, in equal bins of whole lengths."""

    bounds: tuple[int, ...]
    """Where the bins begin, and the end of the last. A bin holds its begin but not its end."""
    counts: tuple[int, ...]


def length_histogram(lengths_N: Lengths) -> LengthHistogram:
    """Count lengths in at most 60 bins up to the 99 % quantile and as many more as the rest needs, at most 240 in all.

    All bins are equally wide and their bounds whole, so that none holds more distinct lengths than another.
    """
    low, high = int(lengths_N.min()), int(lengths_N.max())
    usual = int(np.quantile(lengths_N, USUAL_SHARE))
    width = max(-(-(usual - low + 1) // USUAL_BINS), -(-(high - low + 1) // MAX_BINS))
    counts_H = np.bincount((lengths_N - low) // width)
    bounds_H = low + width * np.arange(len(counts_H) + 1)
    return LengthHistogram(bounds=tuple(bounds_H.tolist()), counts=tuple(counts_H.tolist()))


class BucketRow(NamedTuple):
    """One bucket in one epoch: its edge, sequences, batches, most sequences per batch, and share of padding."""

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
    """

    data: SequenceSet
    parts: Mapping[str, int]  # sequences of train, valid and test
    whose: str  # "training sequences", or "sequences" for all
    batch_size: int | None
    max_padded_steps: int | None
    quantiles: Mapping[float, float]  # length by share of sequences, from 0 (the shortest) to 1 (the longest)
    mean: float
    histogram: LengthHistogram
    edges: Sequence[int]
    buckets: Sequence[BucketRow]
    batches: int
    shuffled_padding: float  # share of padded steps that is padding when batches are drawn from all sequences
    padding: float  # the same with buckets
    padded_steps_ratio: float  # padded steps of the shuffled batches over those with buckets


def inspect_lengths(
    data: SequenceSet, *, batch_size: int | None, max_padded_steps: int | None, num_buckets: int | Literal["auto"]
) -> Inspection:
    """Measure the lengths of `data` and the batches that a `BucketSampler` with these arguments would draw from it."""
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
    return Inspection(
        data=data,
        parts={part: int((data.split_N == number).sum()) for number, part in enumerate(PARTS)},
        whose="training sequences" if train_N.any() else "sequences",
        batch_size=batch_size,
        max_padded_steps=max_padded_steps,
        quantiles={share: float(np.quantile(lengths_N, share)) for share in QUANTILES},
        mean=float(lengths_N.mean()),
        histogram=length_histogram(lengths_N),
        edges=sampler.edges.tolist(),
        buckets=_buckets(sampler, lengths_N),
        batches=report.batches,
        shuffled_padding=report.shuffled_padding,
        padding=report.padding,
        padded_steps_ratio=report.padded_steps_ratio,
    )


def _buckets(sampler: BucketSampler, lengths_N: Lengths) -> tuple[BucketRow, ...]:
    plan = sampler.plan
    sizes_G = np.diff(plan.offsets_G)
    padded_G = np.maximum.reduceat(lengths_N[plan.order_M], plan.offsets_G[:-1]) * sizes_G
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
                padding=1.0 - int(real_G[own_G].sum()) / int(padded_G[own_G].sum()),
            )
        )
    return tuple(rows)


def render(inspection: Inspection) -> RenderableType:
    """The inspection for a terminal of any width."""
    counts = Table.grid(padding=(0, 3))
    for name, value in _count_rows(inspection):
        counts.add_row(Text(name, style="dim"), Text(_printable(value)))
    quantiles, buckets = (Table(box=None, padding=(0, 3, 0, 0), header_style="dim") for _ in range(2))
    names, values = zip(*_quantile_rows(inspection), strict=True)
    for table, header, rows in ((quantiles, names, [values]), (buckets, BUCKET_HEADER, _bucket_rows(inspection))):
        for name in header:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*row)
    histogram, longest = inspection.histogram, int(inspection.quantiles[1.0])
    lengths = f"Lengths of the {sum(histogram.counts):,} {inspection.whose}"
    parts: list[RenderableType] = [Text(_printable(inspection.data.name), style="bold"), counts]
    parts += [Text.assemble((lengths, "bold"), (", bucket edges at the side", "dim")), quantiles]
    parts += [LengthBars(histogram=histogram, edges=inspection.edges, longest=longest)]
    parts += [Text(f"Buckets with {_batch_rule(inspection)}", style="bold"), buckets]
    parts += [Text(_verdict(inspection), style="bold")]
    shown: list[RenderableType] = []
    for part in parts:
        shown += ["", part if isinstance(part, Text) else Padding(part, (0, 0, 0, 2))]
    return Group(*shown[1:])


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthBars:
    """The histogram in a terminal: one bar per line, as wide as there is room; ASCII where nothing else is shown."""

    histogram: LengthHistogram
    edges: Sequence[int]
    longest: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = options.ascii_only
        lines = self.lines()
        names = [_span(low, high) for low, high, _ in lines]
        marks = [self._edges_between(low, high, plain=plain) for low, high, _ in lines]
        numbers = [f"{count:,}" for _, _, count in lines]
        taken = sum(max(map(len, cells)) for cells in (names, marks, numbers)) + 6
        width = max(MIN_BAR_WIDTH, min(MAX_BAR_WIDTH, options.max_width - taken))
        most = max(count for _, _, count in lines)
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(justify="right", style="dim", no_wrap=True)
        table.add_column(width=width, style="blue", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="yellow")
        for name, (_, _, count), number, mark in zip(names, lines, numbers, marks, strict=True):
            table.add_row(name, _bar(count / most * width, plain=plain), number, mark)
        yield table

    def lines(self) -> list[tuple[int, int, int]]:
        """Shortest, longest and count of each line: equal bins up to the usual lengths, longer ones in the last."""
        bounds, counts = self.histogram.bounds, self.histogram.counts
        total_H = np.cumsum(counts)
        usual = int(np.searchsorted(total_H, USUAL_SHARE * total_H[-1])) + 1
        step = -(-usual // MAX_LINES)
        begins = list(range(0, usual, step))
        if begins[-1] + step < len(counts):
            begins.append(begins[-1] + step)
        ends = [*begins[1:], len(counts)]
        return [
            (bounds[begin], min(bounds[end] - 1, self.longest), sum(counts[begin:end]))
            for begin, end in zip(begins, ends, strict=True)
        ]

    def _edges_between(self, low: int, high: int, *, plain: bool) -> str:
        within = [f"{edge:,}" for edge in self.edges if low <= edge <= high]
        if not within:
            return ""
        listed = ", ".join(within)
        if len(within) > MAX_EDGES_LISTED:
            listed = f"{len(within)} edges, {within[0]} to {within[-1]}"
        return f"{'<' if plain else '◂'} {listed}"


def _bar(length: float, *, plain: bool) -> str:
    """A bar of that many characters, to an eighth; anything above zero is visible."""
    eighths = max(round(length * 8), 1 if length > 0 else 0)
    if plain:
        return "#" * -(-eighths // 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8 - 1] if eighths % 8 else "")


def write_inspection_page(inspection: Inspection, path: Path) -> None:
    """Write the inspection as one HTML file that needs nothing else."""
    histogram = inspection.histogram
    shortest, median, longest = (f"{inspection.quantiles[share]:,.0f}" for share in (0.0, 0.5, 1.0))
    numbers = [
        ("Sequences", f"{len(inspection.data):,}", f"{inspection.data.num_steps:,} steps in all"),
        ("Median length", median, f"from {shortest} to {longest} steps"),
        ("Padding, shuffled", f"{inspection.shuffled_padding:.1%}", "of padded steps"),
        ("Padding, in buckets", f"{inspection.padding:.1%}", f"{len(inspection.edges)} buckets"),
        ("Padded steps saved", times_fewer(inspection.padded_steps_ratio), f"{inspection.batches:,} batches per epoch"),
    ]
    lengths = lengths_figure(
        bounds=histogram.bounds, counts=histogram.counts, edges=inspection.edges, whose=inspection.whose
    )
    names, values = zip(*_quantile_rows(inspection), strict=True)
    buckets = paragraph(f"With {_batch_rule(inspection)}. {_verdict(inspection)}")
    text = page(
        title=f"Lengths of {inspection.data.name}",
        subtitle=f"What its batches will be: {_batch_rule(inspection)}",
        top=[headline(numbers)],
        sections=[
            ("Lengths", join([lengths, columns(names, [values])])),
            ("Buckets", join([buckets, columns(BUCKET_HEADER, _bucket_rows(inspection))])),
            ("The set", facts(_count_rows(inspection))),
        ],
        footer="Batches are padded to their longest sequence; shuffled batches are drawn with one seed.",
    )
    write_text_atomically(path, text)


def _count_rows(inspection: Inspection) -> list[tuple[str, str]]:
    """What the set holds, as names and values."""
    data, parts = inspection.data, ", ".join(f"{count:,} {part}" for part, count in inspection.parts.items())
    where = "memory-mapped from disk" if data.memory_mapped else "in memory"
    return [
        ("sequences", f"{len(data):,} ({parts})"),
        ("steps", f"{data.num_steps:,}"),
        ("features", f"{data.num_features:,} per step, {where}"),
        ("targets", TARGET_KINDS.get(type(data.targets), "transcripts")),
        *(("note", note) for note in data.notes),
    ]


def _quantile_rows(inspection: Inspection) -> list[tuple[str, str]]:
    """The quantiles and the mean of the lengths, as names and values."""

    def plain(value: float) -> str:
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"

    names = {0.0: "shortest", 0.5: "median", 1.0: "longest"}
    rows = [(names.get(share, f"{share:.0%}"), plain(length)) for share, length in inspection.quantiles.items()]
    return [*rows, ("mean", plain(inspection.mean))]


def _bucket_rows(inspection: Inspection) -> list[tuple[str, ...]]:
    """The buckets, as cells under `BUCKET_HEADER`."""
    lows = [int(inspection.quantiles[0.0]), *(edge + 1 for edge in inspection.edges[:-1])]
    return [
        (_span(low, edge), f"{sequences:,}", f"{batches:,}", f"{rows:,}", f"{padding:.1%}")
        for low, (edge, sequences, batches, rows, padding) in zip(lows, inspection.buckets, strict=True)
    ]


def _batch_rule(inspection: Inspection) -> str:
    """What bounds a batch, in words."""
    rules = [
        f"at most {inspection.batch_size:,} sequences" if inspection.batch_size is not None else "",
        f"at most {inspection.max_padded_steps:,} padded steps" if inspection.max_padded_steps is not None else "",
    ]
    return " and ".join(filter(None, rules)) + " per batch"


def _verdict(inspection: Inspection) -> str:
    """Before and after, in one sentence."""
    num, saved = len(inspection.edges), times_fewer(inspection.padded_steps_ratio, digits=2)
    return (
        f"Padding: {inspection.shuffled_padding:.1%} of padded steps when shuffled, {inspection.padding:.1%} in "
        f"{num} {'bucket' if num == 1 else 'buckets'}: {saved} padded steps."
    )


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _printable(text: str) -> str:
    """Without control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
