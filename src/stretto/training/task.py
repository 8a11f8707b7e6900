"""What a task is: data with its model, loss and metric."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Generic, TypeVar

import torch
from torch import nn

from stretto.batching import Batch
from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.training.config import TrainConfig
from stretto.training.feeds import AbstractFeed, BucketFeed, check_max_length, eval_batches

C = TypeVar("C", bound=TrainConfig)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossSum:
    """The loss of a batch, summed, and the number of elements (labels, sequences or steps) it is a sum over.

    Sums add up: a padded batch has the loss and gradients of its sequences one by one, and several batches make one.
    """

    total: torch.Tensor
    count: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A metric as a ratio of sums, so that batches add up."""

    amount: float
    count: float

    def __add__(self, other: "Score") -> "Score":
        return Score(amount=self.amount + other.amount, count=self.count + other.count)

    @property
    def ratio(self) -> float:
        """The metric."""
        return self.amount / max(1.0, self.count)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LabelTrack:
    """Labels along a sequence, at evenly spaced steps, as runs of [label, steps]; -1 is no label."""

    names: list[str]
    target: list[list[int]]
    output: list[list[int]]
    right: float
    """Share of the labelled steps, all of them, for which the two agree."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One test sequence for the report: its target, what the model predicts, and its ink or labels, if any."""

    target: str
    output: str
    ink: list[list[float]] | None = None
    track: LabelTrack | None = None


class AbstractTask(abc.ABC, Generic[C]):
    """A kind of data with its model, loss and metric.

    A model is called with a `Batch` and returns one tensor, sequences first, which loss, score and samples take. The
    loss of some rows of it, with the same rows of the batch, is that of these sequences alone.

    Attributes:
        name: As on the command line.
        metric: The name of the score that is shown.
        Config: Its settings, a dataclass.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    Config: ClassVar[type[TrainConfig]]

    def __init__(self, config: C, data: SequenceSet) -> None:
        self.config = config
        self.data = data

    @classmethod
    @abc.abstractmethod
    def embedded_data(cls) -> SequenceSet:
        """The data when the user gives none."""

    @abc.abstractmethod
    def build_model(self) -> nn.Module:
        """A new model; its weights follow from torch's random state."""

    @abc.abstractmethod
    def loss(self, output: torch.Tensor, batch: Batch) -> LossSum:
        """The summed loss of a batch, given what the model made of it."""

    def num_elements(self, part: SequenceSet) -> int:
        """The sum of `LossSum.count` over all sequences of `part`; one per sequence unless a task overrides it.

        With length buckets every update is divided by the mean of this number per update. The trainer compares it with
        the counts of the first epoch and raises if they differ.
        """
        return len(part)

    @abc.abstractmethod
    def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """The metrics of a batch by name."""

    @abc.abstractmethod
    def samples(self, output: torch.Tensor, batch: Batch) -> list[Sample]:
        """Targets and predictions of the sequences, for the report."""

    def feed(self, *, world: World) -> AbstractFeed:
        """Where the batches of training, which the ranks share, come from: length buckets unless overridden."""
        check_max_length(self.data, max_padded_steps=self.config.max_padded_steps)
        return BucketFeed(
            self.data.part("train"), config=self.config, batch_size=self.config.first_batch_size, world=world
        )

    def eval_batches(self, part: SequenceSet, *, world: World, device: str) -> Iterator[Batch]:
        """The batches of an evaluation: every sequence of `part` once, divided among the ranks."""
        return eval_batches(part, max_padded_steps=self.config.max_padded_steps, device=device, world=world)

    def final_score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """The metrics of a batch of the test part, for which more time may be spent."""
        return self.score(output, batch)

    def summary(self, scores: dict[str, Score]) -> dict[str, float]:
        """The metrics of a whole part from its added-up scores; `metric` must be among them."""
        return {name: score.ratio for name, score in scores.items()}
