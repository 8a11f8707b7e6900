import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import BucketSampler, StrettoError, optimal_edges
from stretto.batching import bucket_of, equal_mass_edges, padded_cost, percentile_edges, uniform_edges

RULES = (equal_mass_edges, percentile_edges, uniform_edges)
LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=80)


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, num_buckets=st.integers(1, 40))
def test_edges_rise_up_to_the_longest(rule, lengths, num_buckets):
    edges = rule(lengths, num_buckets)
    assert edges.dtype == np.int64
    assert 1 <= len(edges) <= num_buckets
    assert (np.diff(edges) > 0).all()
    assert edges[0] >= min(lengths)
    assert edges[-1] == max(lengths)


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, num_buckets=st.integers(1, 12))
def test_no_rule_beats_the_optimum(rule, lengths, num_buckets):
    best = padded_cost(lengths, optimal_edges(lengths, num_buckets))
    assert padded_cost(lengths, rule(lengths, num_buckets)) >= best


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, num_buckets=st.integers(1, 40))
def test_an_edge_is_the_least_length_that_reaches_its_share(lengths, num_buckets):
    def edges_by(weight):
        """The definition, in whole numbers: the weight of all no longer sequences is at least k shares of K."""
        total = sum(map(weight, lengths))
        below = {edge: sum(weight(length) for length in lengths if length <= edge) for edge in lengths}
        return sorted(
            {min(edge for edge in lengths if below[edge] * num_buckets >= k * total) for k in range(1, num_buckets + 1)}
        )

    assert percentile_edges(lengths, num_buckets).tolist() == edges_by(lambda _: 1)
    assert equal_mass_edges(lengths, num_buckets).tolist() == edges_by(lambda length: length)


def test_equal_mass_buckets_hold_about_equally_many_steps():
    lengths_N = np.random.default_rng(0).integers(1, 1000, 20_000)
    edges = equal_mass_edges(lengths_N, 8)
    steps_K = np.bincount(bucket_of(lengths_N, edges), weights=lengths_N)
    np.testing.assert_allclose(steps_K, lengths_N.sum() / 8, rtol=0.03)


def test_percentile_buckets_hold_about_equally_many_sequences():
    lengths_N = np.random.default_rng(0).integers(1, 1000, 20_000)
    counts_K = np.bincount(bucket_of(lengths_N, percentile_edges(lengths_N, 8)))
    np.testing.assert_allclose(counts_K, 2500, rtol=0.03)


def test_uniform_edges_are_equally_far_apart():
    assert uniform_edges([10, 1000, 500], 10).tolist() == list(range(109, 1001, 99))


def test_known_edges():
    lengths = [1, 1, 1, 1, 4, 8]
    assert equal_mass_edges(lengths, 2).tolist() == [4, 8]
    assert percentile_edges(lengths, 2).tolist() == [1, 8]
    assert uniform_edges(lengths, 2).tolist() == [5, 8]


@pytest.mark.parametrize("rule", RULES)
def test_one_length_is_one_bucket(rule):
    assert rule([7, 7, 7], 5).tolist() == [7]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_buckets", [0, -1, 2.5, True, "auto"])
def test_a_bad_number_of_buckets_is_refused(rule, num_buckets):
    with pytest.raises(StrettoError, match="is not a number of buckets"):
        rule([1, 2, 3], num_buckets)


@pytest.mark.parametrize("rule", RULES)
def test_bad_lengths_are_refused(rule):
    with pytest.raises(StrettoError, match="sequence 1 has length 0"):
        rule([3, 0], 2)


@pytest.mark.parametrize("rule", RULES)
def test_the_sampler_takes_the_edges_and_deals_every_sequence_once(rule):
    lengths_N = np.random.default_rng(1).integers(5, 300, 500)
    sampler = BucketSampler(lengths_N, max_padded_steps=2000, edges=rule(lengths_N, 6), rank=0, world_size=1)
    assert sorted(number for batch in sampler for number in batch) == list(range(500))
