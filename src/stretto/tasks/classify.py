"""Classification: one label per sequence. `Classification` is what all such tasks share: loss, accuracy and samples.

Shape legend: B sequences, T steps, F features, H hidden units, C classes, P labels.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar, final

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional
from typing_extensions import Self

from stretto.batching import Batch
from stretto.data import NO_CLASS, Labels, SequenceSet, StepLabels, cut_runs
from stretto.errors import StrettoError, list_some
from stretto.nn import Dropout, Standardise
from stretto.tasks.recurrent import make_lstm, mean_over_steps, run_layers
from stretto.training import AbstractTask, Count, LossSum, Positive, Sample, Score, TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationConfig(TrainConfig):
    """What tasks with classes share.

    Attributes:
        class_weights: How much a label counts in the loss: none, all alike; balanced, in inverse proportion to how
            often its class occurs in training, one on average.
    """

    class_weights: Literal["none", "balanced"] = "none"


C = TypeVar("C", bound=ClassificationConfig)


class Classification(AbstractTask[C]):
    """Sequences with one label each, measured in accuracy. The model returns scores (B, C).

    Attributes:
        Model: Called with the data, `num_classes` and `config`, unless a task has a `build_model` of its own.
        label_hint: What to do about data without labels.
        class_names: The labels' names, in the order of the scores.
    """

    metric = "accuracy"
    higher_is_better = True
    Model: ClassVar[Callable[..., nn.Module]]
    label_hint: ClassVar[str]
    target_type: ClassVar[type[Labels] | type[StepLabels]] = Labels

    def __init__(self, config: C, data: SequenceSet) -> None:
        super().__init__(config, data)
        if not isinstance(data.targets, self.target_type):
            kind = "labels" if self.target_type is Labels else "labels of steps"
            raise StrettoError(f"{data.name} has no {kind}", fix=self.label_hint)
        self.class_names = data.targets.names
        self._weights_C: torch.Tensor | None = None
        if config.class_weights == "balanced":
            counts_C = self._count_classes(data.part("train"))
            weights = counts_C.sum() / (np.count_nonzero(counts_C) * np.maximum(counts_C, 1))
            self._weights_C = torch.tensor(weights, dtype=torch.float32)

    def _count_classes(self, part: SequenceSet) -> npt.NDArray[np.int64]:
        """Labels of each class."""
        assert isinstance(part.targets, Labels)
        return np.bincount(part.targets.values_N, minlength=len(self.class_names))

    def preprocessing(self) -> dict[str, Any]:
        """The weights of the classes in the loss."""
        return {} if self._weights_C is None else {"class_weights": self._weights_C.tolist()}

    @classmethod
    def restore(cls, config: C, data: SequenceSet, preprocessing: dict[str, Any]) -> Self:
        """The task with the weights of its classes."""
        task = cls(config, data)
        if "class_weights" in preprocessing:
            task._weights_C = torch.tensor(preprocessing["class_weights"])
        return task

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        """There is none, unless a task has some: labels are the user's own."""
        raise StrettoError(f"{cls.name} has no embedded data", fix=f"Name a set with --data PATH. {cls.label_hint}")

    def build_model(self) -> nn.Module:
        """A new model."""
        return type(self).Model(self.data, num_classes=len(self.class_names), config=self.config)

    def _select_labelled(self, output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores (P, C) and classes (P) of what has a label."""
        return output, batch.targets

    def loss(self, output: torch.Tensor, batch: Batch) -> LossSum:
        """Cross-entropy, counted in labels."""
        scores_PC, classes_P = self._select_labelled(output, batch)
        weights_C = None if self._weights_C is None else self._weights_C.to(scores_PC)
        total = functional.cross_entropy(scores_PC, classes_P, weight=weights_C, reduction="sum")
        return LossSum(total=total, count=len(classes_P))

    def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """The fraction of labels for which the best class is the right one."""
        scores_PC, classes_P = self._select_labelled(output, batch)
        return {self.metric: Score(amount=int((scores_PC.argmax(dim=1) == classes_P).sum()), count=len(classes_P))}

    def classes(self, output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The true class and the best one of whatever has a label."""
        scores_PC, classes_P = self._select_labelled(output, batch)
        return classes_P, scores_PC.argmax(dim=1)

    def samples(self, output: torch.Tensor, batch: Batch) -> list[Sample]:
        """True and predicted classes."""
        pairs = zip(batch.targets.tolist(), output.argmax(dim=1).tolist(), strict=True)
        return [Sample(target=self.class_names[y], output=self.class_names[found]) for y, found in pairs]

    def with_data(self, data: SequenceSet, *, targets: bool = True) -> Self:
        """Labels by their names, or by their numbers where the data have no names."""
        task = super().with_data(data, targets=targets)
        labels = task.data.targets
        if isinstance(labels, Labels):
            found_N = match_classes(labels, known=self.class_names, source=data.name)[labels.values_N]
            task.data = dataclasses.replace(data, targets=Labels(values_N=found_N, names=self.class_names))
        elif targets:
            raise StrettoError(f"{data.name} has no labels of sequences", fix=self.label_hint)
        return task

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """The most likely class, its probability, and those of all classes."""
        rows = model(batch).double().softmax(dim=1).tolist()
        found = [dict(zip(self.class_names, row, strict=True)) for row in rows]
        return [
            {"class": (best := max(row, key=row.__getitem__)), "probability": row[best], "probabilities": row}
            for row in found
        ]


def match_classes(targets: Labels | StepLabels, *, known: tuple[str, ...], source: str) -> npt.NDArray[np.int64]:
    """The number that each class of other data has among the known ones; `NO_CLASS` for one that does not occur.

    Classes are matched by name, or by number where the data only number them and the known ones have names.
    """
    is_numbered = targets.names == tuple(map(str, range(len(targets.names))))
    names = known if is_numbered and not set(targets.names) & set(known) else targets.names
    used = np.unique(targets.values_N if isinstance(targets, Labels) else targets.values_S).tolist()
    unknown = [targets.names[number] for number in used if number >= len(names) or names[number] not in known]
    if unknown:
        raise StrettoError(
            f"{source} has classes that the model was not trained on: {list_some([*map(repr, unknown)])}",
            fix=f"Leave these sequences out; it knows {len(known)}: {list_some(known)}.",
        )
    class_of = np.full(len(targets.names), NO_CLASS)
    class_of[used] = [known.index(names[number]) for number in used]
    return class_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifyConfig(ClassificationConfig):
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
        self.dropout = Dropout(config.dropout)
        self.classify = nn.Linear(2 * config.hidden_size, num_classes)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores of the classes (B, C)."""
        x_BTF = self.standardise(batch.features_BTF, batch.mask)
        hidden_BTH = self.dropout(run_layers(self.lstm, x_BTF, batch.lengths))
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

    def with_data(self, data: SequenceSet, *, targets: bool = True) -> Self:
        """Sequences with a label per step are cut into runs of one label, as in training."""
        if isinstance(data.targets, StepLabels):
            data = cut_runs(data, unlabelled=self.config.unlabelled)
        return super().with_data(data, targets=targets)
