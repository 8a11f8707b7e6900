"""Classification: one label per sequence. `Classification` is what all such tasks share: loss, accuracy and samples.

Shape legend: B sequences, T steps, F features, H hidden units, C classes, P labels.
"""

import dataclasses
from collections.abc import Callable
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
        Model: Called with the data, `num_classes` and `config`, unless a task has a `build_model` of its own.
        label_hint: What to do about data without labels.
        class_names: The labels' names, in the order of the scores.
    """

    metric = "accuracy"
    Model: ClassVar[Callable[..., nn.Module]]
    label_hint: ClassVar[str]
    target_type: ClassVar[type[Labels] | type[StepLabels]] = Labels

    def __init__(self, config: C, data: SequenceSet) -> None:
        super().__init__(config, data)
        if not isinstance(data.targets, self.target_type):
            kind = "labels" if self.target_type is Labels else "labels of steps"
            raise StrettoError(f"{data.name} has no {kind}", fix=self.label_hint)
        self.class_names = data.targets.names

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        """There is none, unless a task has some: labels are the user's own."""
        raise StrettoError(f"{cls.name} has no embedded data", fix=f"Name a set with --data PATH. {cls.label_hint}")

    def build_model(self) -> nn.Module:
        """A new model."""
        return type(self).Model(self.data, num_classes=len(self.class_names), config=self.config)

    def _labelled(self, output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores (P, C) and classes (P) of what has a label."""
        return output, batch.targets

    def loss(self, output: torch.Tensor, batch: Batch) -> LossSum:
        """Cross-entropy, counted in labels."""
        scores_PC, classes_P = self._labelled(output, batch)
        return LossSum(total=functional.cross_entropy(scores_PC, classes_P, reduction="sum"), count=len(classes_P))

    def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """The fraction of labels for which the best class is the right one."""
        scores_PC, classes_P = self._labelled(output, batch)
        return {self.metric: Score(amount=int((scores_PC.argmax(dim=1) == classes_P).sum()), count=len(classes_P))}

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
    Model = ClassifyModel
    label_hint: ClassVar[str] = "Give one label per sequence, or one per step, as `y`, or use another task."

    def __init__(self, config: ClassifyConfig, data: SequenceSet) -> None:
        if isinstance(data.targets, StepLabels):
            data = cut_runs(data, unlabelled=config.unlabelled)
        super().__init__(config, data)
