"""Bucket edges against brute force and a plain dynamic programme.

Shape legend: N sequences, V distinct lengths, K buckets.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.batching import optimal_edges, padded_cost
from stretto.batching.edges import MAX_AUTO_BUCKETS
from stretto.errors import StrettoError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

few_distinct = st.dictionaries(st.integers(1, 300), st.integers(1, 60), min_size=1, max_size=12)
rises = st.lists(st.sampled_from([0, 0, 0, 1, 2, 7, 1000, 10**9]), min_size=12, max_size=12)


def sequences(count_of: dict[int, int]) -> Ints:
    return np.repeat(list(count_of.keys()), list(count_of.values()))


def brute_force(count_of: dict[int, int], price_of: dict[int, int]) -> dict[int, int]:
    """The least cost for each number of buckets, over every choice of edges, in whole numbers."""
    distinct = sorted(count_of)
    least: dict[int, int] = {}
    for num_buckets in range(1, len(distinct) + 1):
        costs = []
        for inner in itertools.combinations(distinct[:-1], num_buckets - 1):
            edges = iter((*inner, distinct[-1]))
            edge, cost = next(edges), 0
            for length in distinct:
                edge = next(edges) if length > edge else edge
                cost += price_of[edge] * count_of[length]
            costs.append(cost)
        least[num_buckets] = min(costs)
    return least


def plain_programme(distinct_V: Ints, counts_V: Ints, cost_V: Floats, *, most: int) -> list[float]:
    """The least cost for 1 to `most` buckets by trying every last cut: O(most n^2)."""
    below_V = np.append(0, np.cumsum(counts_V))
    best_V = cost_V * below_V[1:]
    totals = [float(best_V[-1])]
    for _ in range(most - 1):
        following_V = best_V.copy()
        for last in range(1, len(distinct_V)):
            tried = best_V[:last] + cost_V[last] * (below_V[last + 1] - below_V[1 : last + 1])
            following_V[last] = min(following_V[last], tried.min())
        best_V = following_V
        totals.append(float(best_V[-1]))
    return totals


def assert_well_formed(edges_K: Ints, lengths_N: Ints, *, num_buckets: int) -> None:
    assert edges_K.dtype == np.int64
    assert (np.diff(edges_K) > 0).all()
    assert edges_K[-1] == lengths_N.max()
    assert np.isin(edges_K, lengths_N).all()
    assert len(edges_K) == min(num_buckets, len(np.unique(lengths_N)))


@settings(deadline=None, max_examples=100)
@given(
    count_of=few_distinct,
    rise=st.none() | rises,
    vectorised=st.booleans(),
    scale=st.sampled_from([1.0, 0.5, 2.0**-40]),
)
def test_any_cost_equals_brute_force(
    count_of: dict[int, int], rise: list[int] | None, vectorised: bool, scale: float
) -> None:
    """Without a rise, of the steps themselves."""
    lengths_N = sequences(count_of)
    price_of = dict(zip(sorted(count_of), itertools.accumulate(rise or []), strict=False))
    table = np.zeros(301)
    table[list(price_of)] = list(price_of.values())

    def rising(length: Any) -> Any:
        return (table[length] if vectorised else price_of[length]) * scale

    cost, scale = (None, 1.0) if rise is None else (rising, scale)
    least = brute_force(count_of, {length: length for length in count_of} if rise is None else price_of)
    totals = []
    for num_buckets in range(1, 13):
        edges_K = optimal_edges(lengths_N, num_buckets, cost)
        assert_well_formed(edges_K, lengths_N, num_buckets=num_buckets)
        totals.append(padded_cost(lengths_N, edges_K, cost))
        assert totals[-1] == least[len(edges_K)] * scale
    assert totals == sorted(totals, reverse=True)


@settings(deadline=None, max_examples=60)
@given(count_of=few_distinct, rise=rises, price=st.one_of(st.integers(0, 5000), st.sampled_from([0, 10**12])))
def test_auto_is_the_best_number_of_buckets(count_of: dict[int, int], rise: list[int], price: int) -> None:
    lengths_N = sequences(count_of)
    price_of = dict(zip(sorted(count_of), itertools.accumulate(rise), strict=False))
    for cost, prices in ((None, {length: length for length in count_of}), (price_of.__getitem__, price_of)):
        least = brute_force(count_of, prices)
        edges_K = optimal_edges(lengths_N, "auto", cost, bucket_price=price)
        got = padded_cost(lengths_N, edges_K, cost) + price * len(edges_K)
        assert got == min(total + price * num_buckets for num_buckets, total in least.items())


@pytest.mark.parametrize("seed", range(4))
def test_many_lengths_equal_the_plain_programme(seed: int) -> None:
    rng = np.random.default_rng(seed)
    distinct_V = np.sort(rng.choice(np.arange(1, 4000), 300, replace=False))
    counts_V = rng.integers(1, 500, 300) if seed % 2 else np.ceil(rng.pareto(1.0, 300)).astype(np.int64) + 1
    steep = np.cumsum(rng.choice([0.0, 1.0, 3.0, 2.0**20], 300, p=[0.5, 0.3, 0.15, 0.05]))
    lengths_N = np.repeat(distinct_V, counts_V)

    def plateaus(length: Any) -> Any:
        return steep[np.searchsorted(distinct_V, length)]

    for cost, cost_V in ((None, distinct_V.astype(np.float64)), (plateaus, steep)):
        totals = plain_programme(distinct_V, counts_V, cost_V, most=MAX_AUTO_BUCKETS)
        for num_buckets in (1, 2, 3, 7, 8, 20, 33, MAX_AUTO_BUCKETS):
            edges_K = optimal_edges(lengths_N, num_buckets, cost)
            assert_well_formed(edges_K, lengths_N, num_buckets=num_buckets)
            assert padded_cost(lengths_N, edges_K, cost) == totals[num_buckets - 1]
        for share in (0.0, 1e-5, 1e-3, 0.1, 2.0):
            price = float(round(share * totals[0]))
            edges_K = optimal_edges(lengths_N, "auto", cost, bucket_price=price)
            best = min(total + price * number for number, total in enumerate(totals, start=1))
            assert padded_cost(lengths_N, edges_K, cost) + price * len(edges_K) == best


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        torch.tensor,
        lambda values: np.array(values, dtype=np.uint8),
        lambda values: np.array(values, dtype=np.float32),
        lambda values: torch.tensor(values, dtype=torch.float64),
        lambda values: torch.tensor(values, dtype=torch.uint8),
        lambda values: [torch.tensor(value) for value in values],
        lambda values: np.array(values)[::-1],
    ],
)
def test_forms_of_lengths_agree(form: Callable[[list[int]], Any]) -> None:
    values = [255, 254, 3, 3, 200, 199, 90] * 50
    num_buckets: Any = np.int64(3)
    wanted = optimal_edges(np.array(values, dtype=np.int64), 3, lambda length: length * length)
    assert optimal_edges(form(values), 3, lambda length: length * length).tolist() == wanted.tolist()
    assert optimal_edges(form(values), num_buckets).tolist() == optimal_edges(values, 3).tolist()
    assert padded_cost(form(values), wanted) == padded_cost(values, wanted)


def test_auto_stops_at_the_most_buckets() -> None:
    edges_K = optimal_edges(np.arange(1, 200), "auto", bucket_price=0)
    assert len(edges_K) == MAX_AUTO_BUCKETS
    assert optimal_edges(np.arange(1, 200), "auto", bucket_price=math.inf).tolist() == [199]


def test_great_lengths_do_not_overflow() -> None:
    # A thousand sequences of 2^53 steps fit in 63 bits; what they cost must not wrap round.
    lengths = [2**53] * 1000 + [2**53 - 1, 5]
    assert optimal_edges(lengths, 2).tolist() == [5, 2**53]
    assert padded_cost(lengths, [2**53]) == float(1002 * 2**53)


@pytest.mark.parametrize(
    ("lengths", "named"),
    [
        (np.zeros(0), "no lengths"),
        ([4, 0, 3], r"sequence 1 has length 0\b"),
        ([4, 3, -7, -8], r"sequence 2 has length -7\b"),
        ([1.0, 2.5], "float64"),
        ([1.0, math.nan], "float64"),
        ([1.0, math.inf], "float64"),
        ([True, True], "bool"),
        (["3", "4"], "lengths of type"),
        ([3, None], "object"),
        ([[1], [1, 2]], "lengths"),
        (torch.tensor([[1]]), r"shape \(1, 1\)"),
        (torch.tensor([0.5]), "float32"),
        (np.array([3, 2**63 + 5], dtype=np.uint64), str(2**63 + 5)),
        ([3.0, 2.0**70], r"1180591620717411303424|1\.18\d*e\+21"),
        ([2**62] * 4, "sequence 0 has length 4611686018427387904, more than can be counted"),
    ],
)
def test_bad_lengths_are_named(lengths: Any, named: str) -> None:
    with pytest.raises(StrettoError, match=named):
        optimal_edges(lengths, 2)


@pytest.mark.parametrize(
    ("num_buckets", "price", "named"),
    [
        *((count, None, f"num_buckets={count!r}") for count in (None, math.nan, True)),
        *(("auto", price, f"bucket_price={price!r}") for price in (-1, -1e-9, math.nan, "high")),
    ],
)
def test_bad_numbers_of_buckets_and_prices_are_named(num_buckets: Any, price: Any, named: str) -> None:
    with pytest.raises(StrettoError, match=named):
        optimal_edges([1, 2, 3], num_buckets, bucket_price=price)


def test_edges_too_short_for_the_lengths_are_named() -> None:
    with pytest.raises(StrettoError, match=r"\b5\b.*\b3\b"):
        padded_cost([2, 5], [1, 3])
