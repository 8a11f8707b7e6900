"""What the fault suite trains on, how it starts a run, and what it counts afterwards.

Shape legend: N sequences, S steps of all of them, F features.
"""

import collections
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors.torch
import torch

from stretto.data import Labels, SequenceSet, write_npz
from stretto.training import EVENTS_FILE

NUM_TRAINED: Final = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """How often the sequences of all epochs were used.

    Attributes:
        epochs: Epochs that were trained.
        lost: Sequences that an epoch did not use, over all epochs.
        repeated: Uses beyond the first of an epoch, over all epochs.
    """

    epochs: int
    lost: int
    repeated: int

    @property
    def is_exact(self) -> bool:
        """Whether every epoch used every sequence once."""
        return self.lost == self.repeated == 0

    @classmethod
    def counted(cls, events: Iterable[dict[str, Any]]) -> "Dealt":
        """Count each sequence of each epoch, by its number."""
        uses: dict[int, collections.Counter[int]] = {}
        for event in events:
            if event["event"] == "step":
                uses.setdefault(event["epoch"], collections.Counter()).update(event["sequences"])
        return cls(
            epochs=len(uses),
            lost=sum(NUM_TRAINED - len(counts) for counts in uses.values()),
            repeated=sum(counts.total() - len(counts) for counts in uses.values()),
        )


def write_signs(path: Path) -> Path:
    """Noise of two kinds, told apart by its mean, as a ragged .npz file."""
    rng = np.random.default_rng(0)
    count = NUM_TRAINED + 20
    labels_N, lengths_N = np.arange(count) % 2, rng.integers(2, 30, count)
    features_SF = rng.normal(size=(lengths_N.sum(), 2)) + 2.0 * np.repeat(labels_N, lengths_N)[:, None]
    data = SequenceSet.from_flat(
        features_SF.astype(np.float32),
        offsets=np.cumsum([0, *lengths_N]),
        targets=Labels.check(labels_N, names=["still", "moving"], source="made"),
        split_N=np.repeat([0, 1, 2], [NUM_TRAINED, 10, 10]),
    )
    write_npz(path, data)
    return path


def training_words(data: Path, out: Path, *, epochs: int, rank_timeout_minutes: float) -> list[str]:
    """The command line of a run that saves all the time and records what each update was made of."""
    words = {
        "--data": data,
        "--out": out,
        "--epochs": epochs,
        "--batch-size": 8,
        "--hidden-size": 16,
        "--rank-timeout-minutes": rank_timeout_minutes,
        "--checkpoint-minutes": 0.002,
        "--backend": "torch",
        "--num-buckets": 3,
    }
    return ["train", "classify", *(str(word) for pair in words.items() for word in pair), "--record-sequences"]


def num_lines(run: Path) -> int:
    """Events that a run has recorded so far."""
    path = run / EVENTS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def same_weights(one: Path, other: Path) -> bool:
    """Whether two files hold the same tensors to the last bit."""
    first, second = safetensors.torch.load_file(one), safetensors.torch.load_file(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
