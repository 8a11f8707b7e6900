"""The embedded set for labels of steps: signals that switch between regimes at random times.

The first channel swings slowly or fast; the second is quiet except for a pulse, up or down, where a regime begins. A
regime is both together, so that a net must remember the last pulse for as long as the regime lasts. Everything follows
from a seed.

Shape legend: T steps of one signal, S steps of all of them.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from stretto.data.sequences import SequenceSet, part_sizes
from stretto.data.targets import StepLabels

REGIME_NAMES: Final = ("unlabelled", "slow, up", "slow, down", "fast, up", "fast, down")
PERIODS: Final = (40.0, 16.0)
PULSE_STEPS: Final = 6
UNLABELLED_STEPS: Final = 12
"""Steps after a switch that have no label."""
NOISE: Final = 0.5


def make_regimes(*, num_train: int = 360, median_length: int = 400, mean_stay: int = 60, seed: int = 0) -> SequenceSet:
    """The set; a pure function of its arguments.

    Args:
        num_train: Training signals; validation and test have a sixth of that each.
        median_length: Steps of a signal in the middle of the lengths, which have a long tail.
        mean_stay: Steps of a regime on average.
        seed: Everything follows from it.
    """
    counts = part_sizes(num_train, held_out=6)
    rng = np.random.default_rng([seed, 0x7E61])
    made = [_signal(rng, median_length=median_length, mean_stay=mean_stay) for _ in range(sum(counts))]
    offsets = np.cumsum([0, *(len(labels_T) for _, labels_T in made)])
    return SequenceSet.from_flat(
        np.concatenate([features_TF for features_TF, _ in made]),
        offsets=offsets,
        targets=StepLabels.check(
            np.concatenate([labels_T for _, labels_T in made]), offsets=offsets, names=REGIME_NAMES, source="regimes"
        ),
        split_N=np.repeat(np.arange(3), counts),
        name="regimes",
    )


def _signal(
    rng: np.random.Generator, *, median_length: int, mean_stay: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Features (T, 2) and labels of one signal."""
    shortest, longest = median_length // 4, median_length * 4
    length = int(np.clip(rng.lognormal(np.log(median_length), 0.6), shortest, longest))
    pace_T, pulse_T = np.zeros(length), np.zeros(length)
    labels_T = np.zeros(length, dtype=np.uint8)
    begin = 0
    while begin < length:
        end = begin + UNLABELLED_STEPS + int(rng.exponential(mean_stay))
        fast, down = rng.integers(2, size=2)
        pace_T[begin:end] = 2 * np.pi / (PERIODS[fast] * rng.uniform(0.85, 1.15))
        pulse_T[begin : min(end, begin + PULSE_STEPS)] = 2.0 - 4.0 * down
        labels_T[begin + UNLABELLED_STEPS : end] = 1 + 2 * fast + down
        begin = end
    swing_T = np.sin(np.cumsum(pace_T) + rng.uniform(0, 2 * np.pi))
    clean_TF = np.stack([swing_T, pulse_T], axis=1)
    return (clean_TF + rng.normal(scale=NOISE, size=clean_TF.shape)).astype(np.float32), labels_T
