"""Recordings with one label per step, cut into sequences of one length, for the multigrid experiment.

Shape legend: N windows, T steps of one sequence, W of a window, B sequences of a batch, F features.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias, final

import numpy as np
import torch
from pydantic import Field
from torch.nn.utils.rnn import pad_sequence

from bench.recordings import UNLABELLED, Recording, Recordings, standardise_recordings
from stretto.data import PARTS, SequenceSet, make_regimes, open_sequences
from stretto.errors import StrettoError

WHOLE: Final = "whole"
Length: TypeAlias = Annotated[int, Field(ge=2, lt=2**31)] | Literal["whole"]
WINDOW: Final = 128
HOP: Final = 64
EMBEDDED: Final = {"num_train": 24, "median_length": 6000}
TINY: Final = {"num_train": 6, "median_length": 300}
TINY_MAX_STEPS: Final = 2000


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LabelledBatch:
    """Sequences padded with unlabelled steps, and their numbers in the data."""

    x_BTF: torch.Tensor
    labels_BT: torch.Tensor
    lengths_B: torch.Tensor
    sample_ids: tuple[int, ...]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CutRecordings:
    """All recordings, cut into sequences of one length."""

    length: Length
    train: tuple[Recording, ...]
    test: tuple[Recording, ...]
    batch_size: int
    num_dropped: int  # sequences, of both parts, that lack the labels they need

    @property
    def longest(self) -> int:
        """Steps of the longest training sequence."""
        return max(map(len, self.train))

    def train_batches(self, epoch: int, *, seed: int) -> list[LabelledBatch]:
        """The batches of an epoch, in an order that follows from the seed."""
        order = np.random.default_rng([seed, epoch]).permutation(len(self.train)).tolist()
        return _make_batches(self.train, order, size=self.batch_size)

    def test_batches(self) -> list[LabelledBatch]:
        """All test sequences, sorted by length."""
        order = sorted(range(len(self.test)), key=lambda number: len(self.test[number]))
        return _make_batches(self.test, order, size=self.batch_size)


def open_recordings(path: Path | None, *, num_train: int | None = None, tiny: bool = False) -> Recordings:
    """Open recordings; those for validation are trained on, since nothing is chosen by them.

    Without a path these are embedded signals. At most `num_train` training recordings are used, and the same
    fraction of the test recordings; `tiny` ones are short, for a smoke test.

    Raises:
        StrettoError: If they cannot be read, or have no labels of steps.
    """
    data = make_regimes(**(TINY if tiny else EMBEDDED)) if path is None else open_sequences(path)
    test = data.part("test")
    train = data.subset(np.flatnonzero(data.split_N != PARTS.index("test")))
    if not len(train):
        raise StrettoError(f"{data.name}: all recordings are for testing", fix="Mark some as 0, train, in `split`.")
    if num_train is not None and num_train < len(train):
        test = _take_evenly(test, -(-len(test) * num_train // len(train)))
        train = _take_evenly(train, num_train)
    return standardise_recordings(train, test, name=data.name, max_steps=TINY_MAX_STEPS if tiny else None)


def cut_recordings(
    recordings: Recordings, length: Length, *, max_label: int, batch_steps: int, label_at_end: bool = False
) -> CutRecordings:
    """Cut all recordings; sequences that lack the labels they need are dropped, and counted.

    At length 128 they are windows with one label of 1 to `max_label` each, as published; else pieces with one label per
    step. With `label_at_end` a window has the label of its last step; otherwise all its steps must agree.

    Raises:
        StrettoError: If nothing is left to train on or to measure.
    """
    cut: Callable[[Recording], list[Recording]]
    if length == WINDOW:
        what = f"window of {WINDOW} steps with one label of 1 to {max_label}"
        cut = partial(cut_windows, max_label=max_label, label_at_end=label_at_end)
    else:
        what = "labelled step"
        cut = partial(cut_pieces, length=length)
    parts: dict[str, tuple[Recording, ...]] = {}
    candidates = 0
    for name, whole in (("train", recordings.train), ("test", recordings.test)):
        parts[name] = tuple(sequence for recording in whole for sequence in cut(recording))
        candidates += sum(_count_candidates(len(recording), length) for recording in whole)
        if not parts[name]:
            raise StrettoError(
                f"{recordings.name}: there is no {what} in the {name} recordings",
                fix="Leave that length out of --lengths, or give longer recordings with more labels.",
            )
    return CutRecordings(
        length=length,
        train=parts["train"],
        test=parts["test"],
        batch_size=max(1, batch_steps // max(map(len, parts["train"]))),
        num_dropped=candidates - sum(map(len, parts.values())),
    )


def cut_windows(recording: Recording, *, max_label: int, label_at_end: bool) -> list[Recording]:
    """Windows of 128 steps, 64 apart, with a label of 1 to `max_label` at their last step only: that of the window."""
    if len(recording) < WINDOW:
        return []
    labels_NW = recording.labels_T.unfold(0, WINDOW, HOP)
    last_N = labels_NW[:, -1]
    kept_N = (last_N != UNLABELLED) & (last_N <= max_label)
    if not label_at_end:
        kept_N &= (labels_NW == last_N[:, None]).all(dim=1)
    windows = []
    for number in torch.nonzero(kept_N)[:, 0].tolist():
        labels_W = torch.full((WINDOW,), UNLABELLED)
        labels_W[-1] = last_N[number]
        x_WF = recording.x_TF[number * HOP : number * HOP + WINDOW]
        windows.append(Recording(x_TF=x_WF, labels_T=labels_W))
    return windows


def cut_pieces(recording: Recording, *, length: Length) -> list[Recording]:
    """Consecutive pieces, the last of which may be shorter; those without any label are dropped."""
    steps = len(recording) if length == WHOLE else length
    slices = [slice(first, first + steps) for first in range(0, len(recording), steps)]
    return [
        Recording(x_TF=recording.x_TF[part], labels_T=recording.labels_T[part])
        for part in slices
        if bool((recording.labels_T[part] != UNLABELLED).any())
    ]


def _count_candidates(steps: int, length: Length) -> int:
    """Sequences in a recording of `steps` steps, whatever their labels."""
    if length == WINDOW:
        return max(0, (steps - WINDOW) // HOP + 1)
    return 1 if length == WHOLE else -(-steps // length)


def _take_evenly(data: SequenceSet, count: int) -> SequenceSet:
    return data.subset(np.unique(np.linspace(0, len(data) - 1, max(1, count)).round().astype(np.int64)))


def _make_batches(sequences: Sequence[Recording], order: Sequence[int], *, size: int) -> list[LabelledBatch]:
    batches = []
    for first in range(0, len(order), size):
        numbers = tuple(order[first : first + size])
        members = [sequences[number] for number in numbers]
        batches.append(
            LabelledBatch(
                x_BTF=pad_sequence([each.x_TF for each in members], batch_first=True),
                labels_BT=pad_sequence([each.labels_T for each in members], batch_first=True, padding_value=UNLABELLED),
                lengths_B=torch.tensor([len(each) for each in members]),
                sample_ids=numbers,
            )
        )
    return batches
