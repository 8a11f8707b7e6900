"""Bucket edges: the exact optimum over all ways to cut the lengths into K buckets.

With distinct lengths v_1 < ... < v_n and C_i sequences no longer than v_i, the bucket (i, j] costs
g(v_j) (C_j - C_i): each of its sequences is padded to v_j. For a non-decreasing g this is a Monge array, so the
best last cut never moves left as j grows. Each of the K layers is therefore filled by divide and conquer, all
sub-problems of one depth in one vectorised pass: O(K n log n) for n distinct lengths, however many sequences.

    lengths    2  3 3     6  7  7      12    14
                    |              |          |
    edges           3              7         14       every sequence is padded to the edge on its right

Pairs of lengths, such as source and target, are padded to an edge in each: to a corner that holds both.

    target  +---------------+     Corners of which each holds the one before are found exactly: the best ones up to a
            |      .     .  |     corner extend the best up to a smaller one; what lies between is padded to the larger.
            +-------+  .    |     Pairs of very different lengths, far from the diagonal, would still be padded a lot.
            | .  .  |       |     So corners are then moved, one by one, to wherever they save most, until none can.
            +----+  |    .  |     The result is at most as dear as any nested corners, which those of buckets by the
            | .. | .| .     |     longer of the two lengths are; no move, of one corner, improves it. To divide pairs
            +----+--+-------+     among K corners at the least cost of all is not attempted.
                      source

Shape legend: N sequences, K buckets, V distinct lengths, R rows of one pass, C candidates of one pass; of pairs, D
distinct ones, V lengths of the first and U of the second to cut at, P places in that grid, X of which hold pairs.
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
PAIR = 2
MAX_PAIR_LENGTHS = 32
"""Lengths of either side of pairs that edges are tried at; more distinct ones are rounded up to as many first."""
ROUNDING = 1e-12
"""What sums of costs may differ by without being better."""
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
        lengths: Steps of each sequence, at least 1; of shape (N, 2) for pairs, such as source and target.
        num_buckets: How many buckets, or "auto": as many as pay for themselves, at most 64.
        cost: The cost of one sequence padded to a length: any non-decreasing function. None counts steps.
            `stretto.batching.StepCost` is the model t = a + L (s0 + s1 B), fitted to a few timed steps. For pairs a
            function of both lengths, non-decreasing in each; None adds them.
        bucket_price: What one more bucket costs, in units of `cost` (a ragged tail batch, one more shape); used by
            "auto". None is half a batch of 32 average sequences.

    Returns:
        Rising edges; bucket k holds the lengths above edge k - 1 up to and including edge k. The last edge is the
        greatest length. Fewer than `num_buckets` edges when there are fewer distinct lengths. For pairs (K, 2), by
        rising cost: a pair belongs to the first bucket that holds both its lengths. These are at most as dear as the
        best of which each holds the one before, and no other place of one of them is better; of more than 32 distinct
        lengths of either side, edges are tried at 32.

    Examples:
        >>> optimal_edges([2, 3, 3, 9, 10], 2)
        array([ 3, 10])
        >>> optimal_edges([(2, 3), (3, 9), (3, 8), (9, 4), (8, 4)], 3)
        array([[2, 3],
               [3, 9],
               [9, 4]])
    """
    lengths_N = as_lengths(lengths, pairs=True)
    distinct_V, counts_V = _count_distinct(lengths_N)
    is_pairs = lengths_N.ndim == PAIR
    cost_V = evaluate_cost(distinct_V, cost) if is_pairs else _check_cost(distinct_V, cost, count=len(lengths_N))
    if num_buckets == "auto":
        average = float((np.abs(cost_V) * counts_V).sum()) / float(counts_V.sum())
        price = TYPICAL_BATCH / 2 * average if bucket_price is None else bucket_price
        if price != np.inf:
            price = check_float(price, name="bucket_price", at_least=0)
        most = min(MAX_AUTO_BUCKETS, len(distinct_V))
    else:
        most, price = min(check_int(num_buckets, name="num_buckets"), len(distinct_V)), 0.0
    if is_pairs:
        return _pair_edges(distinct_V, counts_V, cost, most=most, price=price)
    return distinct_V[_find_optimal_cuts(cost_V, counts_V, most=most, price=price)]


