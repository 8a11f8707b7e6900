"""How often the clipping of gradients bites, which a larger batch changes unasked."""

import dataclasses
import math
from typing import Any, final


@final
@dataclasses.dataclass(slots=True)
class ClipMeter:
    """Counts updates whose gradient was clipped, and by how much.

    Clipping takes part in the learning rate: an update that is scaled down by 0.3 is an update at 0.3 of the rate. The
    square of a gradient's norm is |G|^2 + tr / B for a batch of B sequences, so the same threshold bites less often the
    larger the batch is, and the rate in effect rises by more than the scaling rule says. This tells by how much.

    Attributes:
        num_updates: Updates seen.
        num_clipped: Those whose norm was above the threshold.
        sum_factors: Sum of what they were multiplied by, 1 for the others.

    Example:
        >>> meter = ClipMeter()
        >>> for norm in (0.5, 1.0, 4.0):
        ...     meter.add(norm, clip_norm=1.0)
        >>> round(meter.share, 3), round(meter.mean_factor, 3)
        (0.333, 0.75)
    """

    num_updates: int = 0
    num_clipped: int = 0
    sum_factors: float = 0.0

    def add(self, norm: float, *, clip_norm: float) -> None:
        """Count an update.

        Args:
            norm: Of the gradient before clipping, as `torch.nn.utils.clip_grad_norm_` returns it. A norm that is no
                number belongs to an update that should not happen, and is not counted.
            clip_norm: The threshold.
        """
        if not math.isfinite(norm):
            return
        self.num_updates += 1
        self.num_clipped += norm > clip_norm
        self.sum_factors += min(1.0, clip_norm / norm) if norm else 1.0

    @property
    def share(self) -> float | None:
        """The share of updates that were clipped; None before the first."""
        return self.num_clipped / self.num_updates if self.num_updates else None

    @property
    def mean_factor(self) -> float | None:
        """What clipping left of the rate on average; None before the first update."""
        return self.sum_factors / self.num_updates if self.num_updates else None

    def reset(self) -> None:
        """Begin anew, as at the start of an epoch."""
        self.num_updates, self.num_clipped, self.sum_factors = 0, 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """What was counted, JSON-ready."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from there."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, state[field.name])
