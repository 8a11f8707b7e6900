"""Digits: images with one class each, read row by row by an LSTM, or seen whole by convolutions.

Shape legend: B images, T rows, F columns, E numbers that represent a row, H hidden units, L layers, C classes.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Final, Literal, TypeVar, final

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from stretto.batching import Batch
from stretto.data import SequenceSet, load_drawn_digits
from stretto.errors import StrettoError
from stretto.large_batch import OptimizerName, ScheduleName
from stretto.nn import Dropout, Standardise, is_accelerated
from stretto.tasks.classify import Classification, ClassificationConfig
from stretto.tasks.recurrent import make_lstm
from stretto.training import Count, NotNegative, Positive, Share

CHANNELS: Final = (16, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(ClassificationConfig):
    """What both tasks of images start from."""

    epochs: Count = 25
    batch_size: Count | Literal["auto"] = 128
    dropout: Share = 0.0
    optimizer: OptimizerName = "momentum"
    learning_rate: Positive = 0.1
    schedule: ScheduleName = "constant"
    warmup_epochs: NotNegative | None = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitsConfig(ImageConfig):
    """Settings of the digits task: the baseline that larger batches are scaled from.

    Attributes:
        row_size: Numbers that a row of pixels is mapped to before the recurrent layer.
    """

    row_size: Count = 128


C = TypeVar("C", bound=ImageConfig)


@final
class DigitsModel(nn.Module):
    """Each row mapped by a linear layer, an LSTM over the rows, and a linear layer on its last state.

    Two consecutive linear maps are one. Where that is less work, the generated code takes pixels as they are and the
    product of both weights; gradients reach each of them through the product.
    """

    def __init__(self, data: SequenceSet, *, num_classes: int, config: DigitsConfig) -> None:
        super().__init__()
        num_features, size, width = data.num_features, config.hidden_size, config.row_size
        self.standardise = Standardise.of(data.part("train"), num_groups=1)
        self.transform = nn.Linear(num_features, width)
        self.lstm = make_lstm(width, size, config=config)
        self.dropout = Dropout(config.dropout)
        self.classify = nn.Linear(size, num_classes)
        self._can_fold = num_features * 4 * size < width * (num_features + 4 * size)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores of the classes (B, C)."""
        x_BTF = self.standardise(batch.features_BTF, batch.mask)
        if self._can_fold and is_accelerated(self.lstm, x_BTF):
            weight_GE, bias_G = self.lstm.get_parameter("weight_ih_l0"), self.lstm.get_parameter("bias_ih_l0")
            folded = {
                "weight_ih_l0": weight_GE @ self.transform.weight,
                "bias_ih_l0": bias_G + weight_GE @ self.transform.bias,
            }
            with self._reading_pixels():
                _, (last_LBH, _) = functional_call(self.lstm, folded, (x_BTF,), {"lengths": batch.lengths})
        else:
            # A model that is exported has torch's own layer, whose sequences are as long as the tensor.
            ragged = {} if batch.lengths is None else {"lengths": batch.lengths}
            _, (last_LBH, _) = self.lstm(self.transform(x_BTF), **ragged)
        scores_BC: torch.Tensor = self.classify(self.dropout(last_LBH[-1]))
        return scores_BC

    @contextlib.contextmanager
    def _reading_pixels(self) -> Iterator[None]:
        """The LSTM checks its inputs against `input_size`, which the product of both weights changes."""
        width, self.lstm.input_size = self.lstm.input_size, self.transform.in_features
        try:
            yield
        finally:
            self.lstm.input_size = width


class AbstractDigits(Classification[C]):
    """Images with one class each: all but the model."""

    label_hint: ClassVar[str] = (
        "Give images as `x_train`, `y_train`, `x_test` and `y_test`, or one label per sequence as `y`."
    )

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        """Digits drawn with single-stroke fonts in invented handwriting."""
        return load_drawn_digits()


@final
class Digits(AbstractDigits[DigitsConfig]):
    """Images of digits read row by row, measured in accuracy."""

    name = "digits"
    Config = DigitsConfig
    Model = DigitsModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitImagesConfig(ImageConfig):
    """Settings of the digit-images task, whose net is not recurrent.

    Attributes:
        hidden_size: Units of the linear layer after the convolutions.
        num_layers: 1: there are no recurrent layers.
        dropout: Share of the units dropped before the last layer.
    """

    learning_rate: Positive = 0.05


@final
class DigitImagesModel(nn.Module):
    """Two convolutions, each with pooling, a linear layer, and a linear layer for the classes."""

    def __init__(self, data: SequenceSet, *, num_classes: int, config: DigitImagesConfig) -> None:
        super().__init__()
        self.standardise = Standardise.of(data.part("train"), num_groups=1)
        few, many = CHANNELS
        places = -(-int(data.lengths_N[0]) // 4) * -(-data.num_features // 4)
        self.layers = nn.Sequential(
            # Pooling first: the positive part of the largest of four is the largest of four positive parts.
            nn.Conv2d(1, few, kernel_size=3, padding=1),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.ReLU(),
            nn.Conv2d(few, many, kernel_size=3, padding=1),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(many * places, config.hidden_size),
            nn.ReLU(),
            Dropout(config.dropout),
            nn.Linear(config.hidden_size, num_classes),
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores of the classes (B, C)."""
        # Padding rows are not part of the images.
        num_rows = int(batch.lengths[0])
        x_BTF = self.standardise(batch.features_BTF[:, :num_rows], batch.mask[:, :num_rows])
        # Channels last in memory: torch convolves and pools so much faster on a CPU, and keeps it from layer to layer.
        scores_BC: torch.Tensor = self.layers(x_BTF[..., None].movedim(-1, 1))
        return scores_BC


@final
class DigitImages(AbstractDigits[DigitImagesConfig]):
    """Images of digits seen whole by a small convolutional net, measured in accuracy."""

    name = "digit-images"
    Config = DigitImagesConfig
    Model = DigitImagesModel

    def __init__(self, config: DigitImagesConfig, data: SequenceSet) -> None:
        super().__init__(config, data)
        if config.num_layers != 1:
            raise StrettoError(
                f"num_layers={config.num_layers} was given and digit-images has no recurrent layers",
                fix="Leave --num-layers out, or train digits.",
            )
        others = np.flatnonzero(data.lengths_N != data.lengths_N[0])
        if len(others):
            first, other = data.numbers_N[0], data.numbers_N[others[0]]
            raise StrettoError(
                f"{data.name}: image {first} has {data.lengths_N[0]} rows and image {other} has "
                f"{data.lengths_N[others[0]]} ({len(others)} such images)",
                fix="Give images of one height, or train digits, which reads them row by row.",
            )
