"""What one sequence costs when it is padded to a length.

Shape legend: V lengths, M measurements.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.errors import StrettoError

Cost = Callable[..., Any]


def evaluate_cost(lengths_V: npt.NDArray[np.int64], cost: Cost | None) -> npt.NDArray[Any]:
    """Evaluate `cost` at each length, in one call when it takes arrays and one by one when it does not.

    Of pairs (V, 2) it is a function of two lengths. None counts the steps of a sequence, or of both.
    """
    is_pairs = lengths_V.ndim > 1
    if cost is None:
        return lengths_V.sum(axis=1) if is_pairs else lengths_V
    columns = lengths_V.T if is_pairs else lengths_V[None]
    try:
        given = np.asarray(cost(*columns), dtype=np.float64)
        if given.shape == columns[0].shape:
            return given
    except (TypeError, ValueError) as error:
        if isinstance(error, StrettoError):
            raise
    try:
        return np.array([float(cost(*map(int, row))) for row in columns.T], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise StrettoError(
            f"cost could not be evaluated at a {'pair of lengths' if is_pairs else 'length'} ({error})",
            fix=f"It must take {'two lengths' if is_pairs else 'a length'} and return one number.",
        ) from error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The time of one sequence when a batch of B sequences of L steps takes a + L (s0 + s1 B).

    Call it with lengths: it is a `cost` for `optimal_edges` and `BucketSampler`. With a budget of padded steps a batch
    holds B = max_padded_steps // L sequences. The longer they are, the fewer share the latency s0 of a step, so the
    cost grows faster than L.

    Attributes:
        per_batch: a, spent once per batch (launch, optimiser, all-reduce).
        per_step: s0, spent once per time step, whatever the batch size.
        per_padded_step: s1, spent on each step of each sequence.
        max_padded_steps: The budget of padded steps per batch.
        batch_size: The fixed batch size, instead of a budget.
    """

    per_batch: float
    per_step: float
    per_padded_step: float
    max_padded_steps: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if (self.max_padded_steps is None) == (self.batch_size is None) or (
            self.max_padded_steps or self.batch_size or 0
        ) < 1:
            raise StrettoError(
                f"StepCost got max_padded_steps={self.max_padded_steps} and batch_size={self.batch_size}",
                fix="Give exactly one of them, at least 1.",
            )
        terms = (self.per_batch, self.per_step, self.per_padded_step)
        if not all(math.isfinite(term) and term >= 0 for term in terms):
            raise StrettoError(
                f"StepCost has the terms {terms}, one of them negative or not finite",
                fix="Use StepCost.fit, which keeps all terms at 0 or above.",
            )

    def __call__(self, lengths: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Seconds of one sequence padded to each of the lengths."""
        length_V = np.asarray(lengths, dtype=np.float64)
        rows_V = np.full_like(length_V, self.batch_size or 0)
        if self.max_padded_steps is not None:
            rows_V = np.maximum(1.0, np.floor(self.max_padded_steps / length_V))
        return (self.per_batch + self.per_step * length_V) / rows_V + self.per_padded_step * length_V

    @classmethod
    def fit(
        cls,
        shapes: Sequence[tuple[int, int]],
        seconds: Sequence[float],
        *,
        max_padded_steps: int | None = None,
        batch_size: int | None = None,
    ) -> "StepCost":
        """Fit the three terms, none below zero, to timed (rows, steps) shapes by relative least squares."""
        if len(shapes) != len(seconds) or len(shapes) < 3:
            raise StrettoError(
                f"{len(shapes)} shapes with {len(seconds)} times cannot be fitted",
                fix="Time at least 3 different shapes, 6 to 12 for a good fit.",
            )
        rows_M, steps_M = np.asarray(shapes, dtype=np.float64).T
        time_M = np.asarray(seconds, dtype=np.float64)
        wrong = np.flatnonzero(~(np.isfinite(time_M) & (time_M > 0)))
        if len(wrong):
            raise StrettoError(
                f"shape {tuple(shapes[int(wrong[0])])} took {time_M[wrong[0]]} seconds, which cannot be fitted",
                fix="Time every shape again; each must take a positive, finite time.",
            )
        design_M3 = np.stack([np.ones_like(steps_M), steps_M, steps_M * rows_M], axis=1) / time_M[:, None]
        terms = _non_negative_least_squares(design_M3, np.ones_like(time_M))
        per_batch, per_step, per_padded_step = (float(term) for term in terms)
        return cls(
            per_batch=per_batch,
            per_step=per_step,
            per_padded_step=per_padded_step,
            max_padded_steps=max_padded_steps,
            batch_size=batch_size,
        )

    @classmethod
    def measure(
        cls,
        train_step: Callable[[int, int], object],
        *,
        longest: int,
        max_padded_steps: int | None = None,
        batch_size: int | None = None,
        repeats: int = 3,
    ) -> "StepCost":
        """Time `train_step(rows, steps)` at nine shapes up to `longest` steps, interleaved, and fit the minima."""
        steps = sorted({max(1, longest // 16), max(1, longest // 4), longest})
        most = batch_size if batch_size is not None else max(1, (max_padded_steps or 1) // longest)
        shapes = [(rows, length) for length in steps for rows in sorted({1, max(1, most // 2), most})]
        if len(shapes) < 3:
            shapes = [(1, 1), (1, 2), (2, 1)]
        best = dict.fromkeys(shapes, float("inf"))
        for _, shape in itertools.product(range(repeats + 1), shapes):
            start = time.perf_counter()
            train_step(*shape)
            best[shape] = min(best[shape], time.perf_counter() - start)
        return cls.fit(
            shapes, [best[shape] for shape in shapes], max_padded_steps=max_padded_steps, batch_size=batch_size
        )


def _non_negative_least_squares(
    design_M3: npt.NDArray[np.float64], wanted_M: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """With three unknowns, try every set of terms that may be positive and keep the best fit that is."""
    best, best_error = np.zeros(3), float("inf")
    for size in (3, 2, 1):
        for used in itertools.combinations(range(3), size):
            found = np.linalg.lstsq(design_M3[:, used], wanted_M, rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(((design_M3[:, used] @ found - wanted_M) ** 2).sum())
            if error < best_error - 1e-12:
                best, best_error = np.zeros(3), error
                best[list(used)] = found
    return best
