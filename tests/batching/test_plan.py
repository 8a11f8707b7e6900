"""The plan of an epoch: an order without runs, sorted if asked; and its report. `test_sampler.py` has the rest.

Shape legend: G groups.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.batching import BucketSampler, SamplerReport, adjacent_correlation, shuffled_padded_steps

Ints = npt.NDArray[np.int64]


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 80), min_size=1, max_size=150), batch_size=st.integers(1, 12))
def test_without_shuffling_everything_is_sorted_by_length(lengths: list[int], batch_size: int) -> None:
    drawn = [index for batch in BucketSampler(lengths, batch_size=batch_size, shuffle=False) for index in batch]
    assert drawn == sorted(range(len(lengths)), key=lengths.__getitem__)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_bucket_for_each_of_many_lengths(shuffle: bool) -> None:
    lengths = np.arange(1, 40_001)
    batches = list(BucketSampler(lengths, batch_size=2, edges=lengths, shuffle=shuffle))
    assert sorted(batches) == [[index] for index in range(40_000)]


def batches_of_law(law: str, *, seed: int, count: int) -> tuple[list[list[int]], Ints]:
    rng = np.random.default_rng(seed)
    laws: dict[str, Callable[[], Ints | npt.NDArray[np.float64]]] = {
        "lognormal": lambda: rng.lognormal(5.0, 0.7, count),
        "two lengths": lambda: rng.choice([10, 1000], count, p=[0.9, 0.1]),
        "outlier": lambda: np.append(rng.integers(5, 9, count - 1), 10_000),
    }
    lengths_N = np.clip(laws[law](), 1, 10_000).astype(np.int64)
    return list(BucketSampler(lengths_N, batch_size=8, num_buckets=8, seed=seed)), lengths_N


@pytest.mark.parametrize("law", ["lognormal", "two lengths", "outlier"])
def test_a_batch_says_nothing_of_the_next(law: str) -> None:
    for seed in range(60):
        batches, lengths_N = batches_of_law(law, seed=seed, count=960 if seed % 2 else 3200)
        means = np.array([lengths_N[batch].mean() for batch in batches])
        assert len(means) >= 100
        assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.1


def test_the_short_batch_of_a_bucket_may_come_at_any_time() -> None:
    places = []
    for seed in range(30):
        sizes = np.array([len(batch) for batch in batches_of_law("lognormal", seed=seed, count=963)[0]])
        places.append(float(np.flatnonzero(sizes < 8).mean()) / len(sizes))
    assert 0.4 < np.mean(places) < 0.6


@settings(deadline=None, max_examples=60)
@given(values=st.lists(st.floats(-1e6, 1e6).map(lambda value: round(value, 3)), min_size=3, max_size=40, unique=True))
def test_adjacent_correlation_is_the_usual_one(values: list[float]) -> None:
    values_G = np.array(values)
    spread = min(np.ptp(values_G[:-1]), np.ptp(values_G[1:]))
    if spread > 1e-3 * np.abs(values_G).max():
        wanted = np.corrcoef(values_G[:-1], values_G[1:])[0, 1]
        assert adjacent_correlation(values_G) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0], [3.0, 3.0, 3.0, 3.0]])
def test_adjacent_correlation_is_zero_where_it_is_not_defined(values: list[float]) -> None:
    assert adjacent_correlation(np.array(values)) == 0.0


def recount(chosen: dict[str, Any], *, world_size: int, epoch: int) -> SamplerReport:
    samplers = [BucketSampler(**chosen, rank=rank, world_size=world_size) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    lengths, edges = chosen["lengths"], samplers[0].edges.tolist()
    shapes, shapes_to_edge, buckets = set(), set(), set()
    real = padded = padded_to_edge = largest = most_rows = drawn = 0
    waiting, working, means = 0.0, 0.0, []
    for shares in zip(*samplers, strict=True):
        longest_of_ranks, of_step = [], []
        for share in shares:
            longest = max((lengths[index] for index in share), default=0)
            longest_of_ranks.append(longest)
            of_step += [lengths[index] for index in share]
            if share:
                edge = min(edge for edge in edges if edge >= longest)
                buckets.add(edge)
                shapes.add((len(share), longest))
                shapes_to_edge.add((len(share), edge))
                padded += len(share) * longest
                padded_to_edge += len(share) * edge
                largest, most_rows = max(largest, len(share) * edge), max(most_rows, len(share))
        real, drawn = real + sum(of_step), drawn + len(of_step)
        waiting += max(longest_of_ranks)
        working += sum(longest_of_ranks) / world_size
        means.append(sum(of_step) / len(of_step))
    limits = {name: chosen.get(name) for name in ("batch_size", "max_padded_steps")}
    shuffled = shuffled_padded_steps(np.array(lengths), **limits)
    return SamplerReport(
        epoch=epoch,
        num_sequences=drawn,
        num_buckets=len(buckets),
        batches=len(means),
        shapes=len(shapes),
        shapes_to_edge=len(shapes_to_edge),
        padding=1 - real / padded,
        padding_to_edge=1 - real / padded_to_edge,
        shuffled_padding=1 - real / shuffled,
        largest_batch=largest,
        most_rows=most_rows,
        straggler=waiting / working,
        correlation=adjacent_correlation(np.array(means)),
    )


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=120),
    size=st.sampled_from([{"batch_size": 3}, {"max_padded_steps": 200}, {"batch_size": 5, "max_padded_steps": 90}]),
    buckets=st.sampled_from([{}, {"num_buckets": 4}, {"edges": [7, 30, 100]}]),
    shuffle=st.booleans(),
    world_size=st.one_of(st.integers(1, 4), st.integers(1, 64)),
    epoch=st.integers(0, 9),
)
def test_report_equals_a_slow_recount(
    *,
    lengths: list[int],
    size: dict[str, int],
    buckets: dict[str, Any],
    shuffle: bool,
    world_size: int,
    epoch: int,
) -> None:
    chosen = {"lengths": lengths, "shuffle": shuffle, **size, **buckets}
    sampler = BucketSampler(**chosen, rank=world_size - 1, world_size=world_size)
    sampler.set_epoch(epoch)
    before = sampler.state_dict()
    wanted = dataclasses.asdict(recount(chosen, world_size=world_size, epoch=epoch))
    assert dataclasses.asdict(sampler.report()) == pytest.approx(wanted, rel=1e-9, abs=1e-7)
    assert sampler.state_dict() == before
