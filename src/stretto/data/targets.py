"""What is to be learned from each sequence: a label, a label per step, a transcript, or nothing.

Shape legend: N sequences, S steps of all sequences together, T steps of one sequence.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from stretto.errors import StrettoError

Target = int | str | npt.NDArray[np.int64] | None
MAX_UNNAMED_CLASSES = 1 << 24
"""A larger label is a mistake in the data; names for that many classes would fill the memory."""


def locate(offsets: npt.NDArray[np.integer], position: int) -> tuple[int, int]:
    """The sequence that owns a position of the flat layout, and the step within that sequence."""
    sequence = int(np.searchsorted(offsets, position, side="right")) - 1
    return sequence, int(position - offsets[sequence])


def _check_classes(
    values: npt.NDArray[Any], *, names: Sequence[str] | None, offsets: npt.NDArray[np.integer] | None, source: str
) -> tuple[str, ...]:
    """The names of the classes; `offsets` tell which sequence owns a step, None where each sequence has one label."""
    each = "sequence" if offsets is None else "step"
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise StrettoError(
            f"{source}: labels of {each}s have shape {values.shape} and type {values.dtype}",
            fix=f"Give one whole number per {each}.",
        )
    greatest = int(values.max()) if len(values) else -1
    num_classes = len(names) if names is not None else min(greatest + 1, MAX_UNNAMED_CLASSES)
    outside = np.flatnonzero((values < 0) | (values >= num_classes))
    if len(outside):
        sequence, step = (outside[0], None) if offsets is None else locate(offsets, outside[0])
        place = "" if step is None else f" at its step {step}"
        raise StrettoError(
            f"{source}: sequence {sequence} has label {values[outside[0]]}{place}, outside 0 to {num_classes - 1}",
            fix="Number the classes from 0, or give a name for each in `class_names`.",
        )
    return tuple(names or map(str, range(num_classes)))


class AbstractTargets(abc.ABC):
    """One target per sequence."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Target: ...

    @abc.abstractmethod
    def take(self, indices: npt.NDArray[np.int64]) -> "AbstractTargets":
        """The targets of the named sequences."""

    @abc.abstractmethod
    def hash_into(self, update: Callable[[bytes], None]) -> None:
        """Feed everything that distinguishes these targets from others to a hash."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoTargets(AbstractTargets):
    """Sequences that are their own target, as text is for a language model."""

    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> None:
        return None

    def take(self, indices: npt.NDArray[np.int64]) -> "NoTargets":
        """The targets of the named sequences."""
        return NoTargets(count=len(indices))

    def hash_into(self, update: Callable[[bytes], None]) -> None:
        """Feed everything that distinguishes these targets from others to a hash."""
        update(f"none:{self.count}".encode())


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Labels(AbstractTargets):
    """One class per sequence, numbered from 0; `names` has one entry per class."""

    values_N: npt.NDArray[np.int64]
    names: tuple[str, ...]

    @classmethod
    def check(cls, values_N: npt.NDArray[np.generic], *, names: Sequence[str] | None, source: str) -> "Labels":
        """Refuse labels that are not whole numbers from 0 to the number of classes."""
        names = _check_classes(values_N, names=names, offsets=None, source=source)
        return cls(values_N=values_N.astype(np.int64), names=names)

    def __len__(self) -> int:
        return len(self.values_N)

    def __getitem__(self, index: int) -> int:
        return int(self.values_N[index])

    def take(self, indices: npt.NDArray[np.int64]) -> "Labels":
        """The targets of the named sequences."""
        return Labels(values_N=self.values_N[indices], names=self.names)

    def hash_into(self, update: Callable[[bytes], None]) -> None:
        """Feed everything that distinguishes these targets from others to a hash."""
        update(repr(self.names).encode())
        update(self.values_N.tobytes())


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLabels(AbstractTargets):
    """One class per step, numbered from 0, stored end to end like the features; `names` has one entry per class."""

    values_S: npt.NDArray[np.integer]
    starts_N: npt.NDArray[np.int64]
    lengths_N: npt.NDArray[np.int64]
    names: tuple[str, ...]

    @classmethod
    def check(
        cls,
        values_S: npt.NDArray[Any],
        *,
        offsets: npt.NDArray[np.integer],
        names: Sequence[str] | None,
        source: str,
    ) -> "StepLabels":
        """Refuse labels that are not whole numbers from 0 to the number of classes."""
        bounds = np.asarray(offsets, dtype=np.int64)
        names = _check_classes(values_S, names=names, offsets=bounds, source=source)
        return cls(values_S=values_S, starts_N=bounds[:-1], lengths_N=np.diff(bounds), names=names)

    def __len__(self) -> int:
        return len(self.lengths_N)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        start = self.starts_N[index]
        return self.values_S[start : start + self.lengths_N[index]].astype(np.int64)

    def take(self, indices: npt.NDArray[np.int64]) -> "StepLabels":
        """The targets of the named sequences."""
        return dataclasses.replace(self, starts_N=self.starts_N[indices], lengths_N=self.lengths_N[indices])

    def hash_into(self, update: Callable[[bytes], None]) -> None:
        """Feed everything that distinguishes these targets from others to a hash."""
        update(f"steps:{self.values_S.dtype}:{self.names!r}".encode())
        for part in (self.values_S, self.starts_N, self.lengths_N):
            update(np.ascontiguousarray(part).tobytes())

    def counts(self) -> npt.NDArray[np.int64]:
        """Steps of each class, over these sequences."""
        counts = np.zeros(len(self.names), dtype=np.int64)
        for index in range(len(self)):
            counts += np.bincount(self[index], minlength=len(self.names))
        return counts


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transcripts(AbstractTargets):
    """The text that each sequence spells, kept end to end as code points.

    If the sequences are text too, `languages` names theirs and that of these texts, if known.
    """

    code_points: npt.NDArray[np.uint32]
    starts_N: npt.NDArray[np.int64]
    lengths_N: npt.NDArray[np.int64]
    languages: tuple[str, str] | None = None

    @classmethod
    def of(cls, texts: Sequence[str], *, languages: tuple[str, str] | None = None) -> "Transcripts":
        """Lay the texts end to end."""
        lengths_N = np.array([len(text) for text in texts], dtype=np.int64)
        flat = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        starts_N = np.cumsum(lengths_N) - lengths_N
        return cls(code_points=flat, starts_N=starts_N, lengths_N=lengths_N, languages=languages)

    def __len__(self) -> int:
        return len(self.lengths_N)

    def __getitem__(self, index: int) -> str:
        start = self.starts_N[index]
        return "".join(map(chr, self.code_points[start : start + self.lengths_N[index]]))

    def take(self, indices: npt.NDArray[np.int64]) -> "Transcripts":
        """The targets of the named sequences."""
        return dataclasses.replace(self, starts_N=self.starts_N[indices], lengths_N=self.lengths_N[indices])

    def hash_into(self, update: Callable[[bytes], None]) -> None:
        """Feed everything that distinguishes these targets from others to a hash."""
        if self.languages is not None:
            update(repr(self.languages).encode())
        for part in (self.code_points, self.starts_N, self.lengths_N):
            update(np.ascontiguousarray(part).tobytes())

    def alphabet(self) -> str:
        """Every character that occurs, in code-point order."""
        texts = (self[index] for index in range(len(self)))
        return "".join(sorted(set().union(*texts)))
