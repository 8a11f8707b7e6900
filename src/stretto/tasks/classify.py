"""Classification: one label per sequence. `Classification` is what all such tasks share: loss, accuracy and samples.

Shape legend: B sequences, T steps, F features, H hidden units, C classes.
"""

import dataclasses
from typing import Annotated, ClassVar, TypeVar, final

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from stretto.batching import Batch
from stretto.data import Labels, SequenceSet, StepLabels, cut_runs
from stretto.errors import StrettoError
from stretto.nn import Standardise, run_ragged
from stretto.tasks.recurrent import make_lstm, mean_over_steps
from stretto.training import AbstractTask, Count, LossSum, Positive, Sample, Score, TrainConfig

C = TypeVar("C", bound=TrainConfig)


class Classification(AbstractTask[C]):
    """Sequences with one label each, measured in accuracy. The model returns scores (B, C).

    Attributes:
        label_hint: What to do about data without labels.
        class_names: The labels' names, in the order of the scores.
    """

    metric = "accuracy"
    label_hint: ClassVar[str]

    def __init__(self, config: C, data: SequenceSet) -> None:
        super().__init__(config, data)
        if not isinstance(data.targets, Labels):
            raise StrettoError(f"{data.name} has no labels", fix=self.label_hint)
        self.class_names = data.targets.names

    def loss(self, output: torch.Tensor, batch: Batch) -> LossSum:
        """Cross-entropy, counted in sequences."""
        return LossSum(total=functional.cross_entropy(output, batch.targets, reduction="sum"), count=len(batch))

    def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """The fraction of sequences whose best class is the right one."""
        right = int((output.argmax(dim=1) == batch.targets).sum())
        return {self.metric: Score(amount=right, count=len(batch))}

    def samples(self, output: torch.Tensor, batch: Batch) -> list[Sample]:
        """True and predicted classes."""
        pairs = zip(batch.targets.tolist(), output.argmax(dim=1).tolist(), strict=True)
        return [Sample(target=self.class_names[y], output=self.class_names[found]) for y, found in pairs]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifyConfig(TrainConfig):
    """Settings of the classification task.

    Attributes:
        unlabelled: Where data have a label per step, and each run of one label becomes a sequence: the label of steps
            that have none; None takes all.
    """

    epochs: Count = 12
    hidden_size: Count = 64
    learning_rate: Positive = 5e-3
    unlabelled: Annotated[int, Field(ge=0, lt=2**31)] | None = 0


@final
class ClassifyModel(nn.Module):
    """A bidirectional LSTM, averaged over the real steps of each sequence, and a linear layer."""

    def __init__(self, data: SequenceSet, *, num_classes: int, config: TrainConfig) -> None:
        super().__init__()
        self.standardise = Standardise.of(data.part("train"))
        self.lstm = make_lstm(data.num_features, config.hidden_size, bidirectional=True, config=config)
        self.dropout = nn.Dropout(config.dropout)
        self.classify = nn.Linear(2 * config.hidden_size, num_classes)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores of the classes (B, C)."""
        x_BTF = self.standardise(batch.features_BTF, batch.mask)
        hidden_BTH = self.dropout(run_ragged(self.lstm, x_BTF, batch.lengths))
        scores_BC: torch.Tensor = self.classify(mean_over_steps(hidden_BTH, batch))
        return scores_BC


@final
class Classify(Classification[ClassifyConfig]):
    """Sequences with one label each, measured in accuracy."""

    name = "classify"
    Config = ClassifyConfig
    label_hint: ClassVar[str] = "Give one label per sequence, or one per step, as `y`, or use another task."

    def __init__(self, config: ClassifyConfig, data: SequenceSet) -> None:
        if isinstance(data.targets, StepLabels):
            data = cut_runs(data, unlabelled=config.unlabelled)
        super().__init__(config, data)

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        """There is none: a label set is always the user's own."""
        raise StrettoError("classify has no embedded data", fix="Name a labelled set with --data PATH.")

    def build_model(self) -> ClassifyModel:
        """A new model."""
        return ClassifyModel(self.data, num_classes=len(self.class_names), config=self.config)
