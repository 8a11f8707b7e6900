"""Bucket edges: the exact optimum over all ways to cut the lengths into K buckets.

With distinct lengths v_1 < ... < v_n and C_i sequences no longer than v_i, the bucket (i, j] costs
g(v_j) (C_j - C_i): each of its sequences is padded to v_j. For a non-decreasing g this is a Monge array, so the
best last cut never moves left as j grows. Each of the K layers is therefore filled by divide and conquer, all
sub-problems of one depth in one vectorised pass: O(K n log n) for n distinct lengths, however many sequences.

    lengths    2  3 3     6  7  7      12    14
                    |              |          |
    edges           3              7         14       every sequence is padded to the edge on its right

Shape legend: N sequences, K buckets, V distinct lengths, R rows of one pass, C candidates of one pass.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from stretto.batching.cost import Cost, evaluate_cost
from stretto.checks import check_float, check_int
from stretto.errors import StrettoError

Values = npt.NDArray[np.float64] | npt.NDArray[np.int64]

MAX_AUTO_BUCKETS = 64
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
    cost_V = _check_cost(distinct_V, cost, count=int(counts_V.sum()))
    if num_buckets == "auto":
        average = float((np.abs(cost_V) * counts_V).sum()) / float(counts_V.sum())
        price = TYPICAL_BATCH / 2 * average if bucket_price is None else bucket_price
        if price != np.inf:
            price = check_float(price, name="bucket_price", at_least=0)
        most = min(MAX_AUTO_BUCKETS, len(distinct_V))
    else:
        most, price = min(check_int(num_buckets, name="num_buckets"), len(distinct_V)), 0.0
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
    return float(padded_N.sum() if cost is None else evaluate_cost(padded_N, cost).sum())


def bucket_of(lengths_N: npt.NDArray[np.int64], edges_K: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number of the bucket that each length falls into."""
    return np.searchsorted(edges_K, lengths_N, side="left")


def as_lengths(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Lengths as an array of int64: at least one sequence, each of at least one step."""
    try:
        given = lengths.cpu().numpy() if isinstance(lengths, torch.Tensor) else np.asarray(lengths)
    except ValueError as error:
        raise StrettoError(
            f"lengths are not a flat list ({error})", fix="Give one whole number per sequence, as a flat list or array."
        ) from error
    if given.ndim != 1:
        raise StrettoError(
            f"lengths have shape {given.shape}", fix="Give one whole number per sequence, as a flat list or array."
        )
    if len(given) == 0:
        raise StrettoError("there are no lengths", fix="Give the length of at least one sequence.")
    if not np.issubdtype(given.dtype, np.integer):
        whole = np.issubdtype(given.dtype, np.floating) and bool(np.isfinite(given).all() and (given % 1 == 0).all())
        if not whole:
            raise StrettoError(
                f"lengths of type {given.dtype} are not whole numbers of steps", fix="Give whole numbers."
            )
    # The padded steps of a whole epoch must fit in an int64, however they are padded.
    great = np.flatnonzero(given > np.iinfo(np.int64).max // len(given))
    if len(great):
        raise StrettoError(
            f"sequence {great[0]} has length {given[great[0]]}, more than can be counted", fix="Check the lengths."
        )
    lengths_N = given.astype(np.int64)
    short = np.flatnonzero(lengths_N < 1)
    if len(short):
        raise StrettoError(
            f"sequence {short[0]} has length {lengths_N[short[0]]}", fix="Remove sequences that have no steps."
        )
    return lengths_N


def _check_cost(distinct_V: npt.NDArray[np.int64], cost: Cost | None, *, count: int) -> Values:
    if cost is None:
        return distinct_V
    given = evaluate_cost(distinct_V, cost)
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


def _optimal_cuts(cost_V: Values, counts_V: npt.NDArray[np.int64], *, most: int, price: float) -> npt.NDArray[np.int64]:
    """Positions of the edges among the distinct lengths, adding buckets while each saves more than `price`.

    The optimum is convex in the number of buckets (a Monge property), so the first that does not pay ends the search.
    """
    below_V = np.concatenate([[0], np.cumsum(counts_V)])
    # Of the first v distinct lengths: their best cost, and for each number of buckets where the last bucket begins.
    best_V: Values = cost_V * below_V[1:]
    begins = [np.zeros(len(cost_V), dtype=np.int64)]
    while len(begins) < most:
        next_V, begins_V = _next_layer(best_V, cost_V, below_V, num_cuts=len(begins))
        if price > 0 and best_V[-1] - next_V[-1] <= price:
            break
        best_V = next_V
        begins.append(begins_V)
    cuts = []
    last = len(cost_V) - 1
    for begins_V in reversed(begins):
        cuts.append(last)
        last = int(begins_V[last]) - 1
    return np.array(cuts[::-1], dtype=np.int64)


def _next_layer(
    previous_V: Values, cost_V: Values, below_V: npt.NDArray[np.int64], *, num_cuts: int
) -> tuple[Values, npt.NDArray[np.int64]]:
    """One more bucket: best_V[j] = min over begins i of previous_V[i - 1] + cost_V[j] (below_V[j + 1] - below_V[i])."""
    num = len(cost_V)
    best_V = np.empty_like(previous_V)
    begins_V = np.zeros(num, dtype=np.int64)
    # The first num_cuts lengths cannot fill num_cuts + 1 buckets: one bucket each is the best there is.
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
    return best_V, begins_V


def _row_minima(
    previous_V: Values,
    cost_V: Values,
    below_V: npt.NDArray[np.int64],
    *,
    rows_R: npt.NDArray[np.int64],
    left_R: npt.NDArray[np.int64],
    right_R: npt.NDArray[np.int64],
) -> tuple[Values, npt.NDArray[np.int64]]:
    """For each row, the least value over its range of begins, and the leftmost begin that attains it."""
    counts_R = right_R - left_R + 1
    offsets_R = np.cumsum(counts_R) - counts_R
    begins_C = np.arange(counts_R.sum()) + np.repeat(left_R - offsets_R, counts_R)
    # cost_V[j] * below_V[j + 1] is the same for all candidates of a row and is added after the minimum.
    values_C = previous_V[begins_C - 1] - np.repeat(cost_V[rows_R], counts_R) * below_V[begins_C]
    least_R = np.minimum.reduceat(values_C, offsets_R)
    attained = np.flatnonzero(values_C == np.repeat(least_R, counts_R))
    leftmost_R = attained[np.searchsorted(attained, offsets_R)]
    return least_R + cost_V[rows_R] * below_V[rows_R + 1], begins_C[leftmost_R]
