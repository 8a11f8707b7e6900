"""Digits: images read row by row, one class each.

Shape legend: B images, T rows, F columns, E numbers that represent a row, H hidden units, L layers, C classes.
"""

import dataclasses
from typing import ClassVar, Literal, TypeVar, final

import torch
from torch import nn
from torch.func import functional_call

from stretto.batching import Batch
from stretto.data import SequenceSet, load_drawn_digits
from stretto.large_batch import OptimizerName, ScheduleName
from stretto.nn import Standardise
from stretto.tasks.classification import Classification
from stretto.tasks.recurrent import make_lstm
from stretto.training import Count, NotNegative, Positive, Share, TrainConfig

C = TypeVar("C", bound=TrainConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitsConfig(TrainConfig):
    """Settings of the digits task: the baseline that larger batches are scaled from.

    Attributes:
        row_size: Numbers that a row of pixels is mapped to before the recurrent layer.
    """

    epochs: Count = 25
    batch_size: Count | Literal["auto"] = 128
    row_size: Count = 128
    dropout: Share = 0.0
    optimizer: OptimizerName = "momentum"
    learning_rate: Positive = 0.1
    schedule: ScheduleName = "constant"
    warmup_epochs: NotNegative | None = 0.1


@final
class DigitsModel(nn.Module):
    """Each row mapped by a linear layer, an LSTM over the rows, and a linear layer on its last state.

    Two consecutive linear maps are one. Where that is less work, the generated code takes pixels as they are and the
    product of both weights; gradients reach each of them through the product.
    """

    def __init__(self, standardise: Standardise, *, num_features: int, num_classes: int, config: DigitsConfig) -> None:
        super().__init__()
        size, width = config.hidden_size, config.row_size
        self.standardise = standardise
        self.transform = nn.Linear(num_features, width)
        self.lstm = make_lstm(width, size, num_layers=config.num_layers, dropout=config.dropout, backend=config.backend)
        self.dropout = nn.Dropout(config.dropout)
        self.classify = nn.Linear(size, num_classes)
        self._can_fold = num_features * 4 * size < width * (num_features + 4 * size)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores of the classes (B, C)."""
        x_BTF = self.standardise(batch.features_BTF, batch.mask)
        if self._can_fold and self.lstm.is_accelerated(x_BTF):
            weight_GE, bias_G = self.lstm.get_parameter("weight_ih_l0"), self.lstm.get_parameter("bias_ih_l0")
            folded = {
                "weight_ih_l0": weight_GE @ self.transform.weight,
                "bias_ih_l0": bias_G + weight_GE @ self.transform.bias,
            }
            _, (last_LBH, _) = functional_call(self.lstm, folded, (x_BTF,), {"lengths": batch.lengths})
        else:
            _, (last_LBH, _) = self.lstm(self.transform(x_BTF), lengths=batch.lengths)
        scores_BC: torch.Tensor = self.classify(self.dropout(last_LBH[-1]))
        return scores_BC


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

    def build_model(self) -> DigitsModel:
        """A new model."""
        return DigitsModel(
            Standardise.of(self.data.part("train"), num_groups=1),
            num_features=self.data.num_features,
            num_classes=len(self.class_names),
            config=self.config,
        )
