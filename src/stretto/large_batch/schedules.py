"""How the learning rate changes over a run: a warm-up to its peak, then a decay counted in epochs.

Decays are pure functions of the epochs done, so the same decay holds for any batch size. `LargeBatch.schedule` makes
torch schedulers of them.
"""

import abc
import dataclasses
import math
from typing import Any, ClassVar, Final, Literal, final

from stretto.checks import check_choice, check_float, check_int
from stretto.errors import StrettoError

DecayName = Literal["constant", "poly", "exponential", "step", "cosine", "ptb"]
ScheduleName = Literal["one-cycle", DecayName]


class AbstractDecay(abc.ABC):
    """A factor of the peak rate for every moment of a run."""

    name: ClassVar[DecayName]
    needs_epochs: ClassVar[bool] = False

    @abc.abstractmethod
    def at(self, done: float, *, epochs: float | None) -> float:
        """The factor after `done` epochs, whole or not, of `epochs`; None where that is unknown and not needed."""

    def to_json(self) -> dict[str, Any]:
        """The decay as JSON-ready values; `decay_from_json` makes it again."""
        return {"name": self.name, **dataclasses.asdict(self)}  # type: ignore[call-overload]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constant(AbstractDecay):
    """The peak, to the end."""

    name: ClassVar[DecayName] = "constant"

    def at(self, done: float, *, epochs: float | None) -> float:  # noqa: ARG002
        """Always 1."""
        return 1.0


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial(AbstractDecay):
    """(1 - e / E) ** power after e of E epochs: zero at the end. LARS is used with a power of 2, LAMB with 1."""

    name: ClassVar[DecayName] = "poly"
    needs_epochs: ClassVar[bool] = True
    power: float = 2.0

    def __post_init__(self) -> None:
        check_float(self.power, name="power", above=0.0)

    def at(self, done: float, *, epochs: float | None) -> float:
        """The remaining fraction of the run, to the power."""
        return float((1.0 - _fraction(done, epochs)) ** self.power)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exponential(AbstractDecay):
    """factor ** e after e epochs, a little less at every update."""

    name: ClassVar[DecayName] = "exponential"
    factor: float = 0.95

    def __post_init__(self) -> None:
        check_float(self.factor, name="factor", above=0.0, at_most=1.0)

    def at(self, done: float, *, epochs: float | None) -> float:  # noqa: ARG002
        """The factor to the power of the epochs done."""
        return float(self.factor**done)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step(AbstractDecay):
    """The rate is multiplied by `factor` at every milestone: epochs, increasing."""

    name: ClassVar[DecayName] = "step"
    milestones: tuple[float, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        # JSON has lists only.
        object.__setattr__(self, "milestones", tuple(self.milestones))
        increasing = list(self.milestones) == sorted(set(self.milestones))
        if not increasing or not all(0 < milestone < math.inf for milestone in self.milestones):
            raise StrettoError(
                f"milestones={self.milestones} cannot be used",
                fix="Give epochs above 0, each larger than the one before.",
            )
        check_float(self.factor, name="factor", above=0.0, at_most=1.0)

    def at(self, done: float, *, epochs: float | None) -> float:  # noqa: ARG002
        """The factor to the power of the milestones passed."""
        return float(self.factor ** sum(done >= milestone for milestone in self.milestones))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(AbstractDecay):
    """Half a cosine from one to `floor`."""

    name: ClassVar[DecayName] = "cosine"
    needs_epochs: ClassVar[bool] = True
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_float(self.floor, name="floor", at_least=0.0, at_most=1.0)

    def at(self, done: float, *, epochs: float | None) -> float:
        """The cosine at this fraction of the run."""
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * _fraction(done, epochs)))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlatThenDivide(AbstractDecay):
    """Constant for `flat_epochs`, then divided by `divide_by` once per epoch: the PTB recipe of Zaremba et al.

    Flat for 4 epochs and divided by 2, the fifth epoch runs at a half, the sixth at a quarter.
    """

    name: ClassVar[DecayName] = "ptb"
    flat_epochs: int = 4
    divide_by: float = 2.0

    def __post_init__(self) -> None:
        check_int(self.flat_epochs, name="flat_epochs", at_least=0)
        check_float(self.divide_by, name="divide_by", at_least=1.0)

    def at(self, done: float, *, epochs: float | None) -> float:  # noqa: ARG002
        """One power of `divide_by` for every epoch begun after the flat ones."""
        begun = math.floor(done) + 1
        return float(self.divide_by ** -max(0, begun - self.flat_epochs))


