"""What is to be learned from each sequence: a label, a label per step, a transcript, or nothing.

Shape legend: N sequences, S steps of all sequences together, T steps of one sequence.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, final

import numpy as np
import numpy.typing as npt

from stretto.checks import check_kind, check_list
from stretto.errors import StrettoError

T = TypeVar("T", bound="AbstractTargets")
Identity = tuple[str | npt.NDArray[Any], ...]
Target = int | str | npt.NDArray[np.int64] | None
NO_CLASS: Final = -1
MAX_UNNAMED_CLASSES = 1 << 20
"""A larger label is a mistake in the data; names for that many classes would fill the memory."""


def locate(offsets: npt.NDArray[np.integer], position: int) -> tuple[int, int]:
    """The sequence that owns a position of the flat layout, and the step within that sequence."""
    sequence = int(np.searchsorted(offsets, position, side="right")) - 1
    return sequence, int(position - offsets[sequence])


def offsets_fit(offsets: npt.NDArray[Any], *, num_values: int) -> bool:
    """Whether offsets are integers that rise from 0 to the number of values."""
    if offsets.ndim != 1 or not len(offsets) or not np.issubdtype(offsets.dtype, np.integer):
        return False
    bounds = offsets.astype(np.int64)
    return bool(bounds[0] == 0 and bounds[-1] == num_values and (np.diff(bounds) >= 0).all())


def _check_classes(
    values: npt.NDArray[Any], *, names: Sequence[str] | None, offsets: npt.NDArray[np.integer] | None, source: str
) -> tuple[str, ...]:
    """The names of the classes; `offsets` tell which sequence owns a step, None where each sequence has one label."""
    each = "sequence" if offsets is None else "step"
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise StrettoError(
            f"{source}: labels of {each}s have shape {values.shape} and type {values.dtype}",
            fix=f"Give one integer per {each}.",
        )
    if names is not None and len(set(names)) < len(names):
        twice = next(name for position, name in enumerate(names) if name in names[:position])
        raise StrettoError(f"{source}: two classes are called {twice!r}", fix="Give each class a name of its own.")
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AbstractTargets(abc.ABC):
    """One target per sequence. Fields whose names end in `_N` have one entry per sequence."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Target: ...

    @abc.abstractmethod
    def _identity(self) -> Identity: ...

    def take(self: T, indices: npt.NDArray[np.int64]) -> T:
        """The targets of the named sequences."""
        names = [field.name for field in dataclasses.fields(self) if field.name.endswith("_N")]
        return dataclasses.replace(self, **{name: getattr(self, name)[indices] for name in names})

    def hash_into(self, update: Callable[[bytes], None]) -> None:
        """Feed everything that distinguishes these targets from others to a hash."""
        for part in self._identity():
            update(part.encode() if isinstance(part, str) else np.ascontiguousarray(part).tobytes())


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
        """As many as are named."""
        return NoTargets(count=len(indices))

    def _identity(self) -> Identity:
        return (f"none:{self.count}",)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Labels(AbstractTargets):
    """One class per sequence, numbered from 0; `names` has one entry per class."""

    values_N: npt.NDArray[np.int64]
    names: tuple[str, ...]

    @classmethod
    def check(cls, values_N: npt.NDArray[np.generic], *, names: Sequence[str] | None, source: str) -> "Labels":
        """Refuse labels that are not integers from 0 to the number of classes."""
        names = _check_classes(values_N, names=names, offsets=None, source=source)
        return cls(values_N=values_N.astype(np.int64), names=names)

    def __len__(self) -> int:
        return len(self.values_N)

    def __getitem__(self, index: int) -> int:
        return int(self.values_N[index])

    def _identity(self) -> Identity:
        return repr(self.names), self.values_N


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _FlatTargets(AbstractTargets):
    """Several values per sequence, stored end to end."""

    starts_N: npt.NDArray[np.int64]
    lengths_N: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths_N)

    def _place(self, index: int) -> slice:
        return slice(self.starts_N[index], self.starts_N[index] + self.lengths_N[index])


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLabels(_FlatTargets):
    """One class per step, numbered from 0; `names` has one entry per class."""

    values_S: npt.NDArray[np.integer]
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
        """Refuse labels that are not integers from 0 to the number of classes."""
        bounds = np.asarray(offsets, dtype=np.int64)
        names = _check_classes(values_S, names=names, offsets=bounds, source=source)
        return cls(values_S=values_S, starts_N=bounds[:-1], lengths_N=np.diff(bounds), names=names)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return self.values_S[self._place(index)].astype(np.int64)

    def _identity(self) -> Identity:
        return f"steps:{self.values_S.dtype}:{self.names!r}", self.values_S, self.starts_N, self.lengths_N

    def without_class(self, unlabelled: int | None) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
        """The names of the classes but one, and the number that each label has then: `NO_CLASS` for that one."""
        known = [number for number in range(len(self.names)) if number != unlabelled]
        class_of = np.full(len(self.names), NO_CLASS)
        class_of[known] = np.arange(len(known))
        return tuple(self.names[number] for number in known), class_of

    def counts(self) -> npt.NDArray[np.int64]:
        """Steps of each class, over these sequences."""
        counts = np.zeros(len(self.names), dtype=np.int64)
        for index in range(len(self)):
            counts += np.bincount(self[index], minlength=len(self.names))
        return counts


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transcripts(_FlatTargets):
    """The text that each sequence spells, kept as code points.

    If the sequences are text too, `languages` names theirs and that of these texts, if known.
    """

    code_points: npt.NDArray[np.uint32]
    languages: tuple[str, str] | None = None

    @classmethod
    def of(cls, texts: Sequence[str], *, languages: tuple[str, str] | None = None) -> "Transcripts":
        """Lay the texts end to end."""
        fix = "Give a list of strings, one per sequence."
        texts = check_list(texts, name="texts", owner="Transcripts", fix=fix)
        for text in texts:
            check_kind(text, str, name="texts", owner="Transcripts", fix=fix)
        lengths_N = np.array([len(text) for text in texts], dtype=np.int64)
        flat = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        starts_N = np.cumsum(lengths_N) - lengths_N
        return cls(code_points=flat, starts_N=starts_N, lengths_N=lengths_N, languages=languages)

    def __getitem__(self, index: int) -> str:
        return "".join(map(chr, self.code_points[self._place(index)]))

    def _identity(self) -> Identity:
        languages = "" if self.languages is None else repr(self.languages)
        return languages, self.code_points, self.starts_N, self.lengths_N

    def alphabet(self) -> str:
        """Every character that occurs, in code-point order."""
        texts = (self[index] for index in range(len(self)))
        return "".join(sorted(set().union(*texts)))
