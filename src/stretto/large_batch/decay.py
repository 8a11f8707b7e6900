"""How the learning rate falls after its peak, in epochs: pure functions that no batch size changes."""

import abc
import dataclasses
import math
from typing import Any, ClassVar, Final, Literal, final

from stretto.errors import StrettoError

DecayName = Literal["constant", "poly", "exponential", "step", "cosine", "ptb"]


class AbstractDecay(abc.ABC):
    """A factor of the peak rate for every moment of a run.

    Time is counted in epochs, so that the same decay holds for any batch size.
    """

    name: ClassVar[DecayName]
    needs_epochs: ClassVar[bool] = False

    @abc.abstractmethod
    def at(self, done: float, *, epochs: float | None) -> float:
        """The factor after `done` epochs.

        Args:
            done: Epochs done, whole or not.
            epochs: Epochs of the whole run; None where it is not known, and where `needs_epochs` is false.
        """

    def to_json(self) -> dict[str, Any]:
        """The decay as JSON-ready values; `decay_from_json` makes it again."""
        return {"name": self.name, **dataclasses.asdict(self)}  # type: ignore[call-overload]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constant(AbstractDecay):
    """The peak, to the end."""

    name: ClassVar[DecayName] = "constant"

    def at(self, done: float, *, epochs: float | None) -> float:  # noqa: ARG002
        """One."""
        return 1.0


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial(AbstractDecay):
    """(1 - e / E) ** power after e of E epochs: zero at the end.

    Attributes:
        power: 2 is what is used with LARS, 1 with LAMB.
    """

    name: ClassVar[DecayName] = "poly"
    needs_epochs: ClassVar[bool] = True
    power: float = 2.0

    def __post_init__(self) -> None:
        _refuse_unless(0 < self.power < math.inf, "power", self.power, fix="Give a number above 0.")

    def at(self, done: float, *, epochs: float | None) -> float:
        """What is left of the run, to the power."""
        return float((1.0 - _share(done, epochs)) ** self.power)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exponential(AbstractDecay):
    """factor ** e after e epochs, a little less at every update.

    Attributes:
        factor: What an epoch leaves of the rate.
    """

    name: ClassVar[DecayName] = "exponential"
    factor: float = 0.95

    def __post_init__(self) -> None:
        _refuse_unless(0 < self.factor <= 1, "factor", self.factor, fix="Give a number above 0 and up to 1.")

    def at(self, done: float, *, epochs: float | None) -> float:  # noqa: ARG002
        """The factor to the power of the epochs done."""
        return float(self.factor**done)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step(AbstractDecay):
    """The rate is multiplied by `factor` at every milestone.

    Attributes:
        milestones: Epochs after which it happens, rising.
        factor: What a milestone leaves of the rate.
    """

    name: ClassVar[DecayName] = "step"
    milestones: tuple[float, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        # JSON knows lists alone.
        object.__setattr__(self, "milestones", tuple(self.milestones))
        rising = list(self.milestones) == sorted(set(self.milestones)) and all(
            0 < m < math.inf for m in self.milestones
        )
        _refuse_unless(rising, "milestones", self.milestones, fix="Give epochs above 0, each above the one before.")
        _refuse_unless(0 < self.factor <= 1, "factor", self.factor, fix="Give a number above 0 and up to 1.")

    def at(self, done: float, *, epochs: float | None) -> float:  # noqa: ARG002
        """The factor to the power of the milestones passed."""
        return float(self.factor ** sum(done >= milestone for milestone in self.milestones))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(AbstractDecay):
    """Half a cosine from one to `floor`.

    Attributes:
        floor: The factor at the end.
    """

    name: ClassVar[DecayName] = "cosine"
    needs_epochs: ClassVar[bool] = True
    floor: float = 0.0

    def __post_init__(self) -> None:
        _refuse_unless(0 <= self.floor <= 1, "floor", self.floor, fix="Give a number from 0 to 1.")

    def at(self, done: float, *, epochs: float | None) -> float:
        """Where the cosine is."""
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * _share(done, epochs)))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlatThenDivide(AbstractDecay):
    """Constant for some epochs, then divided once at the start of every further one: the PTB recipe of Zaremba et al.

    Flat for 4 epochs and divided by 2, the fifth epoch runs at a half, the sixth at a quarter.

    Attributes:
        flat_epochs: Epochs at the peak.
        divide_by: What every later epoch divides the rate by.
    """

    name: ClassVar[DecayName] = "ptb"
    flat_epochs: int = 4
    divide_by: float = 2.0

    def __post_init__(self) -> None:
        whole = isinstance(self.flat_epochs, int) and self.flat_epochs >= 0
        _refuse_unless(whole, "flat_epochs", self.flat_epochs, fix="Give a whole number from 0 on.")
        _refuse_unless(1 <= self.divide_by < math.inf, "divide_by", self.divide_by, fix="Give a number from 1 on.")

    def at(self, done: float, *, epochs: float | None) -> float:  # noqa: ARG002
        """One power of `divide_by` for every epoch begun after the flat ones."""
        begun = math.floor(done) + 1
        return float(self.divide_by ** -max(0, begun - self.flat_epochs))