def padded_cost(lengths: npt.ArrayLike, edges: npt.ArrayLike, cost: Cost | None = None) -> float:
    """The total cost of `lengths` when each is padded to its edge: what `optimal_edges` minimises."""
    lengths_N = as_lengths(lengths, pairs=True)
    edges_K = np.asarray(edges, dtype=np.int64)
    if len(edges_K) == 0 or (bucket_N := bucket_of(lengths_N, edges_K)).max() == len(edges_K):
        longest = lengths_N.max() if lengths_N.ndim == 1 else " and ".join(map(str, lengths_N.max(axis=0)))
        raise StrettoError(
            f"a sequence of {longest} steps is beyond the edges {edges_K.tolist()}",
            fix="The last edge must be at least the greatest length.",
        )
    return float(evaluate_cost(edges_K[bucket_N], cost).sum())


def bucket_of(lengths_N: npt.NDArray[np.int64], edges_K: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number of the bucket that each length, or pair of lengths, falls into: the first that holds it."""
    if lengths_N.ndim == 1:
        return np.searchsorted(edges_K, lengths_N, side="left")
    bucket_N = np.full(len(lengths_N), len(edges_K), dtype=np.int64)
    for number in range(len(edges_K) - 1, -1, -1):
        bucket_N[(lengths_N <= edges_K[number]).all(axis=1)] = number
    return bucket_N


def as_lengths(lengths: npt.ArrayLike, *, pairs: bool = False) -> npt.NDArray[np.int64]:
    """Lengths as an array of int64: at least one sequence, each of at least one step.

    They are flat, or, if `pairs` are welcome, of shape (N, 2).
    """
    fix = "Give one integer per sequence, as a flat list or array" + (", or two, of shape (N, 2)." if pairs else ".")
    try:
        given = lengths.cpu().numpy() if isinstance(lengths, torch.Tensor) else np.asarray(lengths)
    except ValueError as error:
        raise StrettoError(f"lengths are not a flat list ({error})", fix=fix) from error
    if given.ndim != 1 and not (pairs and given.shape[1:] == (PAIR,)):
        raise StrettoError(f"lengths have shape {given.shape}", fix=fix)
    if len(given) == 0:
        raise StrettoError("there are no lengths", fix="Give the length of at least one sequence.")
    if not np.issubdtype(given.dtype, np.integer):
        whole = np.issubdtype(given.dtype, np.floating) and bool(np.isfinite(given).all() and (given % 1 == 0).all())
        if not whole:
            raise StrettoError(
                f"lengths of type {given.dtype} are not integers", fix="Give integers, the steps of each sequence."
            )
    # The padded steps of a whole epoch must fit in an int64, however they are padded.
    for wrong, problem, fix in (
        (given > np.iinfo(np.int64).max // given.size, "more than can be counted", "Check the lengths."),
        (given < 1, "", "Remove sequences that have no steps."),
    ):
        if wrong.any():
            first = tuple(int(index[0]) for index in np.nonzero(wrong))
            named = f"sequence {first[0]} has length {given[first]}" + (f", {problem}" if problem else "")
            raise StrettoError(named, fix=fix)
    return given.astype(np.int64)


def _count_distinct(lengths_N: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The distinct lengths, or pairs, rising, and how often each occurs."""
    if lengths_N.ndim == 1:
        return np.unique(lengths_N, return_counts=True)
    # By one number for each pair; NumPy's own way to sort rows takes ten times as long.
    (first_V, place_N), (second_V, other_N) = (np.unique(side_N, return_inverse=True) for side_N in lengths_N.T)
    numbers_D, counts_D = np.unique(place_N * len(second_V) + other_N, return_counts=True)
    return np.stack([first_V[numbers_D // len(second_V)], second_V[numbers_D % len(second_V)]], axis=1), counts_D


def _pair_edges(
    pairs_D2: npt.NDArray[np.int64], counts_D: npt.NDArray[np.int64], cost: Cost | None, *, most: int, price: float
) -> npt.NDArray[np.int64]:
    """At most so many corners, by rising cost: the best nested ones, moved; `price` is paid for each."""
    first_V, second_U = (_thin_lengths(side_D, counts_D) for side_D in pairs_D2.T)
    counts_VU = np.zeros((len(first_V), len(second_U)), dtype=np.int64)
    np.add.at(counts_VU, tuple(map(np.searchsorted, (first_V, second_U), pairs_D2.T)), counts_D)
    places_P2 = np.stack([side.ravel() for side in np.meshgrid(first_V, second_U, indexing="ij")], axis=1)
    cost_P = _check_pair_cost(places_P2, cost, shape=counts_VU.shape, count=int(counts_D.sum()))
    most = min(most, len(places_P2))
    nested_K = _find_nested_corners(cost_P.reshape(counts_VU.shape), counts_VU, most=most, price=price)
    corners_K2 = places_P2[_move_corners(nested_K, cost_P, counts_VU, most=most, price=price)]
    # Lengths may have been rounded up: lower the corners to what is padded to them.
    bucket_D = bucket_of(pairs_D2, corners_K2)
    lowered_K2 = np.zeros_like(corners_K2)
    np.maximum.at(lowered_K2, bucket_D, pairs_D2)
    lowered_K2 = lowered_K2[np.unique(bucket_D)]
    return lowered_K2[np.lexsort((*lowered_K2.T, evaluate_cost(lowered_K2, cost)))]


def _thin_lengths(lengths_D: npt.NDArray[np.int64], counts_D: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The distinct lengths, or, of very many, the edges of the buckets that pad these lengths least."""
    distinct_V, places_D = np.unique(lengths_D, return_inverse=True)
    if len(distinct_V) <= MAX_PAIR_LENGTHS:
        return distinct_V
    counts_V = np.zeros(len(distinct_V), dtype=np.int64)
    np.add.at(counts_V, places_D, counts_D)
    return distinct_V[_find_optimal_cuts(distinct_V, counts_V, most=MAX_PAIR_LENGTHS, price=0.0)]


def _check_pair_cost(
    places_P2: npt.NDArray[np.int64], cost: Cost | None, *, shape: tuple[int, ...], count: int
) -> npt.NDArray[np.float64]:
    cost_P = evaluate_cost(places_P2, cost).astype(np.float64)
    cost_VU = cost_P.reshape(shape)
    rises = [np.diff(cost_VU, axis=axis, prepend=np.take(cost_VU, [0], axis=axis)) >= 0 for axis in (0, 1)]
    wrong = np.flatnonzero(~(rises[0] & rises[1] & np.isfinite(cost_VU)))
    if len(wrong):
        raise StrettoError(
            f"cost is {cost_P[wrong[0]]} at lengths {places_P2[wrong[0]].tolist()}: not finite, or less than for "
            "shorter ones",
            fix="Padding further must never be cheaper: give a cost that does not fall in either length.",
        )
    with np.errstate(over="ignore"):
        if not np.isfinite(np.abs(cost_P).max() * count):
            raise StrettoError(
                f"cost is {cost_P[-1]} at lengths {places_P2[-1].tolist()}, too much to add up over {count} pairs",
                fix="Count it in a larger unit.",
            )
    return cost_P


def _find_nested_corners(
    cost_VU: npt.NDArray[np.float64], counts_VU: npt.NDArray[np.int64], *, most: int, price: float
) -> npt.NDArray[np.int64]:
    """Places of the cheapest corners of which each holds the one before, at most so many."""
    held_VU = counts_VU.cumsum(axis=0).cumsum(axis=1).astype(np.float64)
    num_first, num_second = counts_VU.shape
    # The least cost of the pairs that a corner holds, if it is the last of k + 1 corners, and which is the one before.
    least_KVU = np.repeat((cost_VU * held_VU)[None], most, axis=0)
    before_KVU = np.zeros(least_KVU.shape, dtype=np.int64)
    for i in range(num_first):
        for j in range(num_second):
            added_C = cost_VU[i, j] * (held_VU[i, j] - held_VU[: i + 1, : j + 1]).ravel()
            tried_KC = least_KVU[:-1, : i + 1, : j + 1].reshape(most - 1, len(added_C)) + added_C
            chosen_K = tried_KC.argmin(axis=1)
            rows_K, columns_K = np.divmod(chosen_K, j + 1)
            least_KVU[1:, i, j] = tried_KC[np.arange(most - 1), chosen_K]
            before_KVU[1:, i, j] = rows_K * num_second + columns_K
    total_K = least_KVU[:, -1, -1] + (price * np.arange(1, most + 1) if price else 0.0)
    corners = [counts_VU.size - 1]
    for k in range(int(total_K.argmin()), 0, -1):
        corners.append(int(before_KVU[k].flat[corners[-1]]))
    return np.unique(corners)


def _move_corners(
    corners_K: npt.NDArray[np.int64],
    cost_P: npt.NDArray[np.float64],
    counts_VU: npt.NDArray[np.int64],
    *,
    most: int,
    price: float,
) -> npt.NDArray[np.int64]:
    """Corners moved, added or left out, one at a time, while that lowers the cost; by rising cost."""
    num_second = counts_VU.shape[1]
    (row_P, column_P), held_X = np.divmod(np.arange(counts_VU.size), num_second), np.flatnonzero(counts_VU)
    counts_X = counts_VU.flat[held_X].astype(np.float64)
    holds_PX = (row_P[held_X] <= row_P[:, None]) & (column_P[held_X] <= column_P[:, None])

    def saved(cost_C: npt.NDArray[np.float64], of_C: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """What one more corner saves at each place, if these pairs cost so much without it."""
        gains_PC: npt.NDArray[np.float64] = np.maximum(cost_C - cost_P[:, None], 0.0) * holds_PX[:, of_C]
        return gains_PC @ counts_X[of_C]

    def better(corners: list[int]) -> list[int] | None:
        """The corners after the first change that is found to lower the cost."""
        cost_KX = np.where(holds_PX[corners], cost_P[corners, None], np.inf)
        cost_KX = np.vstack([cost_KX, np.full_like(cost_KX[0], np.inf)])
        owner_X, (least_X, next_X) = cost_KX.argmin(axis=0), np.partition(cost_KX, 1, axis=0)[:2]
        added_P, least_gain = saved(least_X, np.arange(len(held_X))), ROUNDING * float(np.abs(least_X) @ counts_X)
        place = int(added_P.argmax())
        if len(corners) < most and added_P[place] > price + least_gain:
            return [*corners, place]
        for number, corner in enumerate(corners):
            # Without it, its pairs cost what they do at the next; where there is none, what replaces it must hold them.
            own_C = np.flatnonzero(owner_X == number)
            is_bare_C = np.isinf(next_X[own_C])
            without_C = np.where(is_bare_C, cost_P[-1], next_X[own_C])
            saved_P = added_P + saved(without_C, own_C) - saved(least_X[own_C], own_C)
            saved_P[~holds_PX[:, own_C[is_bare_C]].all(axis=1)] = -np.inf
            place = int(saved_P.argmax())
            lost = float((without_C - least_X[own_C]) @ counts_X[own_C]) + least_gain
            others = [*corners[number + 1 :], *corners[:number]]
            if price > max(lost, saved_P[place]) and not is_bare_C.any():
                return others
            if saved_P[place] > lost and place != corner:
                return [*others, place]
        return None

    corners: list[int] = corners_K.tolist()
    while (changed := better(corners)) is not None:
        corners = changed
    return np.array(sorted(corners, key=lambda place: (cost_P[place], place)), dtype=np.int64)


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


def _find_optimal_cuts(
    cost_V: Values, counts_V: npt.NDArray[np.int64], *, most: int, price: float
) -> npt.NDArray[np.int64]:
    """Positions of the edges among the distinct lengths, adding buckets while each saves more than `price`.

    The optimum is convex in the number of buckets (a Monge property), so the first that does not pay ends the search.
    """
    below_V = np.concatenate([[0], np.cumsum(counts_V)])
    # Of the first v distinct lengths: their best cost, and for each number of buckets where the last bucket begins.
    best_V: Values = cost_V * below_V[1:]
    begins = [np.zeros(len(cost_V), dtype=np.int64)]
    while len(begins) < most:
        next_V, begins_V = _compute_next_layer(best_V, cost_V, below_V, num_cuts=len(begins))
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


def _compute_next_layer(
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
        best_V[rows_R], begins_V[rows_R] = _find_row_minima(
            previous_V, cost_V, below_V, rows_R=rows_R, left_R=left_R, right_R=right_R
        )
    return best_V, begins_V


def _find_row_minima(
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
