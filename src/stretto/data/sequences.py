"""One type for a set of sequences of unequal length.

Shape legend: N sequences, R runs, S steps of all sequences together, T steps of one sequence, F features per step.
"""

import dataclasses
import hashlib
import zlib
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from stretto.checks import check_choice, check_int, check_kind, check_list
from stretto.data.targets import NO_CLASS, AbstractTargets, Labels, NoTargets, StepLabels, Target, locate
from stretto.errors import StrettoError

Array = npt.NDArray[Any]
Part = Literal["train", "valid", "test"]
PARTS: Final[tuple[Part, ...]] = ("train", "valid", "test")
SPLIT_NAMES: Final = {"train": 0, "valid": 1, "validation": 1, "dev": 1, "test": 2}
CHUNK_ROWS = 1 << 20
MAX_DIGEST_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One sequence: its features, what is to be learned from it, and its number in the whole set."""

    features_TF: torch.Tensor
    target: Target
    index: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceSet(Dataset[Sample]):
    """Sequences of unequal length, stored end to end without padding, in memory or memory-mapped.

    It is a map-style dataset: `len(data)`, `data[i]`, and a `torch.utils.data.DataLoader` takes it as it is.
    Build one with `SequenceSet.from_flat`, which checks everything, or with a reader of `stretto.data`.

    Attributes:
        name: Shown in messages, tables and reports.
        features_SF: All steps of all sequences, one after the other.
        starts_N: Where each sequence begins in `features_SF`.
        lengths_N: Steps of each sequence.
        targets: Labels, labels of each step, transcripts or nothing, one per sequence.
        split_N: 0 train, 1 valid, 2 test.
        numbers_N: Each sequence's number in the whole set, which a subset remembers.
        alphabet: For text, whose one feature is a character's number: the characters, in that order.
        vocabulary: For text, whose one feature is a word's number: the words, in that order.
        notes: What a reader did that the user should know (for example how a missing split was made).
    """

    name: str
    features_SF: Array
    starts_N: npt.NDArray[np.int64]
    lengths_N: npt.NDArray[np.int64]
    targets: AbstractTargets
    split_N: npt.NDArray[np.uint8]
    numbers_N: npt.NDArray[np.int64]
    alphabet: str = ""
    vocabulary: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def from_flat(
        cls,
        features_SF: Array,
        *,
        offsets: Array | Sequence[int],
        targets: AbstractTargets | None = None,
        split_N: Array | None = None,
        split_complete: bool = False,
        name: str = "data",
        alphabet: str = "",
        vocabulary: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> "SequenceSet":
        """Check the flat layout (sequence i is `features_SF[offsets[i]:offsets[i + 1]]`) and wrap it without a copy.

        Without `split_N` a split is drawn; where it has 0 and 1 alone, 1 is the test part, and a tenth of train
        becomes the validation part, unless `split_complete` says that 1 is validation in any case.
        """
        check_kind(features_SF, np.ndarray, name="features_SF", owner=name, fix="Give a NumPy array (steps, features).")
        if not isinstance(offsets, np.ndarray):
            offsets = np.array(check_list(offsets, name="offsets", owner=name, fix="Give N + 1 integers."))
        if features_SF.ndim == 1:
            features_SF = features_SF[:, None]
        _check_features(features_SF, name=name)
        lengths_N = _check_offsets(offsets, num_steps=len(features_SF), name=name)
        targets = targets if targets is not None else NoTargets(count=len(lengths_N))
        if len(targets) != len(lengths_N):
            raise StrettoError(
                f"{name}: {len(lengths_N)} sequences but {len(targets)} targets",
                fix="Give exactly one target per sequence.",
            )
        if isinstance(targets, StepLabels) and not np.array_equal(targets.lengths_N, lengths_N):
            raise StrettoError(
                f"{name}: the labels of steps are not as many as the steps of each sequence",
                fix="Give exactly one label per step.",
            )
        split_N, split_note = _check_split(split_N, complete=split_complete, count=len(lengths_N), name=name)
        _check_finite(features_SF, offsets=np.asarray(offsets), name=name)
        return cls(
            name=name,
            features_SF=features_SF,
            starts_N=np.asarray(offsets[:-1], dtype=np.int64),
            lengths_N=lengths_N,
            targets=targets,
            split_N=split_N,
            numbers_N=np.arange(len(lengths_N)),
            alphabet=alphabet,
            vocabulary=vocabulary,
            notes=notes + split_note,
        )

    def __len__(self) -> int:
        return len(self.lengths_N)

    def __getitem__(self, index: int) -> Sample:
        check_kind(index, int, np.integer, name="index", owner=self.name, fix="Give an integer, or use subset.")
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)} in {self.name}")
        return self.__getitems__([index % len(self)])[0]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        """The samples of one batch, read and converted together; a DataLoader calls this instead of `data[i]`."""
        if not indices:
            return []
        places = zip(self.starts_N[indices], self.lengths_N[indices], strict=True)
        rows = [self.features_SF[start : start + length] for start, length in places]
        together_SF = np.concatenate(rows, dtype=_torch_dtype(self.features_SF.dtype), casting="unsafe")
        features = torch.from_numpy(together_SF).split_with_sizes([len(part) for part in rows])
        return [
            Sample(features_TF=part, target=self.targets[index], index=int(self.numbers_N[index]))
            for part, index in zip(features, indices, strict=True)
        ]

    def arrays(self) -> list[Array]:
        """The features (T, F) of each sequence, without a copy."""
        places = zip(self.starts_N.tolist(), self.lengths_N.tolist(), strict=True)
        return [self.features_SF[start : start + length] for start, length in places]

    @property
    def num_features(self) -> int:
        """Features per step."""
        return int(self.features_SF.shape[1])

    @property
    def num_steps(self) -> int:
        """Real steps of all sequences together."""
        return int(self.lengths_N.sum())

    @property
    def memory_mapped(self) -> bool:
        """Whether the features stay on disk until they are used."""
        return isinstance(self.features_SF, np.memmap) or isinstance(self.features_SF.base, np.memmap)

    def subset(self, indices: Array | list[int]) -> "SequenceSet":
        """The named sequences as a set of their own, sharing the features."""
        chosen = np.asarray(indices)
        if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "biu"):
            raise StrettoError(
                f"subset got indices of shape {chosen.shape} and type {chosen.dtype}",
                fix="Give a list of integers, the sequences to keep.",
            )
        chosen = chosen.astype(np.int64)
        return dataclasses.replace(
            self,
            starts_N=self.starts_N[chosen],
            lengths_N=self.lengths_N[chosen],
            targets=self.targets.take(chosen),
            split_N=self.split_N[chosen],
            numbers_N=self.numbers_N[chosen],
        )

    def part(self, part: Part) -> "SequenceSet":
        """The sequences of one split."""
        check_choice(part, name="part", choices=PARTS)
        indices = np.flatnonzero(self.split_N == PARTS.index(part))
        if len(indices) == 0:
            raise StrettoError(
                f"{self.name}: no sequence is in the {part} split",
                fix="Mark some sequences as 0 train, 1 valid and 2 test in `split`, or leave `split` out.",
            )
        return dataclasses.replace(self.subset(indices), name=f"{self.name} ({part})")

    def digest(self) -> str:
        """A fingerprint, which resuming compares: of layout, split and targets, and of the features.

        Of more than 256 MiB of features, evenly spread rows are hashed, so that it stays cheap for large sets.
        """
        hasher = hashlib.sha256()
        hasher.update(f"{len(self)}:{self.num_features}:{self.features_SF.dtype}:{self.alphabet}".encode())
        if self.vocabulary:
            hasher.update("\n".join(self.vocabulary).encode())
        for part in (self.starts_N, self.lengths_N, self.split_N):
            hasher.update(np.ascontiguousarray(part).tobytes())
        self.targets.hash_into(hasher.update)
        every = max(1, -(-self.features_SF.nbytes // MAX_DIGEST_BYTES))
        for first in range(0, len(self.features_SF), CHUNK_ROWS):
            rows = self.features_SF[first : first + CHUNK_ROWS : every]
            hasher.update(np.ascontiguousarray(rows).tobytes())
        return hasher.hexdigest()[:16]


def _torch_dtype(dtype: np.dtype[np.generic]) -> type[np.generic]:
    """Integers become int64 and float64 stays; any other floating type becomes float32."""
    if not np.issubdtype(dtype, np.floating):
        return np.int64
    return np.float64 if dtype == np.float64 else np.float32


def _check_features(features_SF: Array, *, name: str) -> None:
    if features_SF.ndim != 2 or features_SF.dtype.kind not in "biuf":
        raise StrettoError(
            f"{name}: features have shape {features_SF.shape} and type {features_SF.dtype}",
            fix="Give one real number array of shape (steps of all sequences, features).",
        )
    if features_SF.shape[1] == 0:
        raise StrettoError(f"{name}: there are no features", fix="Give at least one feature per step.")


def _check_offsets(offsets: Array, *, num_steps: int, name: str) -> npt.NDArray[np.int64]:
    if offsets.ndim != 1 or not np.issubdtype(offsets.dtype, np.integer):
        raise StrettoError(
            f"{name}: offsets have shape {offsets.shape} and type {offsets.dtype}",
            fix="Give N + 1 integers, the first 0 and the last the number of steps.",
        )
    if len(offsets) < 2:
        raise StrettoError(f"{name}: the set is empty", fix="Give at least one sequence.")
    bounds: npt.NDArray[np.int64] = np.asarray(offsets, dtype=np.int64)
    lengths_N = bounds[1:] - bounds[:-1]
    if offsets[0] != 0 or offsets[-1] != num_steps or (lengths_N < 0).any():
        falling = np.flatnonzero(lengths_N < 0)
        where = f"; they fall at sequence {falling[0]}" if len(falling) else ""
        raise StrettoError(
            f"{name}: offsets run from {offsets[0]} to {offsets[-1]} over {num_steps} steps{where}",
            fix="Offsets must rise from 0 to the number of steps.",
        )
    empty = np.flatnonzero(lengths_N == 0)
    if len(empty):
        raise StrettoError(
            f"{name}: {len(empty)} of {len(lengths_N)} sequences have no steps (first: sequence {empty[0]})",
            fix="Remove them before writing the file.",
        )
    return lengths_N


def _check_split(
    split_N: Array | None, *, complete: bool, count: int, name: str
) -> tuple[npt.NDArray[np.uint8], tuple[str, ...]]:
    if split_N is None:
        drawn = np.zeros(count, dtype=np.uint8)
        order, tenth = np.random.default_rng(count).permutation(count), min(-(-count // 10), (count - 1) // 2)
        drawn[order[:tenth]], drawn[order[tenth : 2 * tenth]] = 1, 2
        return drawn, ("no split in the data: 80 % train, 10 % valid, 10 % test drawn at random",)
    if split_N.shape != (count,) or not np.isin(split_N, (0, 1, 2)).all():
        raise StrettoError(
            f"{name}: split has shape {split_N.shape} and values {np.unique(split_N)[:6].tolist()}",
            fix="Give one of 0 (train), 1 (valid), 2 (test) per sequence.",
        )
    split_N = split_N.astype(np.uint8)
    if not complete and (split_N == 1).any() and not (split_N == 2).any():
        members = np.random.default_rng(count).permutation(np.flatnonzero(split_N == 0))
        made = np.where(split_N == 1, 2, 0).astype(np.uint8)
        made[members[: min(-(-len(members) // 10), len(members) - 1)]] = 1
        return made, ("split has train and test only: a tenth of train is kept for validation",)
    return split_N, ()


def number_split(values_N: Array, *, source: str) -> tuple[Array, bool]:
    """The split for `from_flat`, from names or numbers, and whether validation is named in it."""
    if values_N.dtype.kind not in "OU" or values_N.ndim != 1:
        return values_N, False
    unknown = next((row for row, name in enumerate(values_N) if name not in SPLIT_NAMES), None)
    if unknown is not None:
        raise StrettoError(
            f"{source}: row {unknown} has the split {str(values_N[unknown])!r}",
            fix=f"Use one of {', '.join(SPLIT_NAMES)}.",
        )
    split_N = np.array([SPLIT_NAMES[name] for name in values_N], dtype=np.uint8)
    has_validation = bool((split_N == 1).any())
    return (split_N, True) if has_validation else (np.minimum(split_N, 1), False)


def _check_finite(features_SF: Array, *, offsets: Array, name: str) -> None:
    if features_SF.dtype.kind != "f" and features_SF.dtype != np.uint64:
        return
    for first in range(0, len(features_SF), CHUNK_ROWS):
        rows = features_SF[first : first + CHUNK_ROWS]
        # Integers become int64.
        fits = np.isfinite(rows) if rows.dtype.kind == "f" else rows < 1 << 63
        bad = np.flatnonzero(~fits.all(axis=1))
        if len(bad):
            sequence, step = locate(offsets, first + int(bad[0]))
            what = "a NaN or infinite feature" if rows.dtype.kind == "f" else "a feature of 2**63 or more"
            raise StrettoError(
                f"{name}: sequence {sequence} has {what} at its step {step}",
                fix="Clean or remove that sequence; Stretto never replaces values silently.",
            )


def part_of(name: str) -> Part:
    """The part of the split that owns a name, by a hash of it: about 80 % train, 10 % valid, 10 % test."""
    percent = zlib.crc32(name.lower().encode()) % 100
    return "train" if percent < 80 else "valid" if percent < 90 else "test"


def part_sizes(num_train: int, *, held_out: int) -> tuple[int, int, int]:
    """How many train, validate and test, where validation and test have `num_train / held_out` each."""
    check_int(num_train, name="num_train")
    few = max(1, num_train // held_out)
    return num_train, few, few


def cut_runs(data: SequenceSet, *, unlabelled: int | None = None) -> SequenceSet:
    """Cut sequences with a label per step into runs of one label: each run is a sequence with one label.

    Runs stay in order, and in the part of the split that they were in.

    Args:
        data: Sequences with one label per step.
        unlabelled: The label of steps that have none: runs of it are left out, and so is its class.

    Raises:
        StrettoError: There are no labels of steps, or none except `unlabelled`.
    """
    check_kind(data, SequenceSet, name="data", owner="cut_runs", fix="Give a SequenceSet with a label per step.")
    labels = data.targets
    if not isinstance(labels, StepLabels):
        raise StrettoError(f"{data.name} has no labels of steps", fix="Give one label per step as `y`.")
    starts, lengths, values, owners = [], [], [], []
    for index in range(len(data)):
        of_steps_T = labels[index]
        firsts = np.flatnonzero(np.diff(of_steps_T, prepend=-1))
        starts.append(data.starts_N[index] + firsts)
        lengths.append(np.diff(firsts, append=len(of_steps_T)))
        values.append(of_steps_T[firsts])
        owners.append(np.full(len(firsts), index))
    names, class_of = labels.without_class(unlabelled)
    classes_R = class_of[np.concatenate(values)]
    kept = np.flatnonzero(classes_R != NO_CLASS)
    if not len(kept):
        raise StrettoError(
            f"{data.name}: no step has another label than {unlabelled}",
            fix="Label some steps, or name another label for unlabelled ones.",
        )
    note = f"cut into {len(kept):,} runs of one label"
    if len(kept) < len(classes_R):
        left_out = f"{len(classes_R) - len(kept):,} runs of the label {unlabelled}, which means unlabelled"
        note = f"{note}; {left_out}, are left out"
    return dataclasses.replace(
        data,
        starts_N=np.concatenate(starts)[kept],
        lengths_N=np.concatenate(lengths)[kept],
        targets=Labels(values_N=classes_R[kept], names=names),
        split_N=data.split_N[np.concatenate(owners)[kept]],
        numbers_N=np.arange(len(kept)),
        notes=(*data.notes, note),
    )
