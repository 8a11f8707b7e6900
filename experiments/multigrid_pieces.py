"""Recordings with a label a step, cut into sequences of one length.

Shape legend: N windows, T steps of one sequence, W of a window, B sequences of a batch, F features.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, final

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from experiments.multigrid_settings import WHOLE, Length, MultigridSettings
from stretto.data import PARTS, RegimeSettings, SequenceSet, StepLabels, make_regimes, open_sequences
from stretto.errors import StrettoError
from stretto.nn import Standardise

WINDOW: Final = 128
HOP: Final = 64
UNLABELLED: Final = 0
EMBEDDED: Final = RegimeSettings(num_train=24, median_length=6000)
TINY: Final = RegimeSettings(num_train=6, median_length=300)
TINY_STEPS: Final = 2000


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One sequence: standardised features and a label for each step; 0 is none."""

    x_TF: torch.Tensor
    labels_T: torch.Tensor

    def __len__(self) -> int:
        return len(self.x_TF)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recordings:
    """Whole recordings.

    Attributes:
        name: Of the data.
        train: To learn from; what is meant for validation is among them, for nothing is chosen by it.
        test: To measure accuracy on.
        num_classes: Labels, the one for none included.
        by_last: Whether the label of a window is that of its last step, and not the only one that it has.
    """

    name: str
    train: tuple[Piece, ...]
    test: tuple[Piece, ...]
    num_classes: int
    by_last: bool

    @property
    def num_features(self) -> int:
        """F."""
        return int(self.train[0].x_TF.shape[1])


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What is learnt at one length.

    Attributes:
        length: As it was asked for.
        train: Sequences to learn from.
        test: Sequences to measure accuracy on.
        batch_size: Sequences of a batch.
        left_out: Sequences of both that have not the labels they should have.
    """

    length: Length
    train: tuple[Piece, ...]
    test: tuple[Piece, ...]
    batch_size: int
    left_out: int

    @property
    def longest(self) -> int:
        """Steps of the longest training sequence."""
        return max(map(len, self.train))

    def epoch(self, number: int, *, seed: int) -> "list[PieceBatch]":
        """The batches of an epoch, in an order that follows from the seed."""
        order = np.random.default_rng([seed, number]).permutation(len(self.train)).tolist()
        return _batches(self.train, order, size=self.batch_size)

    def tests(self) -> "list[PieceBatch]":
        """All test sequences, those of about the same length together."""
        order = sorted(range(len(self.test)), key=lambda number: len(self.test[number]))
        return _batches(self.test, order, size=self.batch_size)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PieceBatch:
    """Sequences side by side, padded with steps without a label, and the numbers by which they are known."""

    x_BTF: torch.Tensor
    labels_BT: torch.Tensor
    lengths_B: torch.Tensor
    sample_ids: tuple[int, ...]


def open_recordings(settings: MultigridSettings) -> Recordings:
    """The data that the settings name, features on the scale of the training recordings.

    Raises:
        StrettoError: If they cannot be read, or have no labels of steps.
    """
    if settings.data is None:
        data = make_regimes(TINY if settings.quick else EMBEDDED)
    else:
        data = open_sequences(settings.data)
    if not isinstance(data.targets, StepLabels):
        raise StrettoError(
            f"{data.name} has no labels of steps", fix="Give recordings with one label a step as `y`, 0 for none."
        )
    test = data.part("test")
    train = data.subset(np.flatnonzero(data.split_N != PARTS.index("test")))
    if not len(train):
        raise StrettoError(f"{data.name}: all recordings are for testing", fix="Mark some as 0, train, in `split`.")
    if settings.num_train is not None and settings.num_train < len(train):
        test = _spread(test, -(-len(test) * settings.num_train // len(train)))
        train = _spread(train, settings.num_train)
    scale, most = Standardise.of(train), TINY_STEPS if settings.quick else None
    return Recordings(
        name=data.name,
        train=_standardised(train, scale, most=most),
        test=_standardised(test, scale, most=most),
        num_classes=len(data.targets.names),
        # In the embedded signals a pulse tells regimes apart that comes before the labels of a regime begin.
        by_last=settings.data is None,
    )


def course_of(recordings: Recordings, length: Length, settings: MultigridSettings) -> Course:
    """Cut all recordings; sequences that have not the labels they should have are left out, and counted.

    Raises:
        StrettoError: If nothing is left to learn or to measure.
    """
    cut: Callable[[Piece], list[Piece]]
    if length == WINDOW:
        what = f"window of {WINDOW} steps with one label of 1 to {settings.window_labels}"
        cut = partial(windows_of, most_label=settings.window_labels, by_last=recordings.by_last)
    else:
        what = "labelled step"
        cut = partial(stretches_of, length=length)
    parts: dict[str, tuple[Piece, ...]] = {}
    candidates = 0
    for name, whole in (("train", recordings.train), ("test", recordings.test)):
        parts[name] = tuple(piece for recording in whole for piece in cut(recording))
        candidates += sum(_candidates(len(recording), length) for recording in whole)
        if not parts[name]:
            raise StrettoError(
                f"{recordings.name}: there is no {what} in the {name} recordings",
                fix="Leave that length out of --lengths, or give longer recordings with more labels.",
            )
    longest = max(map(len, parts["train"]))
    return Course(
        length=length,
        train=parts["train"],
        test=parts["test"],
        batch_size=max(1, settings.batch_steps // longest),
        left_out=candidates - sum(map(len, parts.values())),
    )


def windows_of(recording: Piece, *, most_label: int, by_last: bool) -> list[Piece]:
    """Windows of 128 steps, 64 apart, with a label at their last step alone: that of the window.

    Args:
        recording: What to cut.
        most_label: Keep windows with a label of 1 to this.
        by_last: Take the label of the last step, whatever the others have; otherwise all steps must have the same.
    """
    if len(recording) < WINDOW:
        return []
    labels_NW = recording.labels_T.unfold(0, WINDOW, HOP)
    last_N = labels_NW[:, -1]
    kept_N = (last_N != UNLABELLED) & (last_N <= most_label)
    if not by_last:
        kept_N &= (labels_NW == last_N[:, None]).all(dim=1)
    found = []
    for number in torch.nonzero(kept_N)[:, 0].tolist():
        labels_W = torch.full((WINDOW,), UNLABELLED)
        labels_W[-1] = last_N[number]
        found.append(Piece(x_TF=recording.x_TF[number * HOP : number * HOP + WINDOW], labels_T=labels_W))
    return found


def stretches_of(recording: Piece, *, length: Length) -> list[Piece]:
    """One stretch after another, the last of which may be shorter; those without a label are left out."""
    steps = len(recording) if length == WHOLE else length
    found = []
    for first in range(0, len(recording), steps):
        some = slice(first, first + steps)
        if bool((recording.labels_T[some] != UNLABELLED).any()):
            found.append(Piece(x_TF=recording.x_TF[some], labels_T=recording.labels_T[some]))
    return found


def _candidates(steps: int, length: Length) -> int:
    """Sequences that a recording of so many steps has, whatever their labels."""
    if length == WINDOW:
        return max(0, (steps - WINDOW) // HOP + 1)
    return 1 if length == WHOLE else -(-steps // length)


def _spread(data: SequenceSet, count: int) -> SequenceSet:
    """So many recordings, evenly spread."""
    return data.subset(np.unique(np.linspace(0, len(data) - 1, max(1, count)).round().astype(np.int64)))


def _standardised(data: SequenceSet, scale: Standardise, *, most: int | None) -> tuple[Piece, ...]:
    found = []
    for sample in (data[index] for index in range(len(data))):
        x_1TF = sample.features_TF[None, :most]
        real_1T = torch.ones(x_1TF.shape[:2], dtype=torch.bool)
        found.append(Piece(x_TF=scale(x_1TF, real_1T)[0], labels_T=torch.as_tensor(sample.target)[:most]))
    return tuple(found)


def _batches(pieces: Sequence[Piece], order: Sequence[int], *, size: int) -> list[PieceBatch]:
    found = []
    for first in range(0, len(order), size):
        numbers = tuple(order[first : first + size])
        some = [pieces[number] for number in numbers]
        found.append(
            PieceBatch(
                x_BTF=pad_sequence([piece.x_TF for piece in some], batch_first=True),
                labels_BT=pad_sequence([p.labels_T for p in some], batch_first=True, padding_value=UNLABELLED),
                lengths_B=torch.tensor([len(piece) for piece in some]),
                sample_ids=numbers,
            )
        )
    return found
