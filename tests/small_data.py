"""Data that is small and quickly learnt. Shape legend: S steps of all sequences, N sequences, F features."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stretto.data import Labels, SequenceSet, Transcripts, write_npz
from stretto.tasks import find_task
from stretto.training import AbstractTask, validate


def labelled(
    features_SF: np.ndarray,
    lengths_N: np.ndarray,
    labels_N: np.ndarray,
    *,
    parts: Sequence[int],
    names: list[str] | None = None,
    **others: Any,
) -> SequenceSet:
    """Sequences with a label each; `parts` says how many are for training, validation and testing."""
    return SequenceSet.from_flat(
        features_SF,
        offsets=np.cumsum([0, *lengths_N]),
        targets=Labels.check(labels_N, names=names, source="here"),
        split_N=np.repeat([0, 1, 2], parts),
        **others,
    )


def write_signs(path: Path, *, count: int, seed: int = 0) -> Path:
    """Two kinds of noise that differ in their mean; a sixth of the sequences each for validation and testing."""
    rng = np.random.default_rng(seed)
    labels_N, lengths_N = np.arange(count) % 2, rng.integers(2, 12, count)
    features_SF = rng.normal(size=(lengths_N.sum(), 2)) + 3.0 * np.repeat(labels_N, lengths_N)[:, None]
    parts = (count - 2 * (count // 6), count // 6, count // 6)
    names = ["still", "moving"]
    write_npz(path, labelled(features_SF.astype(np.float32), lengths_N, labels_N, parts=parts, names=names))
    return path


def task_data(name: str, lengths_N: np.ndarray, rng: np.random.Generator, *, parts: Sequence[int]) -> SequenceSet:
    """Noise that suits the tasks classify, language-model and handwriting; long lines have another text than short."""
    common: dict[str, Any] = {"offsets": np.cumsum([0, *lengths_N]), "split_N": np.repeat([0, 1, 2], parts)}
    if name == "language-model":
        return SequenceSet.from_flat(rng.integers(0, 5, lengths_N.sum()), alphabet="abcde", **common)
    features_SF = rng.normal(size=(lengths_N.sum(), 3)).astype(np.float32)
    if name == "classify":
        return labelled(features_SF, lengths_N, np.arange(len(lengths_N)) % 3, parts=parts)
    texts = Transcripts.of(["ab" if length > 5 else "b" for length in lengths_N])
    return SequenceSet.from_flat(features_SF, targets=texts, **common)


def make_task(name: str, data: SequenceSet, **settings: Any) -> AbstractTask[Any]:
    """A task by its name, with these settings."""
    kind = find_task(name)
    return kind(validate(kind.Config, settings, source="the test"), data)
