"""A plain script for each task: the same arrays, sizes, rates and schedules.

Shape legend: N sequences, T steps, F features, B sequences or streams of a batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch

from bench.plain.digit_images import PlainDigitImages
from bench.plain.digits import PlainDigits
from bench.plain.handwriting import PlainHandwriting
from bench.plain.language_model import PlainLanguageModel
from bench.plain.translate import PlainTranslate
from bench.training_sides import PlainScript
from stretto.batching import Batch
from stretto.data import Part, SequenceSet, line_pairs
from stretto.tasks import PAD, Translate, fitting_words
from stretto.training import AbstractTask

Array = npt.NDArray[Any]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A plain script.

    Attributes:
        script: What trains.
        loss_of: Its mean loss on a batch as Stretto has it.
        batch_size: Of its batches.
    """

    script: PlainScript
    loss_of: Callable[[Batch], torch.Tensor]
    batch_size: int


def rival_of(task: AbstractTask[Any], data: SequenceSet) -> Rival:
    """The plain script of a task, with the task's settings.

    Args:
        task: With a batch size of its own, or as many as `base_batch_size`.
        data: What the task was made with.
    """
    config = task.config
    rows = config.rows
    shared = {
        "hidden_size": config.hidden_size,
        "batch_size": rows,
        "learning_rate": config.learning_rate,
        "clip_norm": config.clip_norm,
        "seed": config.seed,
    }
    return MAKERS[task.name](task, data, shared)


def _numbers(batch: Batch) -> list[int]:
    """Places in the training part of what `first_batch` took from it."""
    return list(range(len(batch)))


def _rows(part: SequenceSet) -> list[Array]:
    """The features of each sequence."""
    places = zip(part.starts_N.tolist(), part.lengths_N.tolist(), strict=True)
    return [part.features_SF[start : start + length] for start, length in places]


def _targets(part: SequenceSet) -> list[Any]:
    return [part.targets[number] for number in range(len(part))]


def _images(data: SequenceSet, part: Part) -> tuple[Array, Array]:
    chosen = data.part(part)
    return np.stack(_rows(chosen)), np.array(_targets(chosen))


def _digits(task: AbstractTask[Any], data: SequenceSet, shared: dict[str, Any]) -> Rival:
    script = PlainDigits(
        _images(data, "train"),
        _images(data, "valid"),
        num_classes=len(data.targets.names),  # type: ignore[attr-defined]
        row_size=task.config.row_size,
        warmup_epochs=task.config.warmup_epochs,
        **shared,
    )
    return Rival(script=script, loss_of=lambda batch: script.loss_of(_numbers(batch)), batch_size=shared["batch_size"])


def _digit_images(task: AbstractTask[Any], data: SequenceSet, shared: dict[str, Any]) -> Rival:
    script = PlainDigitImages(
        _images(data, "train"),
        _images(data, "valid"),
        num_classes=len(data.targets.names),  # type: ignore[attr-defined]
        warmup_epochs=task.config.warmup_epochs,
        **shared,
    )
    return Rival(script=script, loss_of=lambda batch: script.loss_of(_numbers(batch)), batch_size=shared["batch_size"])


def _language_model(task: AbstractTask[Any], data: SequenceSet, shared: dict[str, Any]) -> Rival:
    config = task.config
    train_S, valid_S = (np.concatenate(_rows(data.part(part)))[:, 0] for part in ("train", "valid"))
    script = PlainLanguageModel(
        train_S,
        valid_S,
        num_words=len(data.vocabulary),
        embedding_size=config.embedding_size,
        num_layers=config.num_layers,
        dropout=config.dropout,
        init_scale=config.init_scale,
        window=config.window,
        flat_epochs=config.flat_epochs,
        decay_factor=config.decay_factor,
        **shared,
    )

    def loss_of(batch: Batch) -> torch.Tensor:
        return script.loss(batch.features_BTF[:, :, 0].T, batch.targets.T)[0]

    return Rival(script=script, loss_of=loss_of, batch_size=shared["batch_size"])


def _handwriting(task: AbstractTask[Any], data: SequenceSet, shared: dict[str, Any]) -> Rival:
    config, (train, valid) = task.config, (data.part(part) for part in ("train", "valid"))
    script = PlainHandwriting(
        (_rows(train), _targets(train)),
        (_rows(valid), _targets(valid)),
        alphabet=task.alphabet,  # type: ignore[attr-defined]
        stack=config.stack,
        dropout=config.dropout,
        epochs=config.epochs,
        **shared,
    )
    return Rival(script=script, loss_of=lambda batch: script.loss_of(_numbers(batch)), batch_size=shared["batch_size"])


def _translate(task: AbstractTask[Any], data: SequenceSet, shared: dict[str, Any]) -> Rival:
    assert isinstance(task, Translate)
    config = task.config
    texts = {part: line_pairs(data.part(part)).targets for part in ("train", "valid")}
    (train_sources, train_targets), (valid_sources, _) = (_sides(task.data.part(part)) for part in ("train", "valid"))
    script = PlainTranslate(
        (train_sources, train_targets),
        (valid_sources, texts["valid"]),
        num_pieces=task.vocabulary.size,
        spelt=task.vocabulary.decode,
        bleu_words=fitting_words(texts["train"]),
        dropout=config.dropout,
        label_smoothing=config.label_smoothing,
        epochs=config.epochs,
        **shared,
    )
    return Rival(script=script, loss_of=lambda batch: script.loss_of(_numbers(batch)), batch_size=shared["batch_size"])


def _sides(part: SequenceSet) -> tuple[list[list[int]], list[list[int]]]:
    """Pieces of the sources, and of the targets, without padding."""
    rows = _rows(part)
    sources, targets = ([row_T2[row_T2[:, side] != PAD, side].tolist() for row_T2 in rows] for side in (0, 1))
    return sources, targets


MAKERS: Final[dict[str, Callable[[AbstractTask[Any], SequenceSet, dict[str, Any]], Rival]]] = {
    "digits": _digits,
    "digit-images": _digit_images,
    "language-model": _language_model,
    "translate": _translate,
    "handwriting": _handwriting,
}
