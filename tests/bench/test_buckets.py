"""The benchmark of samplers: counts by hand, every sampler covers the data, and ours keeps its promises."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bench_reports import column, measure
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.buckets import (
    Batches,
    BucketsSettings,
    count_epoch,
    default_cap,
    draw_lengths,
    order_match,
)
from bench.harness import bench
from bench.samplers import (
    OURS,
    Draw,
    Lengths,
    LhotseSampler,
    Sampler,
    all_samplers,
    equal_mass_edges,
    percentile_edges,
    uniform_edges,
)
from stretto.errors import StrettoError


def _draw(
    sampler: Sampler,
    lengths_N: Lengths,
    *,
    world_size: int,
    seed: int = 0,
    max_padded_steps: int = 4000,
    num_buckets: int = 5,
) -> list[Batches]:
    draws = [
        Draw(
            max_padded_steps=max_padded_steps,
            num_buckets=num_buckets,
            seed=seed,
            epoch=seed,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]
    return [list(sampler.batches(lengths_N, draw)) for draw in draws]


@pytest.mark.parametrize("name", ["log-normal", "two-mode"])
@pytest.mark.parametrize("num_buckets", [10, 30])
def test_our_sampler_keeps_its_promises(name: Any, num_buckets: int) -> None:
    lengths_N = draw_lengths(name, 40_000)
    cap = default_cap(lengths_N)
    ours = all_samplers()[0]
    first, second = (
        _draw(ours, lengths_N, world_size=4, seed=seed, max_padded_steps=cap, num_buckets=num_buckets)
        for seed in (0, 1)
    )
    edges_K = ours.edges(lengths_N, num_buckets)
    counts = count_epoch(first, lengths_N=lengths_N, max_padded_steps=cap, edges_K=edges_K)
    assert ours.name == OURS
    assert (counts.coverage, counts.repeated) == (1, 0)
    assert counts.cap <= 1
    assert counts.length_straggler < 1.02
    assert counts.step_straggler < 1.02
    assert counts.waste_to_edge is not None
    assert counts.waste <= counts.waste_to_edge
    assert abs(counts.correlation) < 0.1
    assert edges_K is not None
    assert order_match(first[0], second[0], lengths_N=lengths_N, ruler_K=edges_K) < 0.9


def test_without_peers_the_rest_runs_and_says_what_is_missing(without_peers: None) -> None:
    report = measure("buckets")
    ours = {OURS, f"{OURS} auto", f"{OURS} rows"}
    assert set(column(report.tables, "sampler")) == ours | {"equal mass", "percentile", "uniform", "shuffled"}
    missing = [note for note in report.notes if "pip install 'stretto[peers]'" in note]
    assert [note.split(": ")[1] for note in missing] == ["lhotse", "transformers"]
    (edges,) = (table for table in report.tables if "optimal" in table.columns)
    for _, _, optimal, *others in edges.rows:
        assert 0 < optimal <= min(others)  # type: ignore[operator, type-var]


def test_bad_settings_are_refused() -> None:
    bad: list[dict[str, Any]] = [{"seeds": 1}, {"num_buckets": (10, 1)}, {"num_sequences": 20}, {"lengths": ()}]
    for values in bad:
        with pytest.raises(StrettoError, match=r"at least|Choose"):
            BucketsSettings(**values)
    with pytest.raises(StrettoError, match="max_padded_steps"):
        bench.parse("buckets", ["--max-padded-steps", "0"])


def test_counts_of_a_small_epoch_by_hand() -> None:
    lengths_N = np.array([2, 4, 6, 8, 10])
    ranks = [[[0, 1], [2]], [[3], [3]]]
    counts = count_epoch(ranks, lengths_N=lengths_N, max_padded_steps=10, edges_K=np.array([4, 10]))
    assert counts.waste == pytest.approx(1 - 28 / (8 + 6 + 8 + 8))
    assert counts.waste_to_edge == pytest.approx(1 - 28 / (8 + 10 + 10 + 10))
    assert counts.cap == pytest.approx(0.8)
    assert counts.coverage == pytest.approx(4 / 5)
    assert counts.repeated == pytest.approx(1 / 5)
    assert (counts.batches, counts.shapes, counts.serial_steps) == (4, 3, 16)
    assert counts.length_straggler == pytest.approx(16 / ((4 + 8 + 6 + 8) / 2))
    assert counts.step_straggler == pytest.approx(16 / ((8 + 8 + 6 + 8) / 2))
    # An empty share is no batch, but makes the others wait.
    counts = count_epoch([[[0], [1]], [[2], []]], lengths_N=np.array([5, 5, 5]), max_padded_steps=5)
    assert (counts.batches, counts.waste_to_edge) == (3, None)
    assert counts.length_straggler == pytest.approx(10 / 7.5)


def test_order_match_is_one_for_the_same_order_and_near_zero_for_shuffles() -> None:
    lengths_N = np.arange(1, 1001)
    rng = np.random.default_rng(0)
    first, second = ([[int(number)] for number in rng.permutation(1000)] for _ in range(2))
    ruler_K = np.array([250, 500, 750, 1000])
    assert order_match(first, first, lengths_N=lengths_N, ruler_K=ruler_K) == 1
    assert abs(order_match(first, second, lengths_N=lengths_N, ruler_K=ruler_K)) < 0.1
    assert order_match(first, first, lengths_N=lengths_N, ruler_K=np.array([1000])) == 0


@pytest.mark.parametrize("sampler", all_samplers(), ids=lambda sampler: sampler.name)
def test_every_sampler_draws_every_sequence_in_equally_many_batches(sampler: Sampler) -> None:
    sampler.require()
    lengths_N = np.random.default_rng(0).integers(10, 200, 700)
    ranks = _draw(sampler, lengths_N, world_size=3)
    assert len({len(batches) for batches in ranks}) == 1
    assert {number for batches in ranks for batch in batches for number in batch} == set(range(700))


def test_lhotse_keeps_one_order_of_buckets_for_all_seeds() -> None:
    sampler = LhotseSampler()
    sampler.require()
    lengths_N = draw_lengths("uniform", 3000)
    first, second = (_draw(sampler, lengths_N, world_size=1, seed=s, max_padded_steps=8000)[0] for s in (0, 1))
    assert order_match(first, second, lengths_N=lengths_N, ruler_K=np.array([450, 630, 780, 900, 1000])) > 0.7


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=80), num_buckets=st.integers(1, 40))
def test_edges_of_other_rules_are_those_of_their_definitions(lengths: list[int], num_buckets: int) -> None:
    def edges_by(weight: Callable[[int], int]) -> list[int]:
        """Edge k is the least length for which all no longer sequences weigh at least k shares of K."""
        below = {edge: sum(weight(length) for length in lengths if length <= edge) for edge in lengths}
        wanted = [k * sum(map(weight, lengths)) for k in range(1, num_buckets + 1)]
        return sorted({min(edge for edge in lengths if below[edge] * num_buckets >= least) for least in wanted})

    lengths_N = np.array(lengths)
    assert percentile_edges(lengths_N, num_buckets).tolist() == edges_by(lambda _: 1)
    assert equal_mass_edges(lengths_N, num_buckets).tolist() == edges_by(lambda length: length)
    assert uniform_edges(lengths_N, num_buckets)[-1] == max(lengths)
    assert uniform_edges(np.array([10, 1000, 500]), 10).tolist() == list(range(109, 1001, 99))
