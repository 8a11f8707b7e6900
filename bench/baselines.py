"""A plain PyTorch script for each task, with the task's own arrays, sizes, rates and schedules.

Shape legend: N sequences, T steps, F features, B sequences or streams per batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from torch import nn

from bench.plain.digits import DigitsNet, PlainDigits, digit_images_net
from bench.plain.handwriting import PlainHandwriting
from bench.plain.language_model import PlainLanguageModel
from bench.plain.loop import ShuffledScript
from bench.plain.translate import PlainTranslate
from stretto.batching import Batch
from stretto.data import SequenceSet, line_pairs
from stretto.tasks import PAD, Translate, detect_bleu_words
from stretto.training import AbstractTask

PlainScript = ShuffledScript | PlainLanguageModel


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
    batch_size = task.config.first_batch_size
    shared = {"batch_size": batch_size, **_settings(task, "learning_rate", "clip_norm", "seed")}
    if task.name == "language-model":
        text = _language_model(task, data, shared)
        return Baseline(
            script=text,
            loss=lambda batch: text.loss(batch.features_BTF[:, :, 0].T, batch.targets.T)[0],
            batch_size=batch_size,
        )
    makers = {
        "digits": _digits,
        "digit-images": _digits,
        "translate": _translate,
        "handwriting": _handwriting,
    }
    script = makers[task.name](task, data, shared)
    return Baseline(script=script, loss=lambda batch: script.loss_of_first(len(batch)), batch_size=batch_size)


def _settings(task: AbstractTask[Any], *names: str) -> dict[str, Any]:
    return {name: getattr(task.config, name) for name in names}


def _targets(part: SequenceSet) -> list[Any]:
    return [part.targets[number] for number in range(len(part))]


def _digits(task: AbstractTask[Any], data: SequenceSet, shared: dict[str, Any]) -> ShuffledScript:
    train, valid = ((np.stack(part.arrays()), np.array(_targets(part))) for part in _train_and_valid(data))
    num_rows, num_columns = train[0].shape[1:]
    sizes = {"num_columns": num_columns, "hidden_size": task.config.hidden_size}
    sizes["num_classes"] = len(data.targets.names)  # type: ignore[attr-defined]
    model: nn.Module
    if task.name == "digits":
        model = DigitsNet(row_size=task.config.row_size, **sizes)
    else:
        model = digit_images_net(num_rows=num_rows, **sizes)
        # With a dimension for the one channel.
        train, valid = ((images_NTF[:, None], labels_N) for images_NTF, labels_N in (train, valid))
    return PlainDigits(train, valid, model=model, **_settings(task, "warmup_epochs"), **shared)


def _language_model(task: AbstractTask[Any], data: SequenceSet, shared: dict[str, Any]) -> PlainLanguageModel:
    train_S, valid_S = (np.concatenate(part.arrays())[:, 0] for part in _train_and_valid(data))
    sizes = _settings(task, "embedding_size", "hidden_size", "num_layers", "dropout", "init_scale", "window")
    schedule = _settings(task, "flat_epochs", "decay_factor")
    return PlainLanguageModel(train_S, valid_S, num_words=len(data.vocabulary), **sizes, **schedule, **shared)


def _handwriting(task: AbstractTask[Any], data: SequenceSet, shared: dict[str, Any]) -> ShuffledScript:
    train, valid = ((part.arrays(), _targets(part)) for part in _train_and_valid(data))
    alphabet = task.alphabet  # type: ignore[attr-defined]
    sizes = _settings(task, "stack", "hidden_size", "dropout", "epochs")
    return PlainHandwriting(train, valid, alphabet=alphabet, **sizes, **shared)


def _translate(task: AbstractTask[Any], data: SequenceSet, shared: dict[str, Any]) -> ShuffledScript:
    assert isinstance(task, Translate)
    train_texts, valid_texts = (line_pairs(part).targets for part in _train_and_valid(data))
    train, (valid_sources, _) = (_pieces(part) for part in _train_and_valid(task.data))
    return PlainTranslate(
        train,
        (valid_sources, valid_texts),
        num_pieces=task.vocabulary.size,
        decode=task.vocabulary.decode,
        bleu_words=detect_bleu_words(train_texts),
        **_settings(task, "hidden_size", "dropout", "label_smoothing", "epochs"),
        **shared,
    )


def _train_and_valid(data: SequenceSet) -> tuple[SequenceSet, SequenceSet]:
    return data.part("train"), data.part("valid")


def _pieces(part: SequenceSet) -> tuple[list[list[int]], list[list[int]]]:
    """Pieces of the sources, and of the targets, without padding."""
    sources, targets = ([row_T2[row_T2[:, side] != PAD, side].tolist() for row_T2 in part.arrays()] for side in (0, 1))
    return sources, targets
