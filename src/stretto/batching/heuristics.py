"""The rules for bucket edges that others use: what `optimal_edges` is measured against.

None of them minimises anything. All give rising edges of which the last is the greatest length, as `optimal_edges`
does, so each can be passed to `BucketSampler(edges=...)`.

Shape legend: N sequences, K buckets.
"""

import numpy as np
import numpy.typing as npt

from stretto.batching.lengths import as_lengths
from stretto.errors import StrettoError

Edges = npt.NDArray[np.int64]


def equal_mass_edges(lengths: npt.ArrayLike, num_buckets: int) -> Edges:
    """Edges that give every bucket about the same number of steps: the rule of Lhotse and NeMo.

    Args:
        lengths: Steps of each sequence, at least 1.
        num_buckets: How many buckets.

    Returns:
        Rising edges, fewer than `num_buckets` where one length alone fills several shares.

    Example:
        >>> equal_mass_edges([1, 1, 1, 1, 4, 8], 2)
        array([4, 8])
    """
    sorted_N, ranks_K = np.sort(as_lengths(lengths)), _ranks(num_buckets)
    steps_N = np.cumsum(sorted_N)
    return np.unique(sorted_N[np.searchsorted(steps_N * num_buckets, ranks_K * steps_N[-1])])


def percentile_edges(lengths: npt.ArrayLike, num_buckets: int) -> Edges:
    """Edges that give every bucket about the same number of sequences: the rule of fairseq.

    Args:
        lengths: Steps of each sequence, at least 1.
        num_buckets: How many buckets.

    Returns:
        Rising edges, fewer than `num_buckets` where many sequences share a length.

    Example:
        >>> percentile_edges([1, 1, 1, 1, 4, 8], 2)
        array([1, 8])
    """
    sorted_N, ranks_K = np.sort(as_lengths(lengths)), _ranks(num_buckets)
    return np.unique(sorted_N[-(-ranks_K * len(sorted_N) // num_buckets) - 1])


def uniform_edges(lengths: npt.ArrayLike, num_buckets: int) -> Edges:
    """Edges at equal distances between the least and the greatest length: the rule of thumb.

    Args:
        lengths: Steps of each sequence, at least 1.
        num_buckets: How many buckets; some may hold no sequence.

    Returns:
        Rising edges, fewer than `num_buckets` where they would lie less than one step apart.

    Example:
        >>> uniform_edges([1, 1, 1, 1, 4, 9], 2)
        array([5, 9])
    """
    lengths_N, ranks_K = as_lengths(lengths), _ranks(num_buckets)
    shortest, longest = int(lengths_N.min()), int(lengths_N.max())
    return np.unique(shortest - (-ranks_K * (longest - shortest) // num_buckets))


def _ranks(num_buckets: int) -> npt.NDArray[np.int64]:
    """1, 2, ..., K: shares of K are taken in whole numbers, where rounding cannot move an edge."""
    if isinstance(num_buckets, bool) or not isinstance(num_buckets, int | np.integer) or num_buckets < 1:
        raise StrettoError(f"num_buckets={num_buckets!r} is not a number of buckets", fix="Give at least 1.")
    return np.arange(1, num_buckets + 1)
