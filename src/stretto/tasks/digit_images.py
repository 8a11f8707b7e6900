"""Digit images: images seen whole, one class each.

Shape legend: B images, T rows, F columns, C classes.
"""

import dataclasses
from typing import Final, Literal, final

import numpy as np
import torch
from torch import nn

from stretto.batching import Batch
from stretto.data import SequenceSet
from stretto.errors import StrettoError
from stretto.large_batch import OptimizerName, ScheduleName
from stretto.nn import Standardise
from stretto.tasks.digits import AbstractDigits
from stretto.training import Count, NotNegative, Positive, Share, TrainConfig

CHANNELS: Final = (16, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitImagesConfig(TrainConfig):
    """Settings of the digit-images task, whose net is not recurrent.

    Attributes:
        hidden_size: Units of the linear layer after the convolutions.
        num_layers: 1: there are no recurrent layers.
        dropout: Share of the units dropped before the last layer.
    """

    epochs: Count = 25
    batch_size: Count | Literal["auto"] = 128
    dropout: Share = 0.0
    optimizer: OptimizerName = "momentum"
    learning_rate: Positive = 0.05
    schedule: ScheduleName = "constant"
    warmup_epochs: NotNegative | None = 0.1


@final
class DigitImagesModel(nn.Module):
    """Two convolutions, each with pooling, a linear layer, and a linear layer for the classes."""

    def __init__(
        self, standardise: Standardise, *, num_rows: int, num_columns: int, num_classes: int, config: DigitImagesConfig
    ) -> None:
        super().__init__()
        self.standardise = standardise
        few, many = CHANNELS
        places = -(-num_rows // 4) * -(-num_columns // 4)
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
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden_size, num_classes),
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores of the classes (B, C)."""
        # What a batch is padded with beyond the rows of its images is no part of them.
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

    def __init__(self, config: DigitImagesConfig, data: SequenceSet) -> None:
        super().__init__(config, data)
        if config.num_layers != 1:
            raise StrettoError(
                f"num_layers={config.num_layers} was given and digit-images has no recurrent layers",
                fix="Leave --num-layers out, or train digits.",
            )
        _check_heights(data)

    def build_model(self) -> DigitImagesModel:
        """A new model."""
        return DigitImagesModel(
            Standardise.of(self.data.part("train"), num_groups=1),
            num_rows=int(self.data.lengths_N[0]),
            num_columns=self.data.num_features,
            num_classes=len(self.class_names),
            config=self.config,
        )


def _check_heights(data: SequenceSet) -> None:
    others = np.flatnonzero(data.lengths_N != data.lengths_N[0])
    if len(others):
        first, other = data.numbers_N[0], data.numbers_N[others[0]]
        raise StrettoError(
            f"{data.name}: image {first} has {data.lengths_N[0]} rows and image {other} has "
            f"{data.lengths_N[others[0]]} ({len(others)} such images)",
            fix="Give images of one height, or train digits, which reads them row by row.",
        )
