"""Bucket edges: the exact optimum over all ways to cut the lengths into K buckets.

With distinct lengths v_1 < ... < v_n and C_i sequences no longer than v_i, the bucket (i, j] costs
g(v_j) (C_j - C_i): each of its sequences is padded to v_j. For a non-decreasing g this is a Monge array, so the
best last cut never moves left as j grows. Each of the K layers is therefore filled by divide and conquer, all
sub-problems of one depth in one vectorised pass: O(K n log n) for n distinct lengths, however many sequences.

Shape legend: N sequences, V distinct lengths, R rows of one pass, C candidates of one pass.
"""

import dataclasses
from typing import Literal

import numpy as np
import numpy.typing as npt

from stretto.batching.cost import Cost, cost_of
from stretto.batching.lengths import as_lengths
from stretto.errors import StrettoError

Values = npt.NDArray[np.float64] | npt.NDArray[np.int64]

MOST_BUCKETS = 64
TYPICAL_BATCH = 32


def optimal_edges(
    lengths: npt.ArrayLike,
    num_buckets: int | Literal["auto"] = "auto",
    cost: Cost | None = None,
    *,
    bucket_price: float | None = None,
) -> npt.NDArray[np.int64]:
    """The bucket edges of least total cost when every sequence is padded to the edge of its bucket.

    Args:
        lengths: Steps of each sequence, at least 1.
        num_buckets: How many buckets, or "auto": as many as pay for themselves, at most 64.
        cost: The cost of one sequence padded to a length: any non-decreasing function. None counts steps.
            `stretto.batching.StepCost` is the model t = a + L (s0 + s1 B), fitted to a few timed steps.
        bucket_price: What one more bucket costs, in units of `cost` (a ragged tail batch, one more shape); used by
            "auto". None is half a batch of 32 average sequences.

    Returns:
        Rising edges; bucket k holds the lengths above edge k - 1 up to and including edge k. The last edge is the
        greatest length. Fewer than `num_buckets` edges when there are fewer distinct lengths.

    Example:
        >>> optimal_edges([2, 3, 3, 9, 10], 2)
        array([ 3, 10])
    """
    distinct_V, counts_V = np.unique(as_lengths(lengths), return_counts=True)
    cost_V = _checked_cost(distinct_V, cost, count=int(counts_V.sum()))
    if num_buckets == "auto":
        average = float((np.abs(cost_V) * counts_V).sum()) / float(counts_V.sum())
        price = TYPICAL_BATCH / 2 * average if bucket_price is None else bucket_price
        if not isinstance(price, int | float | np.number) or not price >= 0:
            raise StrettoError(f"bucket_price={bucket_price!r} is not a price", fix="Give a number of at least 0.")
        most = min(MOST_BUCKETS, len(distinct_V))
    elif isinstance(num_buckets, int | np.integer) and not isinstance(num_buckets, bool) and num_buckets >= 1:
        most, price = min(int(num_buckets), len(distinct_V)), 0.0
    else:
        raise StrettoError(f"num_buckets={num_buckets!r} is not a number of buckets", fix='Give at least 1, or "auto".')
    return distinct_V[_optimal_cuts(cost_V, counts_V, most=most, price=price)]


def padded_cost(lengths: npt.ArrayLike, edges: npt.ArrayLike, cost: Cost | None = None) -> float:
    """The total cost of `lengths` when each is padded to its edge: what `optimal_edges` minimises."""
    lengths_N = as_lengths(lengths)
    edges_K = np.asarray(edges, dtype=np.int64)
    if len(edges_K) == 0 or lengths_N.max() > edges_K[-1]:
        raise StrettoError(
            f"a sequence of {lengths_N.max()} steps is beyond the edges {edges_K.tolist()}",
            fix="The last edge must be at least the greatest length.",
        )
    padded_N = edges_K[bucket_of(lengths_N, edges_K)]
    return float(padded_N.sum() if cost is None else cost_of(padded_N, cost).sum())


