"""A plain PyTorch script for each task, with the task's own arrays, sizes, rates and schedules.

Shape legend: N sequences, T steps, F features, B sequences or streams per batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from bench.plain.digits import DigitsNet, PlainDigits, digit_images_net
from bench.plain.handwriting import PlainHandwriting
from bench.plain.language_model import PlainLanguageModel
from bench.plain.translate import PlainTranslate
from stretto.batching import Batch
from stretto.data import Part, SequenceSet, line_pairs
from stretto.tasks import PAD, Translate, detect_bleu_words
from stretto.training import AbstractTask

Array = npt.NDArray[Any]


class PlainScript(Protocol):
    """What a plain script has."""

    @property
    def model(self) -> nn.Module:
        """The net."""

    def epoch(self) -> None:
        """Train one epoch."""

    def quality(self) -> float:
        """The metric on the validation part."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A plain script, its mean loss on one of Stretto's batches, and its batch size."""

    script: PlainScript
    loss: Callable[[Batch], torch.Tensor]
    batch_size: int


def baseline_of(task: AbstractTask[Any], data: SequenceSet) -> Baseline:
    """The plain script of a task, with the task's settings.

    Args:
        task: With a batch size of its own, or a `base_batch_size`.
        data: What the task was made with.
    """
    config = task.config
    shared = {
        "batch_size": config.first_batch_size,
        "learning_rate": config.learning_rate,
        "clip_norm": config.clip_norm,
        "seed": config.seed,
    }
    makers = {
        "digits": _digits,
        "digit-images": _digit_images,
        "language-model": _language_model,
        "translate": _translate,
        "handwriting": _handwriting,
    }
    script, loss = makers[task.name](task, data, shared)
    return Baseline(script=script, loss=loss, batch_size=config.first_batch_size)


Made = tuple[PlainScript, Callable[[Batch], torch.Tensor]]


def _rows(part: SequenceSet) -> list[Array]:
    """The features of each sequence."""
    places = zip(part.starts_N.tolist(), part.lengths_N.tolist(), strict=True)
    return [part.features_SF[start : start + length] for start, length in places]


def _targets(part: SequenceSet) -> list[Any]:
    return [part.targets[number] for number in range(len(part))]


def _images(data: SequenceSet, part: Part) -> tuple[Array, Array]:
    chosen = data.part(part)
    return np.stack(_rows(chosen)), np.array(_targets(chosen))


def _num_classes(data: SequenceSet) -> int:
    return len(data.targets.names)  # type: ignore[attr-defined]


def _digits(task: AbstractTask[Any], data: SequenceSet, shared: dict[str, Any]) -> Made:
    config, train, valid = task.config, _images(data, "train"), _images(data, "valid")
    model = DigitsNet(
        num_columns=train[0].shape[2],
        row_size=config.row_size,
        hidden_size=config.hidden_size,
        num_classes=_num_classes(data),
    )
    script = PlainDigits(train, valid, model=model, warmup_epochs=config.warmup_epochs, **shared)
    return script, lambda batch: script.loss_of(list(range(len(batch))))


def _digit_images(task: AbstractTask[Any], data: SequenceSet, shared: dict[str, Any]) -> Made:
    config = task.config
    # With a dimension for the one channel.
    train, valid = (
        (images_NTF[:, None], labels_N) for images_NTF, labels_N in (_images(data, "train"), _images(data, "valid"))
    )
    model = digit_images_net(
        num_rows=train[0].shape[2],
        num_columns=train[0].shape[3],
        hidden_size=config.hidden_size,
        num_classes=_num_classes(data),
    )
    script = PlainDigits(train, valid, model=model, warmup_epochs=config.warmup_epochs, **shared)
    return script, lambda batch: script.loss_of(list(range(len(batch))))


def _language_model(task: AbstractTask[Any], data: SequenceSet, shared: dict[str, Any]) -> Made:
    config = task.config
    train_S, valid_S = (np.concatenate(_rows(data.part(part)))[:, 0] for part in ("train", "valid"))
    script = PlainLanguageModel(
        train_S,
        valid_S,
        num_words=len(data.vocabulary),
        embedding_size=config.embedding_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        dropout=config.dropout,
        init_scale=config.init_scale,
        window=config.window,
        flat_epochs=config.flat_epochs,
        decay_factor=config.decay_factor,
        **shared,
    )
    return script, lambda batch: script.loss(batch.features_BTF[:, :, 0].T, batch.targets.T)[0]


def _handwriting(task: AbstractTask[Any], data: SequenceSet, shared: dict[str, Any]) -> Made:
    config, (train, valid) = task.config, (data.part(part) for part in ("train", "valid"))
    script = PlainHandwriting(
        (_rows(train), _targets(train)),
        (_rows(valid), _targets(valid)),
        alphabet=task.alphabet,  # type: ignore[attr-defined]
        stack=config.stack,
        hidden_size=config.hidden_size,
        dropout=config.dropout,
        epochs=config.epochs,
        **shared,
    )
    return script, lambda batch: script.loss_of(list(range(len(batch))))


def _translate(task: AbstractTask[Any], data: SequenceSet, shared: dict[str, Any]) -> Made:
    assert isinstance(task, Translate)
    config = task.config
    texts = {part: line_pairs(data.part(part)).targets for part in ("train", "valid")}
    train, (valid_sources, _) = (_pieces(task.data.part(part)) for part in ("train", "valid"))
    script = PlainTranslate(
        train,
        (valid_sources, texts["valid"]),
        num_pieces=task.vocabulary.size,
        decode=task.vocabulary.decode,
        bleu_words=detect_bleu_words(texts["train"]),
        hidden_size=config.hidden_size,
        dropout=config.dropout,
        label_smoothing=config.label_smoothing,
        epochs=config.epochs,
        **shared,
    )
    return script, lambda batch: script.loss_of(list(range(len(batch))))


def _pieces(part: SequenceSet) -> tuple[list[list[int]], list[list[int]]]:
    """Pieces of the sources, and of the targets, without padding."""
    sources, targets = ([row_T2[row_T2[:, side] != PAD, side].tolist() for row_T2 in _rows(part)] for side in (0, 1))
    return sources, targets
