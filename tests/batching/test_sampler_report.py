"""The report of an epoch against a slow recount over all ranks."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.batching import BucketSampler, SamplerReport

LENGTHS = np.clip(np.random.default_rng(0).lognormal(5.0, 0.6, 1500), 5, 900).astype(np.int64)


def recount(chosen: dict[str, Any], *, world_size: int, epoch: int) -> SamplerReport:
    samplers = [BucketSampler(**chosen, rank=rank, world_size=world_size) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    lengths, edges = chosen["lengths"], samplers[0].edges.tolist()
    shapes, shapes_to_edge, buckets = set(), set(), set()
    real = slots = slots_to_edge = largest = most_rows = dealt = 0
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
                slots += len(share) * longest
                slots_to_edge += len(share) * edge
                largest, most_rows = max(largest, len(share) * edge), max(most_rows, len(share))
        real, dealt = real + sum(of_step), dealt + len(of_step)
        waiting += max(longest_of_ranks)
        working += sum(longest_of_ranks) / world_size
        means.append(sum(of_step) / len(of_step))
    return SamplerReport(
        epoch=epoch,
        num_sequences=dealt,
        num_buckets=len(buckets),
        batches=len(means),
        shapes=len(shapes),
        shapes_to_edge=len(shapes_to_edge),
        padding=1 - real / slots,
        padding_to_edge=1 - real / slots_to_edge,
        largest_batch=largest,
        most_rows=most_rows,
        straggler=waiting / working,
        correlation=correlation(means),
    )


def correlation(means: list[float]) -> float:
    if len(means) < 3 or len(set(means[:-1])) == 1 or len(set(means[1:])) == 1:
        return 0.0
    now, following = np.array(means[:-1]), np.array(means[1:])
    return float(np.corrcoef(now, following)[0, 1])


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
    wanted = dataclasses.asdict(recount(chosen, world_size=world_size, epoch=epoch))
    assert dataclasses.asdict(sampler.report()) == pytest.approx(wanted, rel=1e-9, abs=1e-7)


def test_report_leaves_the_position_alone() -> None:
    sampler = BucketSampler(LENGTHS, max_padded_steps=2000)
    iterator = iter(sampler)
    _ = [next(iterator) for _ in range(3)]
    before = sampler.state_dict()
    assert sampler.report() == sampler.report()
    assert sampler.state_dict() == before


def test_largest_batch_keeps_the_budget_when_padded_to_the_edge() -> None:
    for max_padded_steps in (int(LENGTHS.max()), 1000, 5000):
        report = BucketSampler(LENGTHS, max_padded_steps=max_padded_steps, world_size=3).report()
        assert report.largest_batch <= max_padded_steps
        assert report.padding <= report.padding_to_edge < 1
        assert report.straggler >= 1


def test_equal_lengths_waste_nothing() -> None:
    report = BucketSampler([7] * 64, batch_size=8).report()
    assert (report.padding, report.padding_to_edge, report.straggler, report.correlation) == (0.0, 0.0, 1.0, 0.0)
    assert (report.batches, report.shapes, report.num_buckets) == (8, 1, 1)


def test_few_sequences_on_many_ranks_count_the_idle_ones_as_waiting() -> None:
    report = BucketSampler([10], batch_size=4, world_size=8).report()
    assert report.straggler == pytest.approx(8.0)
    assert (report.most_rows, report.largest_batch, report.batches) == (1, 10, 1)


def test_mean_lengths_of_adjacent_batches_are_uncorrelated() -> None:
    for seed in range(40):
        sampler = BucketSampler(LENGTHS, max_padded_steps=2000, seed=seed)
        report = sampler.report()
        batches = list(sampler)
        means = np.array([LENGTHS[batch].mean() for batch in batches])
        assert len(means) >= 100
        assert abs(correlation(means.tolist())) < 0.1
        assert report.correlation == pytest.approx(correlation(means.tolist()), abs=1e-9)


def test_the_text_has_a_line_a_number() -> None:
    report = BucketSampler(LENGTHS, max_padded_steps=2000).report()
    lines = str(report).splitlines()
    assert [line[:21].strip() for line in lines] == [
        "sequences",
        "buckets",
        "batches",
        "distinct shapes",
        "padding",
        "largest batch",
        "straggler factor",
        "adjacent correlation",
    ]
    assert lines[0].endswith("1,500")
    assert f"{report.padding:.1%}" in lines[4]
    assert math.isclose(float(lines[6].split()[-1]), report.straggler, abs_tol=5e-4)
