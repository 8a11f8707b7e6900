"""Connectionist temporal classification: what fits, and how to read the net's output.

Shape legend: T steps, C classes (0 is the blank), N sequences.
"""

import dataclasses
import math

import numpy as np
import numpy.typing as npt

BLANK = 0
NEVER = float("-inf")


def steps_needed(
    codes: npt.NDArray[np.integer], *, starts_N: npt.NDArray[np.int64], lengths_N: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The fewest steps in which each transcript can be written: one a character, and a blank between equal ones."""
    repeated = np.zeros(len(codes) + 1, dtype=np.int64)
    repeated[2:] = np.cumsum(codes[1:] == codes[:-1])
    ends_N = starts_N + lengths_N
    within_N = repeated[ends_N] - repeated[np.minimum(starts_N + 1, len(codes))]
    return lengths_N + np.where(lengths_N > 0, within_N, 0)


def greedy_decode(log_probs_TC: npt.NDArray[np.floating]) -> list[int]:
    """The most likely class of each step, repeats merged, blanks removed."""
    best_T = log_probs_TC.argmax(axis=1)
    changed_T = np.diff(best_T, prepend=-1) != 0
    kept: list[int] = best_T[changed_T & (best_T != BLANK)].tolist()
    return kept


@dataclasses.dataclass(slots=True)
class _Prefix:
    """The probability of all paths that spell a prefix, by whether they end in a blank."""

    blank: float = NEVER
    symbol: float = NEVER

    @property
    def total(self) -> float:
        return _add(self.blank, self.symbol)


def beam_decode(log_probs_TC: npt.NDArray[np.floating], *, width: int = 8, least_log_prob: float = -9.0) -> list[int]:
    """Prefix beam search: the most likely labelling, summed over all its paths.

    Args:
        log_probs_TC: Log-probabilities of the classes at each step.
        width: Prefixes kept after each step. Wide enough, the search is exact.
        least_log_prob: Classes below this at a step do not extend a prefix there; minus infinity leaves none out.
    """
    beam: dict[tuple[int, ...], _Prefix] = {(): _Prefix(blank=0.0)}
    for log_probs_C in log_probs_TC:
        blank = float(log_probs_C[BLANK])
        likely = [(c, float(log_probs_C[c])) for c in np.flatnonzero(log_probs_C >= least_log_prob) if c != BLANK]
        grown: dict[tuple[int, ...], _Prefix] = {}
        for labels, prefix in beam.items():
            total = prefix.total
            same = grown.setdefault(labels, _Prefix())
            same.blank = _add(same.blank, total + blank)
            if labels:
                same.symbol = _add(same.symbol, prefix.symbol + float(log_probs_C[labels[-1]]))
            for label, log_prob in likely:
                longer = grown.setdefault((*labels, int(label)), _Prefix())
                # After the same symbol, only paths through a blank make a new one.
                before = prefix.blank if labels and labels[-1] == label else total
                longer.symbol = _add(longer.symbol, before + log_prob)
        kept = sorted(grown.items(), key=lambda item: item[1].total, reverse=True)[:width]
        beam = dict(kept)
    return list(max(beam.items(), key=lambda item: item[1].total)[0])


def _add(left: float, right: float) -> float:
    """log(exp(left) + exp(right)) without the overhead of NumPy on scalars."""
    if left < right:
        left, right = right, left
    return left if right == NEVER else left + math.log1p(math.exp(right - left))
