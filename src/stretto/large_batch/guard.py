"""Watches training for signs that a larger batch, and the larger rate that comes with it, went wrong.

`Guard` judges updates by what they know anyway: loss, gradient norm, and now and then `local_curvature`.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch

from stretto.checks import check_callable, check_float, check_int, check_list
from stretto.errors import StrettoError
from stretto.large_batch.noise import sum_of_squares

STATE_VERSION: Final = 1
SPREAD_QUANTILES: Final = ((0.5, 1.4826), (0.9, 0.608))
"""Quantiles of absolute deviations, and the standard deviation of normal noise relative to each of them."""
SPIKES_IN_A_ROW: Final = 3
"""Gradients in a row that must be far too large: one alone is common in recurrent nets."""
STEEP_IN_A_ROW: Final = 3
"""Measurements in a row whose curvature is too steep for the rate; there is one in a few hundred updates."""


@final
class Guard:
    """Distinguishes divergence from noise, from what every update knows anyway.

    Trouble is any of these:

    - The loss or the norm of the gradient is NaN or inf.
    - The smoothed loss, the median of the last `window`, stays for `patience` updates above the best it has been by
      both `tolerance` times the size of that best and `spreads` standard deviations of the noise of the loss. The
      noise is taken from the median absolute deviation of calm updates, or what nine in ten deviate if that says more
      (losses of several kinds of batches have several levels), so outliers do not count and a loss that explodes
      cannot hide behind its own spread.
    - Three gradients in a row have norms of `spike` times their recent median, while the smoothed loss is above its
      best by a standard deviation. A gradient that grows while the loss falls is a net that has begun to learn.
    - The product of rate and curvature was above `max_rate_times_curvature` the last three times that it was measured.
      The limit is 2 for plain gradient descent, 2 (1 + m) with momentum m.

    Losses may be negative. Stationary noise of any size, with outliers, does not trigger it, nor does a falling loss.

    Args:
        tolerance: Tolerated rise of the smoothed loss, relative to the size of its best.
        spreads: Tolerated rise in standard deviations of the noise.
        patience: Updates in a row.
        window: Updates that the loss is smoothed over.
        memory: Calm updates that noise and norms are judged by.
        spike: Norm of a gradient relative to the median.
        max_rate_times_curvature: See above.

    Examples:
        >>> guard = Guard()
        >>> any(guard.observe(loss=1.0 + 0.1 * (at % 3)) for at in range(100)), guard.observe(loss=float("nan"))
        (False, 'the loss is nan')
    """

    def __init__(
        self,
        *,
        tolerance: float = 0.25,
        spreads: float = 4.0,
        patience: int = 10,
        window: int = 15,
        memory: int = 128,
        spike: float = 20.0,
        max_rate_times_curvature: float = 2.0,
    ) -> None:
        self.tolerance = check_float(tolerance, name="tolerance", at_least=0.0, owner="Guard")
        self.spreads = check_float(spreads, name="spreads", at_least=0.0, owner="Guard")
        self.patience = check_int(patience, name="patience", owner="Guard")
        self.spike = check_float(spike, name="spike", at_least=0.0, owner="Guard")
        self.max_rate_times_curvature = check_float(
            max_rate_times_curvature, name="max_rate_times_curvature", at_least=0.0, owner="Guard"
        )
        self.window = check_int(window, name="window", owner="Guard")
        self.memory = check_int(memory, name="memory", owner="Guard")
        self.restart()

    def restart(self) -> None:
        """Forget everything: after a roll-back the loss is another."""
        self._recent = deque[float](maxlen=self.window)
        self._gaps, self._norms = deque[float](maxlen=self.memory), deque[float](maxlen=self.memory)
        self._best: float | None = None
        self._high = self._spiked = self._steep = 0

    def observe(
        self, *, loss: float, gradient_norm: float | None = None, rate_times_curvature: float | None = None
    ) -> str:
        """Judge an update: what the trouble is; empty if there is none.

        Args:
            loss: Its mean loss.
            gradient_norm: Norm of its gradient, before clipping.
            rate_times_curvature: Learning rate times `local_curvature`, when that was measured; NaN counts as not.
        """
        for name, value in (("the loss", loss), ("the norm of the gradient", gradient_norm)):
            if value is not None and not math.isfinite(value):
                return f"{name} is {value}"
        reasons = [self._judge_loss(loss)]
        if gradient_norm is not None:
            reasons.append(self._judge_norm(gradient_norm))
        if rate_times_curvature is not None and not math.isnan(rate_times_curvature):
            limit = self.max_rate_times_curvature
            self._steep = self._steep + 1 if rate_times_curvature > limit else 0
            if self._steep >= STEEP_IN_A_ROW:
                reasons.append(
                    f"rate times curvature is {rate_times_curvature:.3g}, above {limit:g} {self._steep} times in a row"
                )
        return "; ".join(reason for reason in reasons if reason)

    @property
    def smoothed(self) -> float | None:
        """The smoothed loss; None until there are enough updates."""
        return statistics.median(self._recent) if len(self._recent) == self.window else None

    @property
    def spread(self) -> float:
        """The standard deviation of the noise of the loss; infinite until there are enough calm updates."""
        gaps = sorted(self._gaps)
        if len(gaps) < min(self.window, self.memory):
            return math.inf
        return max(factor * gaps[int(share * (len(gaps) - 1))] for share, factor in SPREAD_QUANTILES)

    def _judge_loss(self, loss: float) -> str:
        self._recent.append(loss)
        smoothed = self.smoothed
        if smoothed is None:
            return ""
        best = smoothed if self._best is None else min(self._best, smoothed)
        self._best = best
        rise, spread = smoothed - best, self.spread
        tolerated = max(self.tolerance * abs(best), self.spreads * spread)
        if rise <= tolerated:
            self._high = 0
            self._gaps.append(abs(loss - smoothed))
            return ""
        self._high += 1
        if self._high < self.patience:
            return ""
        return (
            f"the smoothed loss is {smoothed:.4g}, {rise:.3g} above its best of {best:.4g}, for {self._high} updates; "
            f"{tolerated:.3g} are tolerated (noise {spread:.3g})"
        )

    def _judge_norm(self, norm: float) -> str:
        usual = statistics.median(self._norms) if len(self._norms) >= self.patience else math.inf
        if norm <= self.spike * usual:
            self._norms.append(norm)
            self._spiked = 0
            return ""
        smoothed, best = self.smoothed, self._best
        if smoothed is None or best is None or smoothed - best <= self.spread:
            self._spiked = 0
            return ""
        self._spiked += 1
        if self._spiked < SPIKES_IN_A_ROW:
            return ""
        return f"the norm of the gradient is {norm:.3g}, usually {usual:.3g}, {self._spiked} times in a row"

    def state_dict(self) -> dict[str, Any]:
        """Everything that was observed, ready for JSON."""
        return {
            "version": STATE_VERSION,
            "recent": list(self._recent),
            "gaps": list(self._gaps),
            "norms": list(self._norms),
            "best": self._best,
            "counts": [self._high, self._spiked, self._steep],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave; settings stay as they are here."""
        if state.get("version") != STATE_VERSION:
            raise StrettoError(
                f"the state of a guard has version {state.get('version')!r}, not {STATE_VERSION}",
                fix="Begin with a new guard.",
            )
        self._recent = deque(state["recent"], maxlen=self.window)
        self._gaps, self._norms = (deque(state[name], maxlen=self.memory) for name in ("gaps", "norms"))
        self._best = state["best"]
        self._high, self._spiked, self._steep = map(int, state["counts"])


