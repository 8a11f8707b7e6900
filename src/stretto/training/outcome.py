"""What comes of training: an epoch in numbers, the end of a run, and its interruption."""

import dataclasses
from pathlib import Path
from typing import Any, final

from torch import nn

from stretto.training.solving import SolverRecord


@final
class Interrupted(Exception):  # noqa: N818
    """Training was asked to stop; everything is saved."""

    def __init__(self, run: Path, *, step: int) -> None:
        super().__init__(f"stopped at step {step}, saved in {run}")
        self.run = run
        self.step = step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """One epoch in numbers, as the event of that name has them.

    Attributes:
        epoch: How many are done with this one.
        step: Updates since the start.
        train_loss: Mean over the epoch.
        valid_loss: On the validation part, after the epoch.
        metric: The task's metric.
        value: Its value on the validation part.
        seconds: Of the updates, the measuring left out.
        steps_per_second: Real time steps a second.
        padding: Share of slots that were padding.
        clipped: Share of updates whose gradient was clipped.
        solving: How the solver of the recurrent layers fared; None, and not in the event, where all is walked step
            after step.
    """

    epoch: int
    step: int
    train_loss: float
    valid_loss: float
    metric: str
    value: float
    seconds: float
    steps_per_second: float
    padding: float
    clipped: float
    solving: SolverRecord | None = None

    def to_event(self) -> dict[str, Any]:
        """What the event has besides its kind and time."""
        values = dataclasses.asdict(self)
        if self.solving is None:
            del values["solving"]
        return values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """How training ended; `saving` is the share of the time in which it stood still for checkpoints."""

    metrics: dict[str, float]
    epochs: int
    seconds: float
    padding: float
    steps_per_second: float
    saving: float
    model: nn.Module
