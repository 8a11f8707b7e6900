"""What a task is: data with its model, loss and metric."""

import abc
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from typing_extensions import Self

from stretto.batching import Batch
from stretto.data import NoTargets, SequenceSet, open_sequences
from stretto.distributed import World
from stretto.errors import StrettoError
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
    """Labels along a sequence, at evenly spaced steps, as runs of [label, steps]; -1 means no label."""

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Confusion:
    """How often each class was taken for each other.

    Attributes:
        names: Of the classes.
        pairs: [true class, class found, how often], by number; pairs that did not occur are left out.
    """

    names: tuple[str, ...]
    pairs: tuple[tuple[int, int, int], ...]


class AbstractTask(abc.ABC, Generic[C]):
    """A kind of data with its model, loss and metric.

    A model is called with a `Batch` and returns one tensor, sequences first, which loss, score and samples take. The
    loss of some rows of it, with the same rows of the batch, is that of these sequences alone.

    After training, `restore` makes the task again without its data, `with_data` puts others in their place, and
    `predict` is called with batches of them.

    Attributes:
        name: As on the command line.
        metric: The name of the score that is shown.
        higher_is_better: Whether the best model has the highest score, or the lowest.
        Config: Its settings, a dataclass.
        class_names: Of a task with classes that has a method `classes`, for the confusion matrix; empty for others.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    higher_is_better: ClassVar[bool] = False
    Config: ClassVar[type[TrainConfig]] = TrainConfig
    class_names: tuple[str, ...] = ()

    def __init__(self, config: C, data: SequenceSet) -> None:
        self.config = config
        self.data = data

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        """The data when the user gives none; an error unless a task has some."""
        raise StrettoError(f"{cls.name} has no embedded data", fix="Name a set with --data PATH, or data= in Python.")

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

    def bucket_lengths(self, part: SequenceSet) -> npt.NDArray[np.int64]:
        """What buckets are cut by: the lengths (N,) of the sequences, or, of pairs, (N, 2) of both sides."""
        return part.lengths_N

    def count_steps(self, batch: Batch) -> tuple[int, int]:
        """The real and the padded steps of a batch, of both sides of pairs."""
        return batch.num_steps, batch.num_padded_steps

    def feed(self, *, world: World) -> AbstractFeed:
        """Where the batches of training, which the ranks share, come from: length buckets unless overridden."""
        config, train = self.config, self.data.part("train")
        check_max_length(self.data, max_padded_steps=config.max_padded_steps, lengths=self.bucket_lengths(self.data))
        return BucketFeed(
            train,
            config=config,
            batch_size=config.first_batch_size,
            world=world,
            lengths=self.bucket_lengths(train),
        )

    def eval_batches(self, part: SequenceSet, *, world: World, device: str) -> Iterator[Batch]:
        """The batches of an evaluation: every sequence of `part` once, divided among the ranks."""
        return eval_batches(
            part,
            max_padded_steps=self.config.max_padded_steps,
            device=device,
            world=world,
            lengths=self.bucket_lengths(part),
        )

    def classes(self, output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        """The true and the found class (P) of whatever has one, by their numbers in `class_names`."""
        raise StrettoError(f"the task {self.name!r} has no classes", fix="Leave class_names empty.")

    def final_score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """The metrics of a batch of the test part, for which more time may be spent."""
        return self.score(output, batch)

    def summary(self, scores: dict[str, Score]) -> dict[str, float]:
        """The metrics of a whole part from its added-up scores; `metric` must be among them."""
        return {name: score.ratio for name, score in scores.items()}

    def preprocessing(self) -> dict[str, Any]:
        """What `restore` needs beyond the settings and the form of the data, as JSON-ready values."""
        return {}

    @classmethod
    def restore(cls, config: Any, data: SequenceSet, preprocessing: dict[str, Any]) -> Self:  # noqa: ARG003
        """The task as it was trained, on a stand-in for its data: all zeros, with the same classes and characters."""
        return cls(config, data)

    def open(self, path: Path) -> SequenceSet:
        """Read new data, labelled or not."""
        return open_sequences(path)

    def from_texts(self, texts: Sequence[str]) -> SequenceSet:  # noqa: ARG002
        """New data from strings, for a task that reads text."""
        raise StrettoError(f"the task {self.name!r} does not read text", fix="Give arrays of shape (steps, features).")

    def with_data(self, data: SequenceSet, *, targets: bool = True) -> Self:
        """This task with other data, in terms of what it was trained on: its features, classes and characters.

        The targets must be such as the loss needs; without `targets`, as `predict` does, they are dropped.
        """
        if data.num_features != self.data.num_features:
            raise StrettoError(
                f"{data.name} has {data.num_features} features per step and the model was trained on "
                f"{self.data.num_features}",
                fix="Give data of the same features, in the same order.",
            )
        task = copy.copy(self)
        is_dropped = not targets and type(self).predict is not AbstractTask.predict
        task.data = dataclasses.replace(data, targets=NoTargets(count=len(data))) if is_dropped else data
        return task

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """What the model makes of each sequence, as JSON-ready values by name; the targets may be missing.

        Unless a task overrides it, the outputs of its samples, which need targets.
        """
        return [{"output": sample.output} for sample in self.samples(model(batch), batch)]
