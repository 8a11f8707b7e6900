"""Classification: one label a sequence.

Shape legend: B sequences, T steps, F features, H hidden units, C classes.
"""

import dataclasses
from typing import Annotated, final

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from stretto.batching import Batch
from stretto.data import Labels, SequenceSet, StepLabels, cut_runs
from stretto.errors import StrettoError
from stretto.nn import BidirectionalLSTM, Standardise
from stretto.training import AbstractTask, Count, LossSum, Positive, Sample, Score, TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifyConfig(TrainConfig):
    """Settings of the classification task.

    Attributes:
        unlabelled: Where data have a label a step, and each run of one label is taken for a sequence: the label of
            steps that have none; None takes all.
    """

    epochs: Count = 12
    hidden_size: Count = 64
    learning_rate: Positive = 5e-3
    unlabelled: Annotated[int, Field(ge=0, lt=2**31)] | None = 0


@final
class ClassifyModel(nn.Module):
    """A bidirectional LSTM, averaged over the real steps of each sequence, and a linear layer."""

    def __init__(self, standardise: Standardise, *, num_features: int, num_classes: int, config: TrainConfig) -> None:
        super().__init__()
        self.standardise = standardise
        self.lstm = BidirectionalLSTM(
            num_features,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            dropout=config.dropout,
            backend=config.backend,
        )
        self.classify = nn.Linear(2 * config.hidden_size, num_classes)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores of the classes (B, C)."""
        mask_BT = batch.mask
        hidden_BTH = self.lstm(self.standardise(batch.features_BTF, mask_BT), batch.lengths)
        real_BTH = hidden_BTH.masked_fill(~mask_BT[..., None], 0.0)
        mean_BH = real_BTH.sum(dim=1) / batch.lengths.to(real_BTH)[:, None]
        scores_BC: torch.Tensor = self.classify(mean_BH)
        return scores_BC


@final
class Classify(AbstractTask[ClassifyConfig]):
    """Sequences with one label each, measured in accuracy."""

    name = "classify"
    metric = "accuracy"

    def __init__(self, config: ClassifyConfig, data: SequenceSet) -> None:
        if isinstance(data.targets, StepLabels):
            data = cut_runs(data, unlabelled=config.unlabelled)
        super().__init__(config, data)
        if not isinstance(data.targets, Labels):
            raise StrettoError(
                f"{data.name} has no labels",
                fix="Give one label a sequence, or one a step, as `y`, or use another task.",
            )
        self._names = data.targets.names

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        """There is none: a label set is always the user's own."""
        raise StrettoError("classify has no embedded data", fix="Name a labelled set with --data PATH.")

    def build_model(self) -> ClassifyModel:
        """A fresh model."""
        return ClassifyModel(
            Standardise.of(self.data.part("train")),
            num_features=self.data.num_features,
            num_classes=len(self._names),
            config=self.config,
        )

    def loss(self, output: torch.Tensor, batch: Batch) -> LossSum:
        """Cross-entropy, counted in sequences."""
        return LossSum(total=functional.cross_entropy(output, batch.targets, reduction="sum"), count=len(batch))

    def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """Share of sequences whose best class is the right one."""
        right = int((output.argmax(dim=1) == batch.targets).sum())
        return {self.metric: Score(amount=right, count=len(batch))}

    def samples(self, output: torch.Tensor, batch: Batch) -> list[Sample]:
        """True and recognised classes."""
        pairs = zip(batch.targets.tolist(), output.argmax(dim=1).tolist(), strict=True)
        return [Sample(target=self._names[y], output=self._names[found]) for y, found in pairs]
