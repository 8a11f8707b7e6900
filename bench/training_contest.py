"""Two trainings of one model, epoch by epoch in turn, and how soon each reaches the quality of the first."""

import abc
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Final, final

from stretto.errors import StrettoError

Tell = Callable[[str], None]

LONGER: Final = 1.5
"""How many times the epochs of the plain script Stretto may train."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One epoch of one side.

    Attributes:
        seconds: Of its updates; measuring the quality is not counted.
        value: The metric on the validation part after it.
        batch_size: Sequences, or streams, of an update.
        probed: Of the seconds, those that went into timing steps, to choose the batch.
    """

    seconds: float
    value: float
    batch_size: int
    probed: float = 0.0


class AbstractSide(abc.ABC):
    """One of the two that train."""

    @abc.abstractmethod
    def turn(self) -> Turn:
        """Train one epoch and measure."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """How near to a value counts as having reached it.

    Attributes:
        amount: The distance allowed.
        higher_is_better: Which way is better.
        relative: Whether the amount is a share of the value.
    """

    amount: float
    higher_is_better: bool = False
    relative: bool = False

    def limit(self, value: float) -> float:
        """The worst that counts as having reached the value."""
        room = self.amount * abs(value) if self.relative else self.amount
        return value - room if self.higher_is_better else value + room

    def is_reached(self, found: float, *, value: float) -> bool:
        """Whether it counts; what is no number reaches nothing, and is not reached."""
        limit = self.limit(value)
        return found >= limit if self.higher_is_better else found <= limit


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """When a side had reached the target: after so many epochs, and so many seconds of updates."""

    epochs: int
    seconds: float


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The epochs of one side, in order.

    Attributes:
        turns: Of each epoch.
        fault: What ended it before its time; empty if nothing did.
    """

    turns: tuple[Turn, ...]
    fault: str = ""

    @property
    def seconds(self) -> float:
        """Of all epochs."""
        return sum(turn.seconds for turn in self.turns)

    @property
    def median(self) -> float:
        """Seconds of the middle epoch, without those that went into choosing the batch."""
        return statistics.median(turn.seconds - turn.probed for turn in self.turns)

    def reached(self, target: float, margin: Margin) -> Reached | None:
        """By the first epoch that reaches the target; None if there is none."""
        sums = itertools.accumulate(turn.seconds for turn in self.turns)
        for number, (turn, seconds) in enumerate(zip(self.turns, sums, strict=True), start=1):
            if margin.is_reached(turn.value, value=target):
                return Reached(epochs=number, seconds=seconds)
        return None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """How the two sides fared.

    Attributes:
        plain: Epochs of the plain script.
        stretto: Epochs of Stretto.
        target: What the plain script had reached after its last epoch.
        limit: The worst value that counts as the target.
        plain_reached: When the plain script had first reached it.
        stretto_reached: When Stretto had; None if it did not, in one and a half times the epochs.
        ratio: Seconds of the plain script until then over Stretto's. Where Stretto did not get there, over all the
            seconds that it had: the true ratio is smaller.
        epoch_ratio: Seconds of the plain script's epochs over Stretto's: of medians, without choosing the batch.
    """

    plain: Course
    stretto: Course
    target: float
    limit: float
    plain_reached: Reached | None
    stretto_reached: Reached | None
    ratio: float
    epoch_ratio: float

    @property
    def is_reached(self) -> bool:
        """Whether Stretto reached what the plain script had."""
        return self.stretto_reached is not None

    @classmethod
    def of(cls, plain: Course, stretto: Course, margin: Margin) -> "Contest":
        """What follows from the epochs of both."""
        target = plain.turns[-1].value
        theirs, ours = (course.reached(target, margin) for course in (plain, stretto))
        spent = plain.seconds if theirs is None else theirs.seconds
        given = stretto.seconds if ours is None else ours.seconds
        return cls(
            plain=plain,
            stretto=stretto,
            target=target,
            limit=margin.limit(target),
            plain_reached=theirs,
            stretto_reached=ours,
            ratio=spent / given,
            epoch_ratio=plain.median / stretto.median,
        )


def in_turn(plain: AbstractSide, stretto: AbstractSide, *, epochs: int, margin: Margin, tell: Tell) -> Contest:
    """Let both train, epoch by epoch in turn, so that a change of the machine's load hits both.

    Args:
        plain: The plain script; it trains all epochs.
        stretto: As many, and up to one and a half times as many if it has not reached the target by then.
        epochs: Of the plain script.
        margin: What counts as having reached it.
        tell: Called with how far it is.

    Raises:
        StrettoError: Stretto did not finish a single epoch.
    """
    theirs: list[Turn] = []
    ours: list[Turn] = []
    fault = ""
    most = math.ceil(LONGER * epochs)
    for number in range(1, most + 1):
        if number <= epochs:
            theirs.append(plain.turn())
            tell(f"epoch {number} of {epochs}, plain: {theirs[-1].value:.4g} in {theirs[-1].seconds:.1f} s")
        elif Course(turns=tuple(ours)).reached(theirs[-1].value, margin) is not None:
            break
        if not fault:
            try:
                ours.append(stretto.turn())
            except StrettoError as error:
                if not ours:
                    raise
                fault = str(error)
                tell(f"epoch {number}, stretto: {fault}")
                continue
            last = epochs if number <= epochs else most
            tell(f"epoch {number} of {last}, stretto: {ours[-1].value:.4g} in {ours[-1].seconds:.1f} s")
    return Contest.of(Course(turns=tuple(theirs)), Course(turns=tuple(ours), fault=fault), margin)
