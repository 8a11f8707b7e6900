"""Watches training for signs that a larger batch, and the larger rate that comes with it, went wrong."""

import dataclasses
import math
from typing import Any, Final, Literal, final

from stretto.errors import StrettoError
from stretto.large_batch.sorted_window import SortedWindow

STATE_VERSION: Final = 1
WITHIN: Final = ((0.5, 1.4826), (0.9, 0.608))
"""Shares of deviations, and the standard deviation of normal noise relative to what so many of them are within."""
SPIKES: Final = 3
"""Gradients in a row that must be far too large: one alone is common in recurrent nets."""
STEEP: Final = 3
"""Looks at the curvature in a row that must be too steep for the rate; there is one in a few hundred updates."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the last update looks like.

    Attributes:
        state: "fine" or "trouble".
        reason: What the trouble is; empty if there is none.
    """

    state: Literal["fine", "trouble"]
    reason: str = ""

    @property
    def is_trouble(self) -> bool:
        """Whether to go back."""
        return self.state == "trouble"


FINE: Final = Verdict(state="fine")


@final
class Guard:
    """Tells divergence from noise, from what every update knows anyway.

    Trouble is any of these:

    - The loss or the norm of the gradient is no number.
    - The smoothed loss, the median of the last `window`, stays for `patience` updates above the best it has been by
      both `tolerance` times the size of that best and `spreads` standard deviations of the noise of the loss. The
      noise is taken from the median absolute deviation of calm updates, or what nine in ten deviate if that says more
      (losses of several kinds of batches have several levels), so outliers do not count and a loss that explodes
      cannot hide behind its own spread.
    - Three gradients in a row have norms of `spike` times their recent median, while the smoothed loss is above its
      best by a standard deviation. A gradient that grows while the loss falls is a net that has begun to learn.
    - The product of rate and curvature was above `limit` the last three times that it was told. The limit is 2 for
      plain gradient descent, 2 (1 + m) with momentum m.

    Losses may be negative. Noise that is stationary, of any size and with outliers, is no trouble, nor is a loss that
    falls.

    Args:
        tolerance: Rise of the smoothed loss that is borne, relative to the size of its best.
        spreads: Rise that is borne in standard deviations of the noise.
        patience: Updates in a row.
        window: Updates that the loss is smoothed over.
        memory: Calm updates that noise and norms are judged by.
        spike: Norm of a gradient relative to the median.
        limit: Of rate times curvature.

    Example:
        >>> guard = Guard()
        >>> verdicts = [guard.observe(loss=1.0 + 0.1 * (at % 3)) for at in range(100)]
        >>> verdicts[-1].state, guard.observe(loss=float("nan")).reason
        ('fine', 'the loss is nan')
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
        limit: float = 2.0,
    ) -> None:
        if min(patience, window, memory) < 1 or min(tolerance, spreads, spike, limit) < 0:
            raise StrettoError(
                f"Guard got patience={patience}, window={window}, memory={memory}, tolerance={tolerance}, "
                f"spreads={spreads}, spike={spike} and limit={limit}",
                fix="Give counts of at least 1 and other numbers of at least 0.",
            )
        self.tolerance, self.spreads, self.patience = tolerance, spreads, patience
        self.spike, self.limit = spike, limit
        self._recent, self._gaps, self._norms = SortedWindow(window), SortedWindow(memory), SortedWindow(memory)
        self.restart()

    def restart(self) -> None:
        """Forget everything: after going back, the loss is another."""
        for kept in (self._recent, self._gaps, self._norms):
            kept.clear()
        self._best: float | None = None
        self._high = self._spiked = self._steep = 0

    def observe(
        self, *, loss: float, gradient_norm: float | None = None, rate_times_curvature: float | None = None
    ) -> Verdict:
        """Look at an update.

        Args:
            loss: Its mean loss.
            gradient_norm: Norm of its gradient, before clipping.
            rate_times_curvature: Learning rate times `local_curvature`, when that was measured; NaN counts as not.
        """
        for name, value in (("the loss", loss), ("the norm of the gradient", gradient_norm)):
            if value is not None and not math.isfinite(value):
                return _trouble(f"{name} is {value}")
        reasons = [self._look_at_loss(loss)]
        if gradient_norm is not None:
            reasons.append(self._look_at_norm(gradient_norm))
        if rate_times_curvature is not None and not math.isnan(rate_times_curvature):
            self._steep = self._steep + 1 if rate_times_curvature > self.limit else 0
            if self._steep >= STEEP:
                product = f"rate times curvature is {rate_times_curvature:.3g}"
                reasons.append(f"{product}, above {self.limit:g} {self._steep} times running")
        told = [reason for reason in reasons if reason]
        return _trouble("; ".join(told)) if told else FINE

    @property
    def smoothed(self) -> float | None:
        """The smoothed loss; None until there are enough updates."""
        return self._recent.median if self._recent.is_full else None

    @property
    def spread(self) -> float:
        """The standard deviation of the noise of the loss; infinite until there are enough calm updates."""
        if len(self._gaps) < min(self._recent.size, self._gaps.size):
            return math.inf
        return max(factor * self._gaps.quantile(share) for share, factor in WITHIN)

    def _look_at_loss(self, loss: float) -> str:
        self._recent.append(loss)
        smoothed = self.smoothed
        if smoothed is None:
            return ""
        best = smoothed if self._best is None else min(self._best, smoothed)
        self._best = best
        rise, spread = smoothed - best, self.spread
        borne = max(self.tolerance * abs(best), self.spreads * spread)
        if rise <= borne:
            self._high = 0
            self._gaps.append(abs(loss - smoothed))
            return ""
        self._high += 1
        if self._high < self.patience:
            return ""
        return (
            f"the smoothed loss is {smoothed:.4g}, {rise:.3g} above its best of {best:.4g}, for {self._high} updates; "
            f"{borne:.3g} are borne (noise {spread:.3g})"
        )

    def _look_at_norm(self, norm: float) -> str:
        usual = self._norms.median if len(self._norms) >= self.patience else math.inf
        if norm <= self.spike * usual:
            self._norms.append(norm)
            self._spiked = 0
            return ""
        smoothed, best = self.smoothed, self._best
        if smoothed is None or best is None or smoothed - best <= self.spread:
            self._spiked = 0
            return ""
        self._spiked += 1
        if self._spiked < SPIKES:
            return ""
        return f"the norm of the gradient is {norm:.3g}, usually {usual:.3g}, {self._spiked} times running"

    def state_dict(self) -> dict[str, Any]:
        """All that was seen, ready for JSON."""
        return {
            "version": STATE_VERSION,
            "recent": list(self._recent),
            "gaps": list(self._gaps),
            "norms": list(self._norms),
            "best": self._best,
            "counts": [self._high, self._spiked, self._steep],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; settings stay as they are here."""
        if state.get("version") != STATE_VERSION:
            raise StrettoError(
                f"the state of a guard has version {state.get('version')!r}, not {STATE_VERSION}",
                fix="Begin with a new guard.",
            )
        self._recent = SortedWindow(self._recent.size, state["recent"])
        self._gaps = SortedWindow(self._gaps.size, state["gaps"])
        self._norms = SortedWindow(self._norms.size, state["norms"])
        self._best = state["best"]
        self._high, self._spiked, self._steep = map(int, state["counts"])


def _trouble(reason: str) -> Verdict:
    return Verdict(state="trouble", reason=reason)
