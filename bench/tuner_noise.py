"""How far the noise meter can be trusted: on a quadratic whose noise is known, and along a run that is measured.

Shape legend: D dimensions, N sequences of an update, K parts.
"""

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any, Final, final

import torch

from stretto.distributed import World
from stretto.large_batch import NoiseScale, SplitByMicroBatch
from stretto.training import AbstractTask, TrainState, Updater

GOAL: Final = 0.10
"""How far the meter may be off on a quadratic, relative."""
TRUE: Final = 20.0
"""Noise scale of the quadratics, but for the rounding of their weights."""
A_PART: Final = 8
"""Sequences of each part of an update of the quadratic."""
ALONG: Final = 50
"""Measured updates that the meter remembers along a run: the noise scale changes on the way."""
AGE: Final = ALONG - 1
"""Of the average over these, in updates: the mean of how long ago they were, weighted as they are."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuadraticRow:
    """One quadratic problem with known noise.

    Attributes:
        dimension: D.
        parts: K, of 8 sequences each.
        dtype: Of weights and gradients.
        true: The noise scale.
        measured: What the meter says; infinite where noise hid the gradient.
    """

    dimension: int
    parts: int
    dtype: str
    true: float
    measured: float

    @property
    def error(self) -> float:
        """How far the meter is off, relative."""
        return self.measured / self.true - 1.0


def quadratic_row(*, dimension: int, parts: int, dtype: torch.dtype, updates: int, seed: int = 0) -> QuadraticRow:
    """Measure the noise of gradients of |A^(1/2) (w - x)|^2 / 2, A diagonal, x normal around zero.

    The gradient of one x is A (w - x): its mean is A w, its covariance A S A with S that of x. The weights stay where
    they are, so that the true scale, trace(A S A) / |A w|^2, does too.

    Args:
        dimension: D.
        parts: K.
        dtype: Of weights and gradients.
        updates: That are measured; all count alike.
        seed: Of everything drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    curvature_D = torch.logspace(-1, 1, dimension, dtype=torch.float64)
    spread_D = 0.5 + torch.rand(dimension, generator=generator, dtype=torch.float64)
    weights_D = torch.randn(dimension, generator=generator, dtype=torch.float64)
    weights_D *= (curvature_D * spread_D).norm() / (curvature_D * weights_D).norm() / math.sqrt(TRUE)
    weights_D = weights_D.to(dtype).requires_grad_()
    held_D = weights_D.detach().double()
    true = float((curvature_D * spread_D).square().sum() / (curvature_D * held_D).square().sum())
    meter, split = NoiseScale(memory=1_000_000, min_updates=1), SplitByMicroBatch([weights_D])
    curvature_D, spread_D = curvature_D.to(dtype), spread_D.to(dtype)
    for _ in range(updates):
        weights_D.grad = None
        for _ in range(parts):
            x_ND = spread_D * torch.randn(A_PART, dimension, generator=generator, dtype=dtype)
            loss = 0.5 * (curvature_D * (weights_D - x_ND).square()).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            split.add(A_PART)
        norms = split.take(scale=1.0 / (parts * A_PART))
        assert norms is not None
        meter.add(norms)
    measured = math.inf if meter.scale is None else meter.scale
    return QuadraticRow(
        dimension=dimension, parts=parts, dtype=str(dtype).removeprefix("torch."), true=true, measured=measured
    )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoiseAlong:
    """The noise scale in the course of a run.

    Attributes:
        batch_size: That it was trained with.
        scales: One an update; where noise hid the gradient, what the meter takes in its place.
        trace: Of the covariance of one sequence's gradient, the mean of the whole run.
        square: Of the norm of the gradient, likewise.
    """

    batch_size: int
    scales: tuple[float, ...]
    trace: float
    square: float

    @property
    def mean(self) -> float:
        """The mean over progress instead of updates, which is what steps to a target depend on.

        An update with noise scale phi does 1 / (1 + phi/B) of the work of one without noise, and steps(B) is the sum of
        1 + phi/B over the work: only the mean over work enters. It weighs each update by what it does. Where phi is
        much larger than the batch that is the harmonic mean over updates, where it is much smaller the plain one.
        """
        weights = [1.0 / (1.0 + scale / self.batch_size) for scale in self.scales]
        return math.fsum(w * s for w, s in zip(weights, self.scales, strict=True)) / math.fsum(weights)

    def until(self, updates: int) -> "NoiseAlong":
        """The same of the first so many updates."""
        return dataclasses.replace(self, scales=self.scales[:updates])


def predicted_updates(updates: float, *, noise_scale: float, base_batch_size: int, batch_size: int) -> float:
    """Updates to the target at another batch, from those at the base batch.

    Args:
        updates: At the base batch.
        noise_scale: In sequences.
        base_batch_size: B0.
        batch_size: B; steps are steps(B0) (1 + phi/B) / (1 + phi/B0).
    """
    return updates * (1 + noise_scale / batch_size) / (1 + noise_scale / base_batch_size)


def noise_along(task: AbstractTask[Any], *, updates: int) -> NoiseAlong | None:
    """Train as a run at the base batch does, a little further, and take every update apart.

    An average that fades is as old as its memory: it belongs to so many updates earlier.

    Args:
        task: Model, loss, data and settings, with a batch size that is given.
        updates: Whose noise is wanted, at most all of the run.

    Returns:
        What was measured; None if noise hid the gradient all the way, and not even a bound was found.
    """
    feed = task.feed(world=World())
    earlier = torch.get_rng_state()
    try:
        torch.manual_seed(task.config.seed)
        model = task.build_model().to(task.config.device)
        state = TrainState(model, config=task.config, steps_per_epoch=len(feed), batch_size=feed.batch_size)
        updater = Updater(task, state, world=World(), stop=threading.Event(), measures_noise=True)
        whole, meter, known = NoiseScale(memory=1_000_000), NoiseScale(memory=ALONG), list[float | None]()
        model.train()
        for epoch in range(task.config.epochs):
            feed.begin_epoch(epoch, model)
            updater.weigh(feed)
            state.epoch = epoch
            for batch in feed:
                if state.step >= updates + AGE:
                    break
                updater.begin(measured=True)
                updater.add(batch.to(task.config.device), is_last=True)
                state.step += 1
                if updater.norms is not None:
                    for each in (whole, meter) if state.step <= updates else (meter,):
                        each.add(updater.norms)
                known.append(meter.cautious_scale)
    finally:
        torch.set_rng_state(earlier)
    scales = moved(filled(known), by=AGE)[:updates]
    if not scales:
        return None
    return NoiseAlong(batch_size=feed.batch_size, scales=scales, trace=whole.trace, square=whole.square)


def moved(values: tuple[float, ...], *, by: int) -> tuple[float, ...]:
    """Each value so many places earlier, and the last one where none is left."""
    return values[by:] + values[-1:] * min(by, len(values))


def filled(known: Sequence[float | None]) -> tuple[float, ...]:
    """Each value that is not known replaced by the last that was, or the first; empty if none ever was."""
    first = next((value for value in known if value is not None), None)
    if first is None:
        return ()
    values, last = [], first
    for value in known:
        last = last if value is None else value
        values.append(last)
    return tuple(values)