DECAYS: Final[dict[str, type[AbstractDecay]]] = {
    kind.name: kind for kind in (Constant, Polynomial, Exponential, Step, Cosine, FlatThenDivide)
}


def named_decay(
    name: str, *, epochs: float | None = None, factor: float | None = None, flat_epochs: int | None = None
) -> AbstractDecay:
    """A decay by its name, with the usual numbers where none are given.

    Args:
        name: "constant"; "poly", of power 2; "exponential", by `factor` (0.95) an epoch; "step", by `factor` (0.1)
            every `flat_epochs` (a third of the run); "cosine", to zero; "ptb", flat for `flat_epochs` (4), then times
            `factor` (0.5) every epoch.
        epochs: Epochs of the whole run.
        factor: For exponential, step and ptb.
        flat_epochs: For step and ptb.

    Raises:
        StrettoError: There is no such decay, it has no use for a number given, or it needs one that is not.
    """
    if name not in DECAYS:
        raise StrettoError(f"there is no decay {name!r}", fix=f"Choose one of {', '.join(map(repr, DECAYS))}.")
    if factor is not None and name not in ("exponential", "step", "ptb"):
        raise StrettoError(
            f"a decay factor of {factor} was given with the decay {name!r}, which has none",
            fix="Leave it out, or choose 'exponential', 'step' or 'ptb'.",
        )
    if flat_epochs is not None and name not in ("step", "ptb"):
        raise StrettoError(
            f"flat_epochs={flat_epochs} was given with the decay {name!r}, which has none",
            fix="Leave it out, or choose 'step' or 'ptb'.",
        )
    if factor is not None:
        _refuse_unless(0 < factor <= 1, "the decay factor", factor, fix="Give a number above 0 and up to 1.")
    if name == "exponential":
        return Exponential() if factor is None else Exponential(factor=factor)
    if name == "step":
        milestones = _every(flat_epochs, epochs)
        return Step(milestones=milestones) if factor is None else Step(milestones=milestones, factor=factor)
    if name == "ptb":
        return FlatThenDivide(
            flat_epochs=4 if flat_epochs is None else flat_epochs, divide_by=2.0 if factor is None else 1.0 / factor
        )
    return DECAYS[name]()


def decay_from_json(values: dict[str, Any]) -> AbstractDecay:
    """The decay that `to_json` was called on."""
    return DECAYS[values["name"]](**{key: value for key, value in values.items() if key != "name"})


def _every(flat_epochs: int | None, epochs: float | None) -> tuple[float, ...]:
    if epochs is None:
        raise StrettoError(
            "the decay 'step' by its name needs the number of epochs",
            fix="Give epochs=..., or Step(milestones=...) of stretto.large_batch.decay.",
        )
    each = epochs / 3 if flat_epochs is None else flat_epochs
    _refuse_unless(each > 0, "flat_epochs", flat_epochs, fix="Give a whole number from 1 on.")
    return tuple(each * number for number in range(1, math.ceil(epochs / each)))


def _share(done: float, epochs: float | None) -> float:
    """The share of the run that is done; what follows its end counts as the end."""
    assert epochs is not None
    return min(1.0, done / epochs)


def _refuse_unless(is_right: bool, name: str, value: object, *, fix: str) -> None:
    if not is_right:
        raise StrettoError(f"{name} of a decay is {value!r}", fix=fix)
