"""Laws that lengths follow: what a benchmark of batches needs of a data set.

Shape legend: N sequences.
"""

import abc
import dataclasses
from typing import Final, Literal, final, get_args

import numpy as np
import numpy.typing as npt

from stretto.data import load_handwriting
from stretto.errors import StrettoError

Lengths = npt.NDArray[np.int64]
LawName = Literal["log-normal", "log-normal-wide", "two-mode", "uniform", "handwriting"]
LAW_NAMES: Final[tuple[LawName, ...]] = get_args(LawName)


class AbstractLengthLaw(abc.ABC):
    """A law that the lengths of a set follow."""

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """The law in a few words."""

    @abc.abstractmethod
    def draw(self, num_sequences: int, *, seed: int = 0) -> Lengths:
        """Lengths of a set; a pure function of the arguments."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalLaw(AbstractLengthLaw):
    """Many short and a tail of long ones: exp of a normal draw, clipped to a range.

    Attributes:
        mean: Of the logarithm of the length.
        deviation: Of the logarithm of the length.
        shortest: Shorter draws become this.
        longest: Longer draws become this.
    """

    mean: float
    deviation: float
    shortest: int
    longest: int

    @property
    def description(self) -> str:
        """The law in a few words."""
        return f"log-normal({self.mean:g}, {self.deviation:g}) in [{self.shortest}, {self.longest}]"

    def draw(self, num_sequences: int, *, seed: int = 0) -> Lengths:
        """Lengths of a set; a pure function of the arguments."""
        drawn_N = np.random.default_rng(seed).lognormal(self.mean, self.deviation, num_sequences)
        return _whole(drawn_N, shortest=self.shortest, longest=self.longest)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TwoModeLaw(AbstractLengthLaw):
    """Read speech in frames of 10 ms: most utterances near the length at which they were cut, some much shorter."""

    @property
    def description(self) -> str:
        """The law in a few words."""
        return "two modes as in read speech: 30 % near 550, 70 % near 1510, in [80, 2000]"

    def draw(self, num_sequences: int, *, seed: int = 0) -> Lengths:
        """Lengths of a set; a pure function of the arguments."""
        rng = np.random.default_rng(seed)
        short_N = rng.random(num_sequences) < 0.3
        drawn_N = np.where(short_N, rng.normal(550, 220, num_sequences), rng.normal(1510, 160, num_sequences))
        return _whole(drawn_N, shortest=80, longest=2000)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UniformLaw(AbstractLengthLaw):
    """Every length of a range equally often.

    Attributes:
        shortest: The least length.
        longest: The greatest length.
    """

    shortest: int
    longest: int

    @property
    def description(self) -> str:
        """The law in a few words."""
        return f"uniform in [{self.shortest}, {self.longest}]"

    def draw(self, num_sequences: int, *, seed: int = 0) -> Lengths:
        """Lengths of a set; a pure function of the arguments."""
        return np.random.default_rng(seed).integers(self.shortest, self.longest, num_sequences, endpoint=True)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandwritingLaw(AbstractLengthLaw):
    """The lengths of the embedded handwriting: real numbers of pen points, as many as there are lines."""

    @property
    def description(self) -> str:
        """The law in a few words."""
        return "the embedded handwriting, all of its lines"

    def draw(self, num_sequences: int, *, seed: int = 0) -> Lengths:  # noqa: ARG002 - the set is what it is
        """All lengths of the embedded set, in its order, whatever the arguments: a set is not stretched."""
        return load_handwriting().lengths_N.astype(np.int64)


LAWS: Final[dict[LawName, AbstractLengthLaw]] = {
    "log-normal": LogNormalLaw(mean=6.2, deviation=0.6, shortest=50, longest=3000),
    "log-normal-wide": LogNormalLaw(mean=5.0, deviation=1.0, shortest=16, longest=1024),
    "two-mode": TwoModeLaw(),
    "uniform": UniformLaw(shortest=10, longest=1000),
    "handwriting": HandwritingLaw(),
}


def length_law(name: LawName) -> AbstractLengthLaw:
    """The law of that name."""
    if name not in LAWS:
        raise StrettoError(f"there is no length law {name!r}", fix=f"Choose one of {', '.join(LAW_NAMES)}.")
    return LAWS[name]


def _whole(drawn_N: npt.NDArray[np.float64], *, shortest: int, longest: int) -> Lengths:
    return np.clip(np.rint(drawn_N), shortest, longest).astype(np.int64)
