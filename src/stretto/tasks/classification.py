"""What tasks with one label per sequence share: loss, accuracy and samples.

Shape legend: B sequences, C classes.
"""

from typing import ClassVar, TypeVar

import torch
from torch.nn import functional

from stretto.batching import Batch
from stretto.data import Labels, SequenceSet
from stretto.errors import StrettoError
from stretto.training import AbstractTask, LossSum, Sample, Score, TrainConfig

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