@torch.no_grad()
def local_curvature(gradient_at: Callable[[], Sequence[torch.Tensor]], parameters: Sequence[torch.Tensor]) -> float:
    """The local Lipschitz constant of the gradient along itself, L(x, g) ~ |g(x + e g/|g|) - g(x)| / e.

    The distance e is the root of the precision times 1 + |x|, |x| the norm of all weights.

    On a quadratic with Hessian A it is |A g| / |g|, at most the largest eigenvalue. Plain gradient descent at rate r
    overshoots along its step where r L > 2. It peaks early in training, which is what warm-up waits for (You et al.
    2019, arXiv 1901.08256). It costs two gradients of a batch, which may be small. For optimisers that divide
    gradients, such as Adam, r L says nothing.

    Args:
        gradient_at: Gives the gradient of each parameter at the weights as they are, always of the same batch and with
            the same random draws. It may return the same tensors every time.
        parameters: The weights. They are moved and restored bit for bit, also if `gradient_at` fails.

    Returns:
        The curvature; NaN where the gradient is zero, NaN or inf, since there is no direction to look along.

    Raises:
        StrettoError: Gradients do not match parameters.

    Examples:
        >>> x = torch.tensor([3.0, 4.0], dtype=torch.float64)
        >>> round(local_curvature(lambda: [5.0 * x], [x]), 6)
        5.0
    """
    check_callable(gradient_at, name="gradient_at", owner="local_curvature")
    weights = check_list(parameters, name="parameters", owner="local_curvature", fix="Give model.parameters().")
    if not weights:
        raise StrettoError("there are no parameters to look along", fix="Give those that are trained.")
    first = [gradient.detach().clone() for gradient in gradient_at()]
    found, wanted = ([tuple(tensor.shape) for tensor in tensors] for tensors in (first, weights))
    if found != wanted:
        raise StrettoError(
            f"gradients have the shapes {found}, parameters {wanted}",
            fix="Give one gradient per parameter, in the same order.",
        )
    norm = math.sqrt(float(sum_of_squares(first)))
    if not math.isfinite(norm) or norm == 0.0:
        return math.nan
    precision = max(torch.finfo(weight.dtype).eps for weight in weights)
    distance = math.sqrt(precision) * (1.0 + math.sqrt(float(sum_of_squares(weights))))
    kept = [weight.clone() for weight in weights]
    try:
        torch._foreach_add_(weights, first, alpha=distance / norm)
        second = [gradient.detach() for gradient in gradient_at()]
        gap = torch._foreach_sub(second, first)
        return math.sqrt(float(sum_of_squares(gap))) / distance
    finally:
        torch._foreach_copy_(weights, kept)
