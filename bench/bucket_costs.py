"""What edges, plans and batches cost as sequences and ranks grow, and what the edges alone waste.

Shape legend: N sequences.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bench.drawn_epoch import TimedDraw, timed_draw
from bench.length_laws import AbstractLengthLaw
from bench.samplers import AbstractContestant, Draw
from stretto.batching import (
    BucketSampler,
    equal_mass_edges,
    optimal_edges,
    padded_cost,
    percentile_edges,
    uniform_edges,
)

Lengths = npt.NDArray[np.int64]

AVERAGE_ROWS: Final = 64
SCALING_STEPS: Final = 30
LARGE_BUCKETS: Final = 32
LARGE_DISTINCT: Final = (5_000, 100_000)
WASTE_BUCKETS: Final = (5, 10, 30)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One sampler on rank 0 of a world of some size; each time the least over the seeds.

    Attributes:
        sampler: The contestant's name.
        world_size: All ranks.
        plan_seconds: Until the first batch.
        ms_per_batch: Mean of the following batches, at most 30 in all; None when there is only one.
    """

    sampler: str
    world_size: int
    plan_seconds: float
    ms_per_batch: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EdgesRow:
    """One task of `BucketSampler` on a large set; the least time over the repeats.

    Attributes:
        task: What is timed.
        num_lengths: Sequences.
        num_distinct: Distinct lengths among them.
        num_buckets: Buckets asked for.
        seconds: Time of the task.
    """

    task: str
    num_lengths: int
    num_distinct: int
    num_buckets: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EdgeWasteRow:
    """Share of padding when every sequence is padded to its edge: arithmetic on the edges, no batches.

    Attributes:
        law: The law's name.
        num_buckets: Buckets asked for.
        optimal: With `optimal_edges`.
        equal_mass: With `equal_mass_edges`.
        percentile: With `percentile_edges`.
        uniform: With `uniform_edges`.
    """

    law: str
    num_buckets: int
    optimal: float
    equal_mass: float
    percentile: float
    uniform: float


def default_max_steps(lengths_N: Lengths) -> int:
    """The slots of a batch of 64 average sequences, or of the longest one when that is more."""
    return max(int(AVERAGE_ROWS * lengths_N.mean()), int(lengths_N.max()))


def scaling_rows(
    contestants: Sequence[AbstractContestant],
    *,
    law: AbstractLengthLaw,
    num_buckets: int,
    world_sizes: Sequence[int],
    seeds: int,
) -> tuple[ScalingRow, ...]:
    """Time the first batches of rank 0 at each world size, all contestants in turn, on one set for all."""
    lengths_N = law.draw(AVERAGE_ROWS * max(world_sizes) * SCALING_STEPS)
    max_padded_steps = default_max_steps(lengths_N)
    entries = [(contestant, world_size) for world_size in world_sizes for contestant in contestants]
    draws: list[list[TimedDraw]] = [[] for _ in entries]
    for contestant in contestants:
        contestant.prepare(lengths_N)
    for seed in range(seeds):
        for (contestant, world_size), mine in zip(entries, draws, strict=True):
            asked = Draw(
                max_padded_steps=max_padded_steps,
                num_buckets=num_buckets,
                seed=seed,
                epoch=seed,
                rank=0,
                world_size=world_size,
            )
            mine.append(timed_draw(contestant.batches(lengths_N, asked), most=SCALING_STEPS))
    return tuple(
        ScalingRow(
            sampler=contestant.name,
            world_size=world_size,
            plan_seconds=min(draw.plan_seconds for draw in mine),
            ms_per_batch=least_ms(mine),
        )
        for (contestant, world_size), mine in zip(entries, draws, strict=True)
    )


def least_ms(draws: Sequence[TimedDraw]) -> float | None:
    """The least of the draws' mean times of a batch; None when no draw has one."""
    return min((draw.ms_per_batch for draw in draws if draw.ms_per_batch is not None), default=None)


def edges_rows(num_lengths: int, *, repeats: int) -> tuple[EdgesRow, ...]:
    """Time edges, a whole plan and a resumption in mid-epoch on large sets."""
    rows = []
    for wanted in LARGE_DISTINCT:
        distinct = min(wanted, num_lengths)
        lengths_N = _with_distinct(num_lengths, distinct)
        max_padded_steps = default_max_steps(lengths_N)
        sampler = _large_sampler(lengths_N, max_padded_steps)
        middle = sampler.state_dict(used=len(sampler) // 2)
        tasks: dict[str, Callable[[], Any]] = {
            "optimal_edges": functools.partial(optimal_edges, lengths_N, LARGE_BUCKETS),
            "construct, plan, first batch": functools.partial(_first_batch, lengths_N, max_padded_steps),
            "resume in mid-epoch, next batch": functools.partial(_resume, sampler, middle),
        }
        rows += [
            EdgesRow(
                task=task,
                num_lengths=num_lengths,
                num_distinct=distinct,
                num_buckets=LARGE_BUCKETS,
                seconds=min(_seconds(call) for _ in range(repeats)),
            )
            for task, call in tasks.items()
        ]
    return tuple(rows)


def edge_waste_rows(law: str, *, lengths_N: Lengths) -> tuple[EdgeWasteRow, ...]:
    """The padding of each rule for edges at 5, 10 and 30 buckets."""
    real = int(lengths_N.sum())
    rules = {
        "optimal": optimal_edges,
        "equal_mass": equal_mass_edges,
        "percentile": percentile_edges,
        "uniform": uniform_edges,
    }
    return tuple(
        EdgeWasteRow(
            law=law,
            num_buckets=num_buckets,
            **{name: 1.0 - real / padded_cost(lengths_N, rule(lengths_N, num_buckets)) for name, rule in rules.items()},
        )
        for num_buckets in WASTE_BUCKETS
    )


def _with_distinct(num_lengths: int, distinct: int) -> Lengths:
    """Every length from 1 to `distinct` at least once, the rest drawn evenly."""
    drawn = np.random.default_rng(0).integers(1, distinct, num_lengths - distinct, endpoint=True)
    return np.concatenate([np.arange(1, distinct + 1), drawn])


def _large_sampler(lengths_N: Lengths, max_padded_steps: int) -> BucketSampler:
    return BucketSampler(lengths_N, max_padded_steps=max_padded_steps, num_buckets=LARGE_BUCKETS, rank=0, world_size=1)


def _first_batch(lengths_N: Lengths, max_padded_steps: int) -> list[int]:
    return next(iter(_large_sampler(lengths_N, max_padded_steps)))


def _resume(sampler: BucketSampler, state: dict[str, Any]) -> list[int]:
    sampler.load_state_dict(state)
    return next(iter(sampler))


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
