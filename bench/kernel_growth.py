"""How the time of a training step grows with the length, the batch and the size of the layer.

Shape legend: T steps, B sequences, H hidden units, S points of a sweep.
"""

import dataclasses
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from bench.interleaved import Pace, interleaved
from bench.kernel_comparison import Tell
from bench.kernel_peers import drawn_cell, our_step
from bench.training_step import StepShape, drawn_batch
from stretto.nn import RNN

Axis = Literal["num_steps", "batch", "hidden_size"]
Numbers = npt.NDArray[np.float64]

BASES: Final[dict[Axis, StepShape]] = {
    "num_steps": StepShape(num_steps=1, batch=1, input_size=32, hidden_size=64),
    "batch": StepShape(num_steps=200, batch=1, input_size=32, hidden_size=128),
    "hidden_size": StepShape(num_steps=200, batch=1, input_size=32, hidden_size=1),
}
SIZES: Final[dict[Axis, tuple[int, ...]]] = {
    "num_steps": (500, 1000, 2000, 4000, 8000, 16_000),
    "batch": (1, 2, 4, 8, 16, 32, 64, 128),
    "hidden_size": (32, 64, 128, 256, 512, 1024),
}
QUICK_SIZES: Final[dict[Axis, tuple[int, ...]]] = {
    "num_steps": (4, 8, 16),
    "batch": (1, 2, 4),
    "hidden_size": (4, 8),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A GRU's training step with one size changed, all points in one interleaved run.

    Attributes:
        axis: The size that is changed.
        base: The other sizes.
        sizes: Its values.
        seconds: Least time at each.
        exponent: Of the power of the size that fits the times best; 1 is linear.
        off_line: Largest share by which a time is off the straight line that fits best, each time counting alike.
    """

    axis: Axis
    base: StepShape
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    exponent: float
    off_line: float


def growth(*, pace: Pace, quick: bool, tell: Tell) -> tuple[Growth, ...]:
    """One sweep for each size."""
    return tuple(_sweep(axis, pace=pace, quick=quick, tell=tell) for axis in BASES)


def fitted_exponent(sizes_S: Numbers, seconds_S: Numbers) -> float:
    """The power p for which seconds = c * size ** p fits best in logarithms."""
    return float(np.polyfit(np.log(sizes_S), np.log(seconds_S), 1)[0])


def share_off_line(sizes_S: Numbers, seconds_S: Numbers) -> float:
    """Largest relative distance from the line a + b * size that has the least squares of relative distances."""
    weighted_S2 = np.stack([np.ones_like(sizes_S), sizes_S], axis=1) / seconds_S[:, None]
    line, *_ = np.linalg.lstsq(weighted_S2, np.ones_like(sizes_S), rcond=None)
    return float(np.abs(weighted_S2 @ line - 1).max())


def _sweep(axis: Axis, *, pace: Pace, quick: bool, tell: Tell) -> Growth:
    base, sizes = BASES[axis], (QUICK_SIZES if quick else SIZES)[axis]
    if quick:
        base = dataclasses.replace(base, num_steps=6, input_size=4, hidden_size=8)
    steps = {}
    for size in sizes:
        shape = dataclasses.replace(base, **{axis: size})
        tell(f"growth: {shape}")
        step = our_step(RNN(drawn_cell("GRU", shape), batch_first=False), batch=drawn_batch(shape))
        step.run()
        steps[str(size)] = step.run
    timings = interleaved(steps, pace=pace)
    seconds = tuple(timings[str(size)].least for size in sizes)
    sizes_S, seconds_S = np.array(sizes, dtype=np.float64), np.array(seconds)
    return Growth(
        axis=axis,
        base=base,
        sizes=sizes,
        seconds=seconds,
        exponent=fitted_exponent(sizes_S, seconds_S),
        off_line=share_off_line(sizes_S, seconds_S),
    )
