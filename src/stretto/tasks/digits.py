"""Digits: images read row by row, one class each.

Shape legend: B images, T rows, F columns, E numbers that stand for a row, P rows of all images, H hidden units,
L layers, C classes.
"""

import dataclasses
from typing import Final, Literal, TypeVar, final

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from stretto.batching import Batch
from stretto.data import Labels, SequenceSet, load_drawn_digits
from stretto.errors import StrettoError
from stretto.large_batch import OptimizerName, ScheduleName
from stretto.nn import (
    DTYPES,
    Direction,
    Standardise,
    as_rows,
    layer_program,
    layer_weights,
    remember_by_default,
    run_stack,
)
from stretto.training import AbstractTask, Count, LossSum, NotNegative, Positive, Sample, Score, Share, TrainConfig

C = TypeVar("C", bound=TrainConfig)
MEASURED_TOGETHER: Final = 1024
"""Images whose pixels are summed at once."""


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

    Two linear maps in a row are one: where that is less work, the compiled layer takes pixels as they are, with the
    product of both weights. Gradients reach each of them through the product.
    """

    def __init__(self, standardise: Standardise, *, num_features: int, num_classes: int, config: DigitsConfig) -> None:
        super().__init__()
        size, width = config.hidden_size, config.row_size
        self.standardise = standardise
        self.transform = nn.Linear(num_features, width)
        # torch warns when a single layer is given a dropout that it would not use.
        between = config.dropout if config.num_layers > 1 else 0.0
        self.lstm = nn.LSTM(width, size, config.num_layers, dropout=between)
        remember_by_default(self.lstm)
        self.dropout = nn.Dropout(config.dropout)
        self.classify = nn.Linear(size, num_classes)
        self.backend = config.backend
        self._folds = num_features * 4 * size < width * (num_features + 4 * size)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores of the classes (B, C)."""
        x_BTF = self.standardise(batch.features_BTF, batch.mask)
        compiled = self.backend != "torch" and x_BTF.device.type == "cpu" and x_BTF.dtype in DTYPES
        last_BH = (self._compiled if compiled else self._plain)(x_BTF, batch.lengths)
        scores_BC: torch.Tensor = self.classify(self.dropout(last_BH))
        return scores_BC

    def _compiled(self, x_BTF: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """The state after each image's own last row; outputs are not brought back to the shape of the batch."""
        rows = as_rows(x_BTF, lengths_B, batch_first=True)
        x_PF, first = rows.x_PF, layer_weights(self.lstm, 0)
        if self._folds:
            first["bias_ih"] = first["bias_ih"] + first["weight_ih"] @ self.transform.bias
            first["weight_ih"] = first["weight_ih"] @ self.transform.weight
        else:
            x_PF = self.transform(x_PF)
        zeros_BH = x_PF.new_zeros(len(x_BTF), self.lstm.hidden_size)
        layers = []
        for number in range(self.lstm.num_layers):
            weights = layer_weights(self.lstm, number) if number else first
            built = layer_program(
                "LSTM",
                input_size=weights["weight_ih"].shape[1],
                hidden_size=self.lstm.hidden_size,
                dtype=x_PF.dtype,
            )
            layers.append([Direction(built.program, weights, [zeros_BH, zeros_BH])])
        between = self.lstm.dropout if self.training else 0.0
        result = run_stack(layers, rows.layout, x_PF, dropout=between)
        last_BH: torch.Tensor = rows.restored(result.states[-1][0])
        return last_BH

    def _plain(self, x_BTF: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor | PackedSequence
        if bool((lengths_B == x_BTF.shape[1]).all()):
            rows = self.transform(x_BTF.transpose(0, 1))
        else:
            packed = pack_padded_sequence(x_BTF, lengths_B, batch_first=True, enforce_sorted=False)
            rows = packed._replace(data=self.transform(packed.data))
        _, (last_LBH, _) = self.lstm(rows)
        last_BH: torch.Tensor = last_LBH[-1]
        return last_BH


class AbstractDigits(AbstractTask[C]):
    """Images with one class each: all but the model."""

    metric = "accuracy"

    def __init__(self, config: C, data: SequenceSet) -> None:
        super().__init__(config, data)
        if not isinstance(data.targets, Labels):
            raise StrettoError(
                f"{data.name} has no labels",
                fix="Give images as `x_train`, `y_train`, `x_test` and `y_test`, or one label a sequence as `y`.",
            )
        self._names = data.targets.names

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        """Digits drawn with single-stroke fonts by made-up hands."""
        return load_drawn_digits()

    def loss(self, output: torch.Tensor, batch: Batch) -> LossSum:
        """Cross-entropy, counted in images."""
        return LossSum(total=functional.cross_entropy(output, batch.targets, reduction="sum"), count=len(batch))

    def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """Share of images whose best class is the right one."""
        right = int((output.argmax(dim=1) == batch.targets).sum())
        return {self.metric: Score(amount=right, count=len(batch))}

    def samples(self, output: torch.Tensor, batch: Batch) -> list[Sample]:
        """True and recognised classes."""
        pairs = zip(batch.targets.tolist(), output.argmax(dim=1).tolist(), strict=True)
        return [Sample(target=self._names[y], output=self._names[found]) for y, found in pairs]


@final
class Digits(AbstractDigits[DigitsConfig]):
    """Images of digits read row by row, measured in accuracy."""

    name = "digits"

    def build_model(self) -> DigitsModel:
        """A fresh model."""
        return DigitsModel(
            one_scale(self.data.part("train")),
            num_features=self.data.num_features,
            num_classes=len(self._names),
            config=self.config,
        )


def one_scale(data: SequenceSet) -> Standardise:
    """Brings pixels to mean zero and deviation one, over all of them alike.

    A scale for each column would blow up those at the edge, where hardly anything is ever drawn.
    """
    count, total, square = 0, 0.0, 0.0
    # Measured from a value that occurs, the squares of a common offset do not swamp the deviation.
    origin = float(data.features_SF[data.starts_N[0], 0])
    for first in range(0, len(data), MEASURED_TOGETHER):
        chosen = slice(first, first + MEASURED_TOGETHER)
        places = zip(data.starts_N[chosen], data.lengths_N[chosen], strict=True)
        rows = [data.features_SF[start : start + length] for start, length in places]
        values = np.concatenate(rows, dtype=np.float64, casting="unsafe") - origin
        count += values.size
        total += float(values.sum())
        square += float((values**2).sum())
    shift = total / count
    mean = origin + shift
    deviation = max(square / count - shift**2, 0.0) ** 0.5
    scale = 1.0 / deviation if deviation > 1e-9 * max(1.0, abs(mean)) else 1.0
    return Standardise(torch.full((data.num_features,), mean), torch.full((data.num_features,), scale))
