"""`python -m bench buckets`: the batches of our `BucketSampler` compared with those of other samplers.

Shape legend: N sequences of the set, M sequences drawn, B batches that are not empty, G updates, W ranks, K buckets.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from bench.harness import Count, Report, Settings, bench
from bench.samplers import (
    Draw,
    Lengths,
    Sampler,
    available_samplers,
    equal_mass_edges,
    percentile_edges,
    uniform_edges,
)
from stretto.batching import adjacent_correlation, bucket_of, optimal_edges, padded_cost
from stretto.data import load_handwriting
from stretto.errors import StrettoError

Batches = list[list[int]]
Distribution = Literal["log-normal", "log-normal-wide", "two-mode", "uniform", "handwriting"]

DISTRIBUTIONS: Final[tuple[Distribution, ...]] = get_args(Distribution)
DESCRIPTIONS: Final[dict[Distribution, str]] = {
    "log-normal": "log-normal(6.2, 0.6) in [50, 3000]",
    "log-normal-wide": "log-normal(5, 1) in [16, 1024]",
    "two-mode": "two modes as in read speech: 30 % near 550, 70 % near 1510, in [80, 2000]",
    "uniform": "uniform in [10, 1000]",
    "handwriting": "the embedded handwriting, all of its lines",
}
BATCH_ROWS: Final = 64
"""Average sequences per batch, if no cap is given."""
ORDER_BUCKETS: Final = 10
"""Intervals for comparing the order of lengths, for samplers without buckets."""
EDGE_BUCKETS: Final = (5, 10, 30)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketsSettings(Settings):
    """Compare the batches of our sampler with those of other samplers.

    Attributes:
        num_sequences: Sequences drawn from each distribution; the handwriting has its own number.
        num_buckets: Numbers of buckets to compare at, each at least 2.
        nproc: Ranks that share an epoch.
        lengths: Distributions of lengths: log-normal, log-normal-wide, two-mode, uniform, handwriting.
        seeds: Repeats of each timing, at least 2; the least counts.
        max_padded_steps: Cap on the padded steps of a batch; 64 average sequences if left out.
    """

    num_sequences: Count = 40_000
    num_buckets: tuple[Count, ...] = (10, 30)
    nproc: Count = 4
    lengths: tuple[Distribution, ...] = ("log-normal", "log-normal-wide", "two-mode")
    seeds: Count = 3
    max_padded_steps: Count | None = None

    def __post_init__(self) -> None:
        if self.seeds < 2 or min(self.num_buckets, default=0) < 2:
            raise StrettoError(
                f"seeds={self.seeds} and num_buckets={self.num_buckets} are too few to compare", fix="Give at least 2."
            )
        if self.num_sequences < max(self.num_buckets):
            raise StrettoError(
                f"num_sequences={self.num_sequences} cannot fill {max(self.num_buckets)} buckets",
                fix="Give at least as many sequences as buckets.",
            )
        if not self.lengths:
            raise StrettoError("no distribution of lengths is given", fix=f"Choose from {', '.join(DISTRIBUTIONS)}.")


@bench("buckets", title="Our sampler compared with others")
def run(settings: BucketsSettings, report: Report) -> None:
    """Compare all samplers on each distribution of lengths."""
    if settings.quick:
        settings = dataclasses.replace(
            settings, num_sequences=600, num_buckets=(4,), nproc=2, lengths=("uniform",), seeds=2
        )
    samplers, missing = available_samplers()
    for what, why in missing.items():
        report.skip(what, why)
    edge_rows: list[tuple[Any, ...]] = []
    for name in settings.lengths:
        report.progress(f"{name}: {len(samplers)} samplers")
        lengths_N = draw_lengths(name, settings.num_sequences)
        _compare(samplers, name, lengths_N, settings, report)
        edge_rows += [_edge_row(name, lengths_N, num_buckets) for num_buckets in EDGE_BUCKETS]
    report.table(
        title="Edges alone: padding % when every sequence is padded to its edge",
        columns=("lengths", "K", "optimal", "equal mass", "percentile", "uniform"),
        rows=edge_rows,
        caption="Arithmetic, nothing timed. Equal mass: Lhotse, NeMo; percentile: fairseq.",
    )
    report.table(title="Samplers", columns=("sampler", "note"), rows=[(one.name, one.note) for one in samplers])


def draw_lengths(name: Distribution, num_sequences: int) -> Lengths:
    """Lengths of a set, the same for the same arguments; the handwriting is what it is."""
    rng = np.random.default_rng(0)
    if name == "log-normal":
        return _round_clipped(rng.lognormal(6.2, 0.6, num_sequences), 50, 3000)
    if name == "log-normal-wide":
        return _round_clipped(rng.lognormal(5.0, 1.0, num_sequences), 16, 1024)
    if name == "two-mode":
        short_N = rng.random(num_sequences) < 0.3
        drawn_N = np.where(short_N, rng.normal(550, 220, num_sequences), rng.normal(1510, 160, num_sequences))
        return _round_clipped(drawn_N, 80, 2000)
    if name == "uniform":
        return rng.integers(10, 1000, num_sequences, endpoint=True)
    return load_handwriting().lengths_N.astype(np.int64)


def _round_clipped(drawn_N: npt.NDArray[np.float64], shortest: int, longest: int) -> Lengths:
    return np.clip(np.rint(drawn_N), shortest, longest).astype(np.int64)


def _edge_row(name: str, lengths_N: Lengths, num_buckets: int) -> tuple[Any, ...]:
    rules = (optimal_edges, equal_mass_edges, percentile_edges, uniform_edges)
    real = int(lengths_N.sum())
    wastes = (100 * (1 - real / padded_cost(lengths_N, rule(lengths_N, num_buckets))) for rule in rules)
    return (name, num_buckets, *wastes)


COLUMNS: Final = (
    *("sampler", "K", "waste %", "to edge %", "cap %", "seen %", "twice %", "batches", "shapes", "serial steps"),
    *("length wait", "step wait", "corr.", "same order", "first s", "next ms"),
)
CAPTION: Final = (
    "waste: padding to the longest of the batch; to edge: to the edge of its bucket. cap: largest batch over the cap. "
    "seen, twice: sequences drawn at least once, more than once. serial steps: sum over updates of the longest rank's "
    "length. wait: slowest rank over the mean, by length and by padded steps; 1 is none. corr.: of the lengths of "
    "adjacent updates. same order: of mean lengths in two epochs of two seeds; 0 is chance, 1 is the same. "
    "first, next: time to a batch on rank 0, the least over seeds, in turn. Counts are of seed 0, all ranks."
)


def _compare(
    samplers: Sequence[Sampler], name: Distribution, lengths_N: Lengths, settings: BucketsSettings, report: Report
) -> None:
    """Draw with every sampler in turn, seed after seed, and then count."""
    cap = settings.max_padded_steps or default_cap(lengths_N)
    entries = [(sampler, count) for count in settings.num_buckets for sampler in samplers if sampler.has_buckets]
    entries += [(sampler, ORDER_BUCKETS) for sampler in samplers if not sampler.has_buckets]
    for sampler in samplers:
        sampler.prepare(lengths_N)

    def draw(sampler: Sampler, num_buckets: int, *, seed: int, rank: int) -> TimedBatches:
        request = Draw(
            max_padded_steps=cap,
            num_buckets=num_buckets,
            seed=seed,
            epoch=seed,
            rank=rank,
            world_size=settings.nproc,
        )
        return time_batches(sampler.batches(lengths_N, request))

    drawn: list[list[TimedBatches]] = [[] for _ in entries]
    for seed in range(settings.seeds):
        for (sampler, count), mine in zip(entries, drawn, strict=True):
            mine.append(draw(sampler, count, seed=seed, rank=0))
    rows = []
    for (sampler, count), mine in zip(entries, drawn, strict=True):
        others = [draw(sampler, count, seed=0, rank=rank).batches for rank in range(1, settings.nproc)]
        counts = count_epoch(
            [mine[0].batches, *others],
            lengths_N=lengths_N,
            max_padded_steps=cap,
            edges_K=sampler.edges(lengths_N, count),
        )
        ruler_K = equal_mass_edges(lengths_N, count)
        match = order_match(mine[0].batches, mine[1].batches, lengths_N=lengths_N, ruler_K=ruler_K)
        next_ms = min((one.ms_per_batch for one in mine if one.ms_per_batch is not None), default=None)
        rows.append(
            (
                *(sampler.name, count if sampler.has_buckets else None),
                *(100 * counts.waste, None if counts.waste_to_edge is None else 100 * counts.waste_to_edge),
                *(100 * counts.cap, 100 * counts.coverage, 100 * counts.repeated, counts.batches, counts.shapes),
                *(counts.serial_steps, counts.length_straggler, counts.step_straggler, counts.correlation, match),
                *(min(one.first_seconds for one in mine), next_ms),
            )
        )
    title = (
        f"{name}: {DESCRIPTIONS[name]}; {len(lengths_N):,} sequences of {lengths_N.mean():,.0f} steps on average, "
        f"at most {cap:,} padded steps per batch, ranks: {settings.nproc}"
    )
    report.table(title=title, columns=COLUMNS, rows=rows, caption=CAPTION)


def default_cap(lengths_N: Lengths) -> int:
    """Padded steps of 64 average sequences, or of the longest one."""
    return max(int(BATCH_ROWS * lengths_N.mean()), int(lengths_N.max()))


# What a sampler drew, in numbers -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimedBatches:
    """Batches of one rank, the seconds until the first, and the mean of the others (None if there is only one)."""

    batches: Batches
    first_seconds: float
    ms_per_batch: float | None


def time_batches(batches: Iterator[list[int]]) -> TimedBatches:
    """Draw all batches, timed."""
    drawn: Batches = []
    first = begin = time.perf_counter()
    for batch in batches:
        drawn.append(batch)
        if len(drawn) == 1:
            first = time.perf_counter()
    end = time.perf_counter()
    return TimedBatches(
        batches=drawn,
        first_seconds=first - begin,
        ms_per_batch=(end - first) * 1e3 / (len(drawn) - 1) if len(drawn) > 1 else None,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochCounts:
    """One epoch over all ranks."""

    waste: float  # share of padded steps that are padding when each batch is padded to its longest sequence
    waste_to_edge: float | None  # the same when padded to the bucket's edge; None without fixed edges
    cap: float  # padded steps of the largest batch over `max_padded_steps`
    coverage: float  # share of the sequences that are drawn at least once
    repeated: float  # share of the sequences that are drawn more than once
    batches: int  # of all ranks, those that are not empty
    shapes: int  # distinct (rows, steps) of padded batches
    serial_steps: int  # sum over updates of the longest rank's length: the time steps that follow one another
    length_straggler: float  # that over the sum of the mean length; 1 is no waiting
    step_straggler: float  # the same of padded steps
    correlation: float  # of the mean lengths of adjacent updates, all ranks together


def count_epoch(
    ranks: list[Batches], *, lengths_N: Lengths, max_padded_steps: int, edges_K: Lengths | None = None
) -> EpochCounts:
    """Count what all ranks drew in one epoch; batches can be padded to the edges, if there are any."""
    num_updates = max(map(len, ranks))
    sizes_WG = np.array([[len(b) for b in batches] + [0] * (num_updates - len(batches)) for batches in ranks])
    sequences_M = np.array([number for batches in ranks for batch in batches for number in batch], dtype=np.int64)
    lengths_M = lengths_N[sequences_M]
    filled = sizes_WG.ravel() > 0
    rows_B = sizes_WG.ravel()[filled]
    begins_B = np.cumsum(rows_B) - rows_B
    longest_B = np.maximum.reduceat(lengths_M, begins_B)
    padded_B = rows_B * longest_B
    longest_WG = np.zeros_like(sizes_WG)
    longest_WG[sizes_WG > 0] = longest_B
    update_B = np.tile(np.arange(num_updates), len(ranks))[filled]
    times_N = np.bincount(sequences_M, minlength=len(lengths_N))
    real_G = np.bincount(update_B, weights=np.add.reduceat(lengths_M, begins_B), minlength=num_updates)
    real = int(lengths_M.sum())
    edge_B = None if edges_K is None else edges_K[bucket_of(longest_B, edges_K)]
    return EpochCounts(
        waste=1.0 - real / int(padded_B.sum()),
        waste_to_edge=None if edge_B is None else 1.0 - real / int((rows_B * edge_B).sum()),
        cap=float(padded_B.max() / max_padded_steps),
        coverage=float((times_N > 0).mean()),
        repeated=float((times_N > 1).mean()),
        batches=len(rows_B),
        shapes=len(np.unique(np.stack([rows_B, longest_B]), axis=1).T),
        serial_steps=int(longest_WG.max(axis=0).sum()),
        length_straggler=_straggler(longest_WG),
        step_straggler=_straggler(longest_WG * sizes_WG),
        correlation=adjacent_correlation(real_G / sizes_WG.sum(axis=0)),
    )


def order_match(first: Batches, second: Batches, *, lengths_N: Lengths, ruler_K: Lengths) -> float:
    """How far two draws visit the lengths in the same order: 1 is the same, 0 is chance.

    It is Cohen's kappa of the two sequences of intervals of `ruler_K` that hold the batches' mean lengths.
    """
    one_G, other_G = (
        bucket_of(np.array([np.rint(lengths_N[batch].mean()) for batch in batches if batch]).astype(np.int64), ruler_K)
        for batches in (first, second)
    )
    shared = min(len(one_G), len(other_G))
    one_K, other_K = (np.bincount(found_G, minlength=len(ruler_K)) / len(found_G) for found_G in (one_G, other_G))
    chance = float((one_K * other_K).sum())
    alike = float((one_G[:shared] == other_G[:shared]).sum() / max(len(one_G), len(other_G)))
    return (alike - chance) / (1.0 - chance) if chance < 1 else 0.0


def _straggler(values_WG: Lengths) -> float:
    return float(values_WG.max(axis=0).sum() / values_WG.mean(axis=0).sum())
