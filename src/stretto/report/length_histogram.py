"""How many sequences have which length.

Shape legend: N sequences, H bins.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

USUAL = 0.99
USUAL_BINS, MOST_BINS = 60, 240


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthHistogram:
    """Equal bins of whole lengths.

    Attributes:
        bounds: Where the bins begin, and the end of the last, one more than there are bins. A bin holds its begin but
            not its end.
        counts: Sequences in each bin.
    """

    bounds: tuple[int, ...]
    counts: tuple[int, ...]


def length_histogram(lengths_N: npt.NDArray[np.int64]) -> LengthHistogram:
    """Count lengths in at most 60 bins up to the 99 % quantile and as many more as the rest needs, at most 240 in all.

    All bins are equally wide and their bounds whole, so that none holds more distinct lengths than another.
    """
    low, high = int(lengths_N.min()), int(lengths_N.max())
    usual = int(np.quantile(lengths_N, USUAL))
    width = max(-(-(usual - low + 1) // USUAL_BINS), -(-(high - low + 1) // MOST_BINS))
    counts_H = np.bincount((lengths_N - low) // width)
    bounds_H = low + width * np.arange(len(counts_H) + 1)
    return LengthHistogram(bounds=tuple(bounds_H.tolist()), counts=tuple(counts_H.tolist()))