def bucket_of(lengths_N: npt.NDArray[np.int64], edges_K: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number of the bucket that each length falls into."""
    return np.searchsorted(edges_K, lengths_N, side="left")


def _checked_cost(distinct_V: npt.NDArray[np.int64], cost: Cost | None, *, count: int) -> Values:
    if cost is None:
        return distinct_V
    given = cost_of(distinct_V, cost)
    falls = np.flatnonzero(~(np.diff(given, prepend=given[:1]) >= 0) | ~np.isfinite(given))
    if len(falls):
        raise StrettoError(
            f"cost is {given[falls[0]]} at length {distinct_V[falls[0]]}: not finite, or less than for a shorter one",
            fix="Padding further must never be cheaper: give a non-decreasing cost.",
        )
    with np.errstate(over="ignore"):
        total = np.abs(given).max() * count
    if not np.isfinite(total):
        raise StrettoError(
            f"cost is {given[-1]} at length {distinct_V[-1]}, too much to add up over {count} sequences",
            fix="Count it in a larger unit.",
        )
    return given


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """The best cost of the first v distinct lengths in k buckets, and where the last bucket begins."""

    best_V: Values
    begins_V: npt.NDArray[np.int64]


def _optimal_cuts(cost_V: Values, counts_V: npt.NDArray[np.int64], *, most: int, price: float) -> npt.NDArray[np.int64]:
    """Positions of the edges among the distinct lengths, adding buckets while each saves more than `price`.

    The optimum is convex in the number of buckets (a Monge property), so the first that does not pay ends the search.
    """
    below_V = np.concatenate([[0], np.cumsum(counts_V)])
    first = _Layer(cost_V * below_V[1:], np.zeros(len(cost_V), dtype=np.int64))
    layers = [first]
    while len(layers) < most:
        layer = _next_layer(layers[-1].best_V, cost_V, below_V, num_cuts=len(layers))
        if price > 0 and layers[-1].best_V[-1] - layer.best_V[-1] <= price:
            break
        layers.append(layer)
    cuts = []
    last = len(cost_V) - 1
    for layer in reversed(layers):
        cuts.append(last)
        last = int(layer.begins_V[last]) - 1
    return np.array(cuts[::-1], dtype=np.int64)


def _next_layer(previous_V: Values, cost_V: Values, below_V: npt.NDArray[np.int64], *, num_cuts: int) -> _Layer:
    """One more bucket: best_V[j] = min over begins i of previous_V[i - 1] + cost_V[j] (below_V[j + 1] - below_V[i])."""
    num = len(cost_V)
    best_V = np.empty_like(previous_V)
    begins_V = np.zeros(num, dtype=np.int64)
    # The first num_cuts lengths cannot fill num_cuts + 1 buckets: one bucket each is as good as it gets.
    best_V[:num_cuts] = previous_V[:num_cuts]
    begins_V[:num_cuts] = np.arange(num_cuts)
    depth = int(np.ceil(np.log2(max(2, num - num_cuts + 1))))
    for level in range(depth):
        stride = 1 << (depth - level)
        rows_R = np.arange(num_cuts + stride // 2 - 1, num, stride)
        left_R = np.maximum(begins_V[np.maximum(rows_R - stride // 2, num_cuts - 1)], num_cuts)
        left_R[rows_R - stride // 2 < num_cuts] = num_cuts
        above = rows_R + stride // 2
        right_R = np.where(above < num, begins_V[np.minimum(above, num - 1)], num - 1)
        right_R = np.minimum(right_R, rows_R)
        best_V[rows_R], begins_V[rows_R] = _row_minima(
            previous_V, cost_V, below_V, rows_R=rows_R, left_R=left_R, right_R=right_R
        )
    return _Layer(best_V, begins_V)


def _row_minima(
    previous_V: Values,
    cost_V: Values,
    below_V: npt.NDArray[np.int64],
    *,
    rows_R: npt.NDArray[np.int64],
    left_R: npt.NDArray[np.int64],
    right_R: npt.NDArray[np.int64],
) -> tuple[Values, npt.NDArray[np.int64]]:
    """For each row, the least value over its own range of begins, and the leftmost begin that attains it."""
    counts_R = right_R - left_R + 1
    offsets_R = np.cumsum(counts_R) - counts_R
    begins_C = np.arange(counts_R.sum()) + np.repeat(left_R - offsets_R, counts_R)
    # cost_V[j] * below_V[j + 1] is the same for all candidates of a row and is added after the minimum.
    values_C = previous_V[begins_C - 1] - np.repeat(cost_V[rows_R], counts_R) * below_V[begins_C]
    least_R = np.minimum.reduceat(values_C, offsets_R)
    attained = np.flatnonzero(values_C == np.repeat(least_R, counts_R))
    leftmost_R = attained[np.searchsorted(attained, offsets_R)]
    return least_R + cost_V[rows_R] * below_V[rows_R + 1], begins_C[leftmost_R]
