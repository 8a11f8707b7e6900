"""How the learning rate changes over a run: a warm-up to its peak, then a decay counted in epochs.

A decay is a function of the epochs done, so the same decay holds for any batch size. `LargeBatch.schedule` makes torch
schedulers of them.
"""

import math
from collections.abc import Callable
from typing import Any, Final, Literal, final, get_args

from stretto.checks import check_choice, check_float, check_int
from stretto.errors import StrettoError

DecayName = Literal["constant", "linear", "poly", "exponential", "step", "cosine", "ptb"]
ScheduleName = Literal["one-cycle", DecayName]
Decay = Callable[[float], float]
"""The factor of the peak rate after so many epochs, whole or not."""
DEFAULT_FACTORS: Final = {"exponential": 0.95, "step": 0.1, "ptb": 0.5}
PTB_FLAT_EPOCHS: Final = 4
NEEDS_EPOCHS: Final = ("one-cycle", "linear", "poly", "step", "cosine")


def check_schedule(schedule: Any, *, epochs: float | None, decay_factor: float | None, flat_epochs: int | None) -> None:
    """Refuse a schedule that does not exist, lacks the number of epochs, or does not use a number given."""
    if not callable(schedule):
        check_choice(schedule, name="decay", choices=get_args(ScheduleName))
    if epochs is None and schedule in NEEDS_EPOCHS:
        raise StrettoError(
            f"the schedule {schedule!r} needs the number of epochs", fix="Give epochs=... to LargeBatch or build."
        )
    for argument, value, users in (
        ("decay_factor", decay_factor, tuple(DEFAULT_FACTORS)),
        ("flat_epochs", flat_epochs, ("step", "ptb")),
    ):
        if value is not None and schedule not in users:
            raise StrettoError(
                f"{argument}={value} was given with the schedule {schedule!r}, which does not use it",
                fix=f"Leave it out, or choose one of {', '.join(map(repr, users))}.",
            )
    if decay_factor is not None:
        check_float(decay_factor, name="decay_factor", above=0.0, at_most=1.0)
    if flat_epochs is not None:
        check_int(flat_epochs, name="flat_epochs", at_least=1 if schedule == "step" else 0)


@final
class WarmupThenDecay:
    """The factor of the peak rate for each update, for torch's `LambdaLR`.

    Update i of a warm-up of n has (i + 1) / n, so that the first one moves and the last one has the peak. Then the
    decay takes over, at the epoch reached by then: if it has fallen meanwhile, the rate drops to its curve.

    After e of E epochs, with the factor f (0.95 for exponential, 0.1 for step, 0.5 for ptb) and the flat epochs n (a
    third of the run for step, 4 for ptb), the decays are

        constant     1                             step      f once after every n epochs
        linear       1 - e/E                       cosine    half a cosine, from 1 to 0
        poly         (1 - e/E)^2                   ptb       1 for n epochs, then f more in each: Zaremba et al.
        exponential  f^e, less at every update

    Attributes are JSON-ready, so the scheduler's state is, and loading that state replaces them. There are `updates` in
    `updates_epochs` epochs: a run may know those of one epoch, or only those of all together.
    """

    # A user's function is not in `__dict__`, which is what a scheduler saves.
    __slots__ = ("__dict__", "_function")

    def __init__(
        self,
        decay: DecayName | Decay,
        *,
        warmup_updates: int,
        updates: float,
        updates_epochs: float = 1,
        epochs: float | None = None,
        decay_factor: float | None = None,
        flat_epochs: int | None = None,
    ) -> None:
        self._function = None if isinstance(decay, str) else decay
        self.decay = decay if isinstance(decay, str) else None
        self.warmup_updates = warmup_updates
        self.updates = updates
        self.updates_epochs = updates_epochs
        self.epochs = epochs
        self.factor = DEFAULT_FACTORS.get(str(decay), 1.0) if decay_factor is None else decay_factor
        self.flat_epochs: float | None = PTB_FLAT_EPOCHS if decay == "ptb" else epochs and epochs / 3
        if flat_epochs is not None:
            self.flat_epochs = flat_epochs

    def __call__(self, update: int) -> float:
        """The factor for the update of this number, from 0 on."""
        if update < self.warmup_updates:
            return (update + 1) / self.warmup_updates
        # The product first: at the end of an epoch the quotient is then a whole number, exactly.
        done = update * self.updates_epochs / self.updates
        return self._at(done) if self._function is None else self._function(done)

    def _at(self, done: float) -> float:
        """The decay by name; what follows the end of the run counts as its end."""
        epochs, flat = self.epochs or math.inf, self.flat_epochs or 0
        if self.decay in ("linear", "poly"):
            return (1.0 - min(1.0, done / epochs)) ** (1 if self.decay == "linear" else 2)
        if self.decay == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done / epochs)))
        if self.decay == "exponential":
            return float(self.factor**done)
        if self.decay == "step":
            return float(self.factor ** sum(done >= flat * number for number in range(1, math.ceil(epochs / flat))))
        if self.decay == "ptb":
            return float(self.factor ** max(0, math.floor(done) + 1 - flat))
        return 1.0
