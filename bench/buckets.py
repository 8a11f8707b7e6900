"""How good are the batches, and what do they cost? Our `BucketSampler` beside its peers, in one interleaved run.

Shape legend: N sequences, K buckets.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.bucket_costs import (
    EdgesRow,
    EdgeWasteRow,
    ScalingRow,
    default_max_steps,
    edge_waste_rows,
    edges_rows,
    least_ms,
    scaling_rows,
)
from bench.drawn_epoch import EpochCounts, TimedDraw, count_epoch, order_match, timed_draw
from bench.length_laws import LAW_NAMES, LawName, length_law
from bench.machine import Machine, machine_with
from bench.samplers import OURS, AbstractContestant, Draw, LhotseContestant, contestants
from stretto.batching import equal_mass_edges
from stretto.errors import StrettoError
from stretto.files import write_text_atomically

Lengths = npt.NDArray[np.int64]

RULER_BUCKETS: Final = 10
SAME_ORDER: Final = 0.9
AT_LEAST_1: Final = ("world_size", "max_padded_steps", "world_sizes", "num_large")
AT_LEAST_2: Final = ("num_sequences", "num_buckets", "seeds")
PEERS: Final = ("lhotse", "transformers")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketsBenchSettings:
    """What to compare.

    Attributes:
        num_sequences: Sequences drawn from each law; the handwriting has as many as it has.
        num_buckets: Numbers of buckets to compare at, each at least 2.
        world_size: Ranks that share an epoch.
        laws: Length laws: log-normal, log-normal-wide, two-mode, uniform, handwriting.
        seeds: Repeats of each timing, at least 2; the least counts.
        max_padded_steps: Slots that a batch may have; by default 64 average sequences of the law.
        world_sizes: World sizes at which the cost of a batch is timed.
        num_large: Sequences of the large sets on which edges, plan and resumption are timed.
        out: JSON file for the result.
    """

    num_sequences: int = 40_000
    num_buckets: tuple[int, ...] = (10, 30)
    world_size: int = 4
    laws: tuple[LawName, ...] = ("log-normal", "log-normal-wide", "two-mode")
    seeds: int = 3
    max_padded_steps: int | None = None
    world_sizes: tuple[int, ...] = (1, 8, 64)
    num_large: int = 1_000_000
    out: Path | None = None

    def __post_init__(self) -> None:
        for name in AT_LEAST_1 + AT_LEAST_2:
            given, least = getattr(self, name), 1 if name in AT_LEAST_1 else 2
            numbers = given if isinstance(given, tuple) else (given,)
            if not numbers or any(number is not None and number < least for number in numbers):
                raise StrettoError(f"{name}={given!r} is too little to compare with", fix=f"Give at least {least}.")
        if self.num_sequences < max(self.num_buckets):
            raise StrettoError(
                f"num_sequences={self.num_sequences} cannot fill {max(self.num_buckets)} buckets",
                fix="Give at least as many sequences as buckets.",
            )
        if not self.laws:
            raise StrettoError("there is no law to draw lengths from", fix=f"Name some of {', '.join(LAW_NAMES)}.")
        for law in self.laws:
            length_law(law)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketsRow(EpochCounts):
    """One sampler on one law. Counts are of seed 0, epoch 0 and all ranks; times are of rank 0 over all seeds.

    Attributes:
        law: The law's name.
        sampler: The contestant's name.
        num_buckets: Buckets asked for; None when it has none.
        order_match: How far rank 0 of (seed 0, epoch 0) and of (seed 1, epoch 1) visit the lengths in the same order:
            1 is the same, 0 is what chance gives. Judged by the batches' mean lengths, in `num_buckets` intervals
            (10 where it has none) that hold equally many steps.
        same_order: Whether that is at least 0.9: every epoch of every seed has one order.
        plan_seconds: Until the first batch; the least over the seeds.
        ms_per_batch: Mean of the other batches; the least over the seeds; None when there is only one batch.
        note: What a reader of the numbers should know.
    """

    law: str
    sampler: str
    num_buckets: int | None
    order_match: float
    same_order: bool
    plan_seconds: float
    ms_per_batch: float | None
    note: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LawFacts:
    """The lengths that a law gave.

    Attributes:
        name: The law's name.
        description: The law in a few words.
        num_sequences: Sequences.
        mean: Mean length.
        longest: Greatest length.
        max_padded_steps: Slots that a batch may have.
    """

    name: str
    description: str
    num_sequences: int
    mean: float
    longest: int
    max_padded_steps: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketsBench:
    """The result of one run.

    Attributes:
        rows: Every sampler on every law at every number of buckets.
        scaling: Cost of a batch by world size.
        edges: Edges, plan and resumption on large sets.
        edge_waste: What the edges alone waste.
        laws: The lengths used.
        world_size: Ranks that share an epoch in `rows`.
        seeds: Repeats of each timing.
        machine: Where it ran.
        missing: The peers left out, each with the reason and the way to get it.
        seconds: Time of the whole run.
    """

    rows: tuple[BucketsRow, ...]
    scaling: tuple[ScalingRow, ...]
    edges: tuple[EdgesRow, ...]
    edge_waste: tuple[EdgeWasteRow, ...]
    laws: tuple[LawFacts, ...]
    world_size: int
    seeds: int
    machine: Machine
    missing: tuple[str, ...]
    seconds: float

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False)


def run_buckets_bench(
    settings: BucketsBenchSettings | None = None, *, tell: Callable[[str], None] | None = None
) -> BucketsBench:
    """Compare the samplers; peers that are not installed are left out and named.

    Args:
        settings: What to compare.
        tell: Called with a line before each part.
    """
    settings = settings or BucketsBenchSettings()
    tell = tell or (lambda _: None)
    begin = time.perf_counter()
    present, missing = _present(contestants())
    rows: list[BucketsRow] = []
    facts: list[LawFacts] = []
    edge_waste: list[EdgeWasteRow] = []
    for name in settings.laws:
        tell(f"{name}: {len(present)} samplers")
        law = length_law(name)
        lengths_N = law.draw(settings.num_sequences)
        fact = LawFacts(
            name=name,
            description=law.description,
            num_sequences=len(lengths_N),
            mean=float(lengths_N.mean()),
            longest=int(lengths_N.max()),
            max_padded_steps=settings.max_padded_steps or default_max_steps(lengths_N),
        )
        facts.append(fact)
        rows += _compare(present, fact=fact, lengths_N=lengths_N, settings=settings)
        edge_waste += edge_waste_rows(name, lengths_N=lengths_N)
    tell(f"world sizes {', '.join(map(str, settings.world_sizes))}")
    scaling = scaling_rows(
        [contestant for contestant in present if contestant.name in (OURS, LhotseContestant.name)],
        law=length_law(settings.laws[0]),
        num_buckets=max(settings.num_buckets),
        world_sizes=settings.world_sizes,
        seeds=settings.seeds,
    )
    tell(f"sets of {settings.num_large:,} sequences")
    bench = BucketsBench(
        rows=tuple(rows),
        scaling=scaling,
        edges=edges_rows(settings.num_large, repeats=settings.seeds),
        edge_waste=tuple(edge_waste),
        laws=tuple(facts),
        world_size=settings.world_size,
        seeds=settings.seeds,
        machine=machine_with(PEERS),
        missing=missing,
        seconds=time.perf_counter() - begin,
    )
    if settings.out is not None:
        write_text_atomically(settings.out, bench.to_json() + "\n")
    return bench


def _compare(
    present: Sequence[AbstractContestant], *, fact: LawFacts, lengths_N: Lengths, settings: BucketsBenchSettings
) -> list[BucketsRow]:
    """Draw with every contestant in turn, seed after seed, and then count."""
    entries = [(contestant, k) for k in settings.num_buckets for contestant in present if contestant.has_buckets]
    entries += [(contestant, RULER_BUCKETS) for contestant in present if not contestant.has_buckets]
    draws: list[list[TimedDraw]] = [[] for _ in entries]
    for contestant in present:
        contestant.prepare(lengths_N)

    def draw(contestant: AbstractContestant, num_buckets: int, *, seed: int, rank: int) -> TimedDraw:
        asked = Draw(
            max_padded_steps=fact.max_padded_steps,
            num_buckets=num_buckets,
            seed=seed,
            epoch=seed,
            rank=rank,
            world_size=settings.world_size,
        )
        return timed_draw(contestant.batches(lengths_N, asked))

    for seed in range(settings.seeds):
        for (contestant, num_buckets), mine in zip(entries, draws, strict=True):
            mine.append(draw(contestant, num_buckets, seed=seed, rank=0))
    rows = []
    for (contestant, num_buckets), mine in zip(entries, draws, strict=True):
        others = [draw(contestant, num_buckets, seed=0, rank=rank).batches for rank in range(1, settings.world_size)]
        counts = count_epoch(
            [mine[0].batches, *others],
            lengths_N=lengths_N,
            max_padded_steps=fact.max_padded_steps,
            edges_K=contestant.edges(lengths_N, num_buckets),
        )
        match = order_match(
            mine[0].batches,
            mine[1].batches,
            lengths_N=lengths_N,
            ruler_K=equal_mass_edges(lengths_N, num_buckets),
        )
        rows.append(
            BucketsRow(
                law=fact.name,
                sampler=contestant.name,
                num_buckets=num_buckets if contestant.has_buckets else None,
                order_match=match,
                same_order=match >= SAME_ORDER,
                plan_seconds=min(timed.plan_seconds for timed in mine),
                ms_per_batch=least_ms(mine),
                note=contestant.note,
                **dataclasses.asdict(counts),
            )
        )
    return rows


def _present(everyone: Sequence[AbstractContestant]) -> tuple[list[AbstractContestant], tuple[str, ...]]:
    """Those whose package works, and a line for each of the others."""
    present, missing = [], []
    for contestant in everyone:
        try:
            contestant.require()
        except StrettoError as error:
            missing.append(f"{contestant.name}: {error}")
        except (AttributeError, OSError, RuntimeError) as error:
            missing.append(f"{contestant.name}: its import fails ({error}). Mend it: pip install 'stretto[peers]'.")
        else:
            present.append(contestant)
    return present, tuple(missing)
