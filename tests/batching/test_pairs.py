"""Pairs of lengths: edges against brute force, the sampler under its caps, its report; and the largest batch first.

Shape legend: N pairs, K buckets, B sequences of a batch, W ranks.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.batching import BucketSampler, bucket_of, optimal_edges, padded_cost, shuffled_padded_steps
from stretto.errors import StrettoError

Ints = npt.NDArray[np.int64]
Pairs = list[tuple[int, int]]

few_pairs = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12)
many_pairs = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=80)
COSTS: dict[str, Callable[[Any, Any], Any] | None] = {
    "steps": None,
    "product": lambda first, second: first * second,
    "branching": lambda first, second: 3 * first + max(0, second - 2),
    "free second": lambda first, second: first + 0 * second,
}


def price_of(name: str, pair: Any) -> int:
    cost = COSTS[name]
    return int(sum(pair) if cost is None else cost(*map(int, pair)))


def nested_corners(pairs: Pairs, num_buckets: int) -> Iterator[Pairs]:
    """All corners between lengths that occur, each of which holds the one before; the last holds all."""
    top = max(first for first, _ in pairs), max(second for _, second in pairs)
    places = sorted(itertools.product({first for first, _ in pairs}, {second for _, second in pairs}))
    for inner in itertools.combinations(places[:-1], num_buckets - 1):
        corners = [*inner, top]
        if all(small[1] <= large[1] for small, large in itertools.pairwise(corners)):
            yield corners


def cost_in(corners: Any, pairs: Pairs, name: str) -> float:
    """If every pair is padded to the cheapest corner that holds it."""
    priced = sorted((price_of(name, corner), tuple(corner)) for corner in corners)
    return sum(
        next((price for price, corner in priced if pair[0] <= corner[0] and pair[1] <= corner[1]), math.inf)
        for pair in pairs
    )


def least_of_partitions(pairs: Pairs, num_buckets: int) -> int:
    """The least cost of all ways to divide the pairs."""

    def total(rest: Pairs, groups: list[Pairs]) -> int:
        if not rest:
            return sum(len(group) * (max(p[0] for p in group) + max(p[1] for p in group)) for group in groups)
        tried = [[*groups[:k], [*groups[k], rest[0]], *groups[k + 1 :]] for k in range(len(groups))]
        tried += [[*groups, [rest[0]]]] if len(groups) < num_buckets else []
        return min(total(rest[1:], each) for each in tried)

    return total(pairs, [])


@settings(deadline=None, max_examples=60)
@given(pairs=few_pairs, num_buckets=st.integers(1, 3), name=st.sampled_from([*COSTS]))
def test_edges_are_as_good_as_any_nested_ones_and_no_move_improves_them(
    pairs: Pairs, num_buckets: int, name: str
) -> None:
    edges_K2 = optimal_edges(pairs, num_buckets, COSTS[name])
    assert edges_K2.dtype == np.int64
    assert edges_K2.shape[0] <= num_buckets
    prices = [price_of(name, edge) for edge in edges_K2]
    assert prices == sorted(prices)
    found = padded_cost(pairs, edges_K2, COSTS[name])
    assert found == cost_in(edges_K2, pairs, name)
    for count in range(1, num_buckets + 1):
        for corners in nested_corners(pairs, count):
            assert found <= cost_in(corners, pairs, name)
    places = itertools.product({first for first, _ in pairs}, {second for _, second in pairs})
    for place, number in itertools.product(places, range(len(edges_K2))):
        assert found <= cost_in([*np.delete(edges_K2, number, axis=0), place], pairs, name)


@settings(deadline=None, max_examples=40)
@given(pairs=few_pairs, price=st.sampled_from([0, 1, 3, 10, 40, 10**9]))
def test_auto_weighs_the_price_of_a_bucket(pairs: Pairs, price: int) -> None:
    edges_K2 = optimal_edges(pairs, "auto", bucket_price=price)
    found = padded_cost(pairs, edges_K2) + price * len(edges_K2)
    for count in (1, 2, 3):
        for corners in nested_corners(pairs, count):
            assert found <= cost_in(corners, pairs, "steps") + price * count
    for number in range(len(edges_K2)):
        fewer = cost_in(np.delete(edges_K2, number, axis=0), pairs, "steps")
        assert found <= fewer + price * (len(edges_K2) - 1)


@settings(deadline=None, max_examples=40)
@given(pairs=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6), count=st.integers(1, 3))
def test_no_division_of_the_pairs_is_better_than_the_best(pairs: Pairs, count: int) -> None:
    """Edges are not always the best, but never claim to be better; a single bucket, or one for each, is exact."""
    found = padded_cost(pairs, optimal_edges(pairs, count))
    best = least_of_partitions(pairs, count)
    assert found >= best
    if count == 1 or count >= len(set(pairs)):
        assert found == best


@settings(deadline=None, max_examples=30)
@given(pairs=many_pairs, num_buckets=st.integers(1, 8))
def test_edges_are_never_worse_than_those_of_the_longer_length(pairs: Pairs, num_buckets: int) -> None:
    if max(len(set(side)) for side in zip(*pairs, strict=True)) > 32:
        pairs = [(1 + first % 30, 1 + second % 30) for first, second in pairs]
    longer_K = optimal_edges([max(pair) for pair in pairs], num_buckets)
    both = np.stack([longer_K, longer_K], axis=1)
    assert padded_cost(pairs, optimal_edges(pairs, num_buckets)) <= padded_cost(pairs, both)


def test_many_lengths_are_cut_at_some_of_them() -> None:
    rng = np.random.default_rng(0)
    sources_N = rng.lognormal(4.0, 0.6, 4000).astype(np.int64) + 1
    pairs_N2 = np.stack([sources_N, (sources_N * rng.lognormal(0.0, 0.2, 4000)).astype(np.int64) + 1], axis=1)
    edges_K2 = optimal_edges(pairs_N2, 8)
    assert len(edges_K2) == 8
    assert (edges_K2.max(axis=0) == pairs_N2.max(axis=0)).all()
    longer_K = optimal_edges(pairs_N2.max(axis=1), 8)
    assert padded_cost(pairs_N2, edges_K2) < padded_cost(pairs_N2, np.stack([longer_K, longer_K], axis=1))
    assert (optimal_edges(torch.from_numpy(pairs_N2), 8) == edges_K2).all()


def test_great_pairs_do_not_overflow() -> None:
    edges_K2 = optimal_edges([(2**50, 2**50)] * 500 + [(3, 2**50), (5, 5)], 3)
    assert edges_K2.tolist() == [[5, 5], [3, 2**50], [2**50, 2**50]]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: optimal_edges([(3, 0)], 1), r"sequence 0 has length 0\b"),
        (lambda: optimal_edges([(3, 4), (5, 6)], 2, lambda first, second: second - first), "less than for shorter"),
        (lambda: optimal_edges([(3, 4), (5, 6)], 2, lambda first: first), "pair of lengths"),
        (lambda: optimal_edges([(3, 4), (5, 6)], 2, lambda first, second: first + second + 1e308), "at lengths"),
        (lambda: padded_cost([(3, 4)], [[3, 3]]), r"3 and 4 steps is beyond"),
        (lambda: BucketSampler([(3, 4)], batch_size=1, edges=[4]), r"\(K, 2\)"),
        (lambda: BucketSampler([(3, 4), (9, 1)], batch_size=1, edges=[(3, 9)]), r"pair 1 of lengths \[9, 1\]"),
        (lambda: BucketSampler([(3, 4), (9, 1)], max_padded_steps=9), "sequence 1 has 10 steps"),
        (lambda: BucketSampler([3, 4], batch_size=1, edges=[(3, 9)]), r"shape \(1, 2\)"),
    ],
)
def test_bad_pairs_are_named(call: Callable[[], object], named: str) -> None:
    with pytest.raises(StrettoError) as caught:
        call()
    assert re.search(named, f"{caught.value.problem} {caught.value.fix}")


@settings(deadline=None, max_examples=60)
@given(
    pairs=many_pairs,
    world_size=st.integers(1, 5),
    epoch=st.integers(0, 3),
    buckets=st.sampled_from([{}, {"num_buckets": 3}, {"edges": [(10, 10), (40, 15), (60, 40)]}]),
    chosen=st.fixed_dictionaries({"shuffle": st.booleans(), "largest_first": st.booleans()}),
)
def test_every_pair_once_under_the_cap_and_as_reported(
    *, pairs: Pairs, world_size: int, epoch: int, buckets: dict[str, Any], chosen: dict[str, bool]
) -> None:
    cap = 2 * max(map(sum, pairs))
    options: dict[str, Any] = {**chosen, **buckets, "batch_size": 7, "max_padded_steps": cap}
    samplers = [BucketSampler(pairs, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    report = samplers[0].report()
    steps = list(zip(*samplers, strict=True))
    assert sorted(index for shares in steps for share in shares for index in share) == list(range(len(pairs)))
    pairs_N2 = np.array(pairs)
    bucket_N = bucket_of(pairs_N2, samplers[0].edges)
    padded = 0
    for shares in steps:
        assert len({int(bucket_N[index]) for share in shares for index in share}) == 1
        for share in filter(None, shares):
            size = len(share) * int(pairs_N2[share].max(axis=0).sum())
            assert len(share) <= 7
            assert size <= cap
            padded += size
    assert report.batches == len(steps)
    assert report.padding == pytest.approx(1 - pairs_N2.sum() / padded)


@settings(deadline=None, max_examples=30)
@given(pairs=many_pairs, done=st.floats(0, 1), world_size=st.integers(1, 3))
def test_pairs_continue_where_they_stopped(pairs: Pairs, done: float, world_size: int) -> None:
    whole, stopped, again = (BucketSampler(pairs, batch_size=5, largest_first=True) for _ in range(3))
    iterator, batches = iter(stopped), list(whole)
    count = math.floor(done * (len(batches) - 1))
    used = [next(iterator) for _ in range(count)]
    state = json.loads(json.dumps(stopped.state_dict()))
    again.load_state_dict(state)
    assert list(again) == batches[count:]
    others = [
        BucketSampler(pairs, batch_size=5, largest_first=True, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    drawn = [index for batch in used for index in batch]
    for other in others:
        other.load_state_dict(state)
        drawn += [index for batch in other for index in batch]
    assert sorted(drawn) == list(range(len(pairs)))
    flat = [2 * first for first, _ in pairs]
    with pytest.raises(StrettoError, match="other lengths"):
        BucketSampler(flat, batch_size=5, largest_first=True).load_state_dict(state)


def padded_by(share: list[int], lengths: Ints) -> int:
    return len(share) * int(lengths.reshape(len(lengths), -1)[share].max(axis=0).sum()) if share else 0


@settings(deadline=None, max_examples=50)
@given(
    pairs=many_pairs,
    is_paired=st.booleans(),
    world_size=st.integers(1, 4),
    seed=st.integers(0, 9),
    size=st.sampled_from([{"batch_size": 4}, {"max_padded_steps": 200}]),
)
def test_the_first_epoch_begins_with_its_largest_batch(
    *, pairs: Pairs, is_paired: bool, world_size: int, seed: int, size: dict[str, int]
) -> None:
    lengths = np.array(pairs) if is_paired else np.array(pairs)[:, 0]

    def steps_of_ranks(**options: Any) -> list[tuple[list[int], ...]]:
        ranks = [
            BucketSampler(lengths, seed=seed, rank=rank, world_size=world_size, **size, **options)
            for rank in range(world_size)
        ]
        return [*zip(*ranks, strict=True), *zip(*ranks, strict=True)]

    usual, found = steps_of_ranks(), steps_of_ranks(largest_first=True)
    largest = [max(padded_by(share, lengths) for share in shares) for shares in found]
    num_batches = len(found) // 2
    assert largest[0] == max(largest[:num_batches])
    # Otherwise nothing is changed: the same batches, the others in their order; and later epochs as ever.
    assert sorted(found[:num_batches]) == sorted(usual[:num_batches])
    assert found[1:num_batches] == [shares for shares in usual[:num_batches] if shares != found[0]]
    assert found[num_batches:] == usual[num_batches:]


def test_largest_first_is_part_of_the_state() -> None:
    state = BucketSampler([3, 4, 5], batch_size=1).state_dict()
    with pytest.raises(StrettoError, match="settings"):
        BucketSampler([3, 4, 5], batch_size=1, largest_first=True).load_state_dict(state)


def test_shuffled_padding_of_pairs_counts_both_sides() -> None:
    pairs = np.array([(3, 4), (5, 1), (2, 2)])
    assert shuffled_padded_steps(pairs, batch_size=3, max_padded_steps=None) == 3 * (5 + 4)
    assert shuffled_padded_steps(pairs, batch_size=1, max_padded_steps=None) == 17
    assert shuffled_padded_steps(pairs, batch_size=None, max_padded_steps=10) == 17