DECAYS: Final[dict[str, type[AbstractDecay]]] = {
    kind.name: kind for kind in (Constant, Polynomial, Exponential, Step, Cosine, FlatThenDivide)
}


def make_decay(
    name: str, *, epochs: float | None = None, decay_factor: float | None = None, flat_epochs: int | None = None
) -> AbstractDecay:
    """A decay by its name, with the usual numbers where none are given.

    Args:
        name: "constant"; "poly", of power 2; "exponential", times `decay_factor` (0.95) per epoch; "step", times
            `decay_factor` (0.1) every `flat_epochs` (a third of the run); "cosine", to zero; "ptb", flat for
            `flat_epochs` (4), then times `decay_factor` (0.5) every epoch.
        epochs: Epochs of the whole run.
        decay_factor: For exponential, step and ptb.
        flat_epochs: For step and ptb.

    Raises:
        StrettoError: There is no such decay, it does not use a number given, or it needs one that is missing.
    """
    check_choice(name, name="decay", choices=tuple(DECAYS))
    refuse_unused(name, decay_factor=decay_factor, flat_epochs=flat_epochs)
    if decay_factor is not None:
        check_float(decay_factor, name="decay_factor", above=0.0, at_most=1.0)
    options: dict[str, Any] = {}
    if decay_factor is not None:
        options |= {"divide_by": 1.0 / decay_factor} if name == "ptb" else {"factor": decay_factor}
    if name == "ptb" and flat_epochs is not None:
        options["flat_epochs"] = flat_epochs
    if name == "step":
        if epochs is None:
            raise StrettoError(
                "the decay 'step' needs the number of epochs",
                fix="Give epochs=..., or Step(milestones=...) of stretto.large_batch.",
            )
        each = epochs / 3 if flat_epochs is None else check_int(flat_epochs, name="flat_epochs")
        options["milestones"] = tuple(each * number for number in range(1, math.ceil(epochs / each)))
    return DECAYS[name](**options)


def refuse_unused(name: str, *, decay_factor: float | None, flat_epochs: int | None) -> None:
    """Refuse a number that the schedule of this name does not use."""
    for argument, value, users in (
        ("decay_factor", decay_factor, ("exponential", "step", "ptb")),
        ("flat_epochs", flat_epochs, ("step", "ptb")),
    ):
        if value is not None and name not in users:
            raise StrettoError(
                f"{argument}={value} was given with the schedule {name!r}, which does not use it",
                fix=f"Leave it out, or choose one of {', '.join(map(repr, users))}.",
            )


def decay_from_json(values: dict[str, Any]) -> AbstractDecay:
    """The decay that `to_json` was called on."""
    return DECAYS[values["name"]](**{key: value for key, value in values.items() if key != "name"})


@final
class WarmupThenDecay:
    """The factor of the peak rate for each update, for torch's `LambdaLR`.

    Update i of a warm-up of n has (i + 1) / n, so that the first one moves and the last one has the peak. Then the
    decay takes over, at the epoch reached by then: if it has fallen meanwhile, the rate drops to its curve.

    Its attributes are JSON-ready, so the scheduler's state is, and loading that state replaces them. There are
    `updates` in `updates_epochs` epochs: a run may know those of one epoch, or only those of all together.
    """

    def __init__(
        self,
        decay: AbstractDecay,
        *,
        warmup_updates: int,
        updates: float,
        updates_epochs: float = 1,
        epochs: float | None = None,
    ) -> None:
        self.decay = decay.to_json()
        self.warmup_updates = warmup_updates
        self.updates = updates
        self.updates_epochs = updates_epochs
        self.epochs = epochs

    def __call__(self, update: int) -> float:
        """The factor for the update of this number, from 0 on."""
        if update < self.warmup_updates:
            return (update + 1) / self.warmup_updates
        # The product first: at the end of an epoch the quotient is then a whole number, exactly.
        return decay_from_json(self.decay).at(update * self.updates_epochs / self.updates, epochs=self.epochs)


def _fraction(done: float, epochs: float | None) -> float:
    """The fraction of the run that is done; what follows its end counts as the end."""
    assert epochs is not None
    return min(1.0, done / epochs)
