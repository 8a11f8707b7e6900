"""Where the batches of an epoch come from: buckets of similar length, unless a task says otherwise.

Shape legend: N sequences, K buckets, M sequences of a bucket, B sequences of a batch.
"""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Final, Protocol, final

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from stretto.batching import Batch, BucketSampler, SamplerReport, bucket_of, collate
from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.training.checkpoint import Checkpoint
from stretto.training.config import TrainConfig

EVAL_BATCH_SIZE: Final = 64


class FeedReport(Protocol):
    """What the record has of an epoch's batches: a dataclass with at least these."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def batches(self) -> int:
        """Batches of each rank, the same number for all."""

    @property
    def padding(self) -> float:
        """Share of slots that is padding."""

    @property
    def num_buckets(self) -> int:
        """Kinds of batches by length."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """How a feed continues from a saved position.

    Attributes:
        is_replanned: Whether the rest of the epoch comes in other batches, because the number of ranks changed.
        message: What the user should know about it; usually nothing.
    """

    is_replanned: bool
    message: str = ""


class AbstractFeed(abc.ABC):
    """Gives one rank its batches, epoch after epoch, each sequence once per epoch.

    All ranks have equally many batches. The position within an epoch is a number of batches, which the trainer counts:
    a feed may read ahead.

    Attributes:
        carries: Whether a batch continues where the one before ended, so that the model carries a state between them.
        batch_size: Most sequences, or streams, in a batch of one rank, in the current epoch.
    """

    carries: ClassVar[bool] = False
    batch_size: int

    @property
    @abc.abstractmethod
    def num_sequences(self) -> int:
        """The largest batch size over all ranks that makes sense."""

    @property
    @abc.abstractmethod
    def edges(self) -> list[int]:
        """The lengths that batches come in: the upper bounds of their buckets."""

    @property
    @abc.abstractmethod
    def shares(self) -> dict[int, float]:
        """The share of the sequences, or streams, that comes in batches of each length."""

    @property
    @abc.abstractmethod
    def is_bucketed(self) -> bool:
        """Whether batches come from several buckets, so that some have far more elements than others."""

    @property
    @abc.abstractmethod
    def left(self) -> float:
        """The share of the epoch that the current plan covers: less than 1 if it was re-planned on the way."""

    @property
    @abc.abstractmethod
    def whole_epoch(self) -> int:
        """Batches of an epoch that is planned from its beginning."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Batches of the current plan, finished ones included."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """The batches of the current plan that are not done."""

    @abc.abstractmethod
    def begin_epoch(self, epoch: int, model: nn.Module) -> None:
        """Go to the beginning of an epoch, or, if it is the current one, to the first batch that is not done.

        Args:
            epoch: Counted from 0.
            model: What the batches go to; one that carries a state is reset where streams begin.
        """

    @abc.abstractmethod
    def resize(self, batch_size: int, *, batches_done: int = 0) -> None:
        """Continue with batches of another size: the rest of the epoch is re-planned, and later epochs follow.

        Args:
            batch_size: Most sequences, or streams, in a batch of one rank.
            batches_done: Batches of the current plan that are done.
        """

    @abc.abstractmethod
    def report(self) -> FeedReport:
        """The batches of the current epoch in numbers."""

    @abc.abstractmethod
    def example(self, batch_size: int, length: int) -> Batch:
        """A batch of training data of this size and about this length, to be timed; the position does not change."""

    @abc.abstractmethod
    def state_dict(self, *, epoch: int, batches_done: int) -> dict[str, Any]:
        """The position as JSON-ready values.

        Args:
            epoch: The current epoch.
            batches_done: Batches of the current plan that are done.
        """

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> Resumed:
        """Continue at a saved position; with another number of ranks the rest of the epoch is re-planned."""

    def carried(self, model: nn.Module) -> Checkpoint:  # noqa: ARG002 - nothing is carried
        """The state that a model carries into the next batch, over all ranks, each of which must call."""
        return Checkpoint(tensors={}, state={})

    def load_carried(self, checkpoint: Checkpoint, model: nn.Module) -> None:  # noqa: B027
        """Give the model the state it carried, if the batches still are those that follow."""


@final
class BucketFeed(AbstractFeed):
    """Every batch from one length bucket, in a new order each epoch.

    Args:
        part: The training sequences.
        config: Cap, buckets and seed.
        batch_size: Most sequences in a batch of one rank.
        world: The ranks that share the sequences.

    Attributes:
        sampler: Plans the batches.
    """

    def __init__(self, part: SequenceSet, *, config: TrainConfig, batch_size: int, world: World) -> None:
        self._part, self._world, self.batch_size = part, world, batch_size
        self.sampler = BucketSampler(
            part.lengths_N,
            batch_size=batch_size,
            max_padded_steps=config.max_padded_steps,
            num_buckets=config.num_buckets,
            seed=config.seed,
            rank=world.rank,
            world_size=world.size,
        )

    @property
    def num_sequences(self) -> int:
        """The number of training sequences."""
        return len(self._part)

    @property
    def edges(self) -> list[int]:
        """The bucket edges."""
        return [int(edge) for edge in self.sampler.edges]

    @property
    def shares(self) -> dict[int, float]:
        """The share of the sequences in each bucket, by its edge."""
        counts_K = np.bincount(bucket_of(self._part.lengths_N, self.sampler.edges), minlength=len(self.edges))
        return {
            edge: count / len(self._part) for edge, count in zip(self.edges, counts_K.tolist(), strict=True) if count
        }

    @property
    def is_bucketed(self) -> bool:
        """Whether there is more than one bucket."""
        return len(self.edges) > 1

    @property
    def left(self) -> float:
        """The share of the sequences in the current plan."""
        return len(self.sampler.plan.unused(0)) / max(1, len(self._part))

    @property
    def whole_epoch(self) -> int:
        """Batches of an epoch that is planned from its beginning."""
        return self.sampler.batches_per_epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        loader: DataLoader[Batch] = DataLoader(
            self._part,  # type: ignore[arg-type]
            batch_sampler=self.sampler,
            collate_fn=collate,
            # A loader draws a seed when it begins; from the common generator, a resumed epoch would draw once more.
            generator=torch.Generator(),
        )
        yield from loader

    def begin_epoch(self, epoch: int, model: nn.Module) -> None:  # noqa: ARG002 - nothing is carried
        """Go to the beginning of an epoch, or to the first batch of the current one that is not done."""
        self.sampler.set_epoch(epoch)

    def resize(self, batch_size: int, *, batches_done: int = 0) -> None:
        """Re-plan the rest of the epoch, and plan later ones, with batches of another size."""
        self.sampler.resize(batch_size, batches_done=batches_done)
        self.batch_size = batch_size

    def report(self) -> SamplerReport:
        """Batches, shapes and padding of the epoch."""
        return self.sampler.report()

    def example(self, batch_size: int, length: int) -> Batch:
        """Sequences of the bucket that this length belongs to, repeated if it has too few."""
        bucket_N = bucket_of(self._part.lengths_N, self.sampler.edges)
        bucket = min(int(np.searchsorted(self.sampler.edges, length)), int(bucket_N.max()))
        members_M = np.flatnonzero(bucket_N == bucket)
        chosen_B = np.resize(members_M if len(members_M) else np.arange(len(self._part)), batch_size)
        return collate([self._part[int(index)] for index in chosen_B])

    def state_dict(self, *, epoch: int, batches_done: int) -> dict[str, Any]:
        """The position, and the size of the batches."""
        return self.sampler.state_dict(epoch=epoch, batches_done=batches_done)

    def load_state_dict(self, state: dict[str, Any]) -> Resumed:
        """Continue at a saved position; with another number of ranks the rest of the epoch is re-planned."""
        self.sampler.load_state_dict(state)
        self.batch_size = self.sampler.batch_size or self.batch_size
        return Resumed(is_replanned=state["used"][-1][0] != self._world.size)


def check_max_length(data: SequenceSet, *, max_padded_steps: int | None) -> None:
    """Refuse a sequence longer than the cap, in training and evaluation alike, by its number in the file."""
    longest = int(data.lengths_N.argmax())
    if max_padded_steps is not None and data.lengths_N[longest] > max_padded_steps:
        raise StrettoError(
            f"{data.name}: sequence {data.numbers_N[longest]} has {data.lengths_N[longest]} steps, "
            f"more than max_padded_steps={max_padded_steps}",
            fix="Raise --max-padded-steps to at least that, or shorten or remove the sequence.",
        )


def eval_batches(part: SequenceSet, *, max_padded_steps: int | None, device: str, world: World) -> Iterator[Batch]:
    """The batches of an evaluation: every sequence once, divided among the ranks.

    Args:
        part: The sequences.
        max_padded_steps: Most slots of a batch.
        device: Where the batches are wanted.
        world: The ranks; one for which no sequence is left gets empty batches.
    """
    sampler = BucketSampler(
        part.lengths_N,
        batch_size=EVAL_BATCH_SIZE,
        max_padded_steps=max_padded_steps,
        shuffle=False,
        rank=world.rank,
        world_size=world.size,
    )
    # With a generator of its own: a loader draws a seed, and evaluation must not change the random state of training.
    for batch in DataLoader(part, batch_sampler=sampler, collate_fn=collate, generator=torch.Generator()):
        yield batch.to(device)
