"""Where the batches of an epoch come from."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, final

from torch import nn

from stretto.batching import Batch
from stretto.training.checkpoint import Checkpoint


class FeedReport(Protocol):
    """What the record has of an epoch's batches: a dataclass with at least these."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def batches(self) -> int:
        """Batches of each worker, the same number for all."""

    @property
    def padding(self) -> float:
        """Share of slots that is padding."""

    @property
    def num_buckets(self) -> int:
        """Kinds of batches by length."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """How a feed goes on from a position that was saved.

    Attributes:
        is_dealt_anew: Whether what was left of the epoch was dealt to other workers, so that its batches are others.
        told: What the user should know about it; usually nothing.
    """

    is_dealt_anew: bool
    told: str = ""


class AbstractFeed(abc.ABC):
    """Deals the training data to one of the workers, epoch after epoch, everything once an epoch.

    All workers have equally many batches. The position in an epoch is a number of batches, which the trainer counts:
    a feed may draw ahead.

    Attributes:
        carries: Whether a batch goes on where the one before ended, so that the model carries a state between them.
        batch_size: Most sequences, or streams, in a batch of one worker, in the epoch under way.
    """

    carries: ClassVar[bool] = False
    batch_size: int

    @property
    @abc.abstractmethod
    def num_sequences(self) -> int:
        """The largest number, over all workers, that a batch size can sensibly count up to."""

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
        """The share of the epoch that was left when its batches were dealt, less than 1 if they were dealt anew."""

    @property
    @abc.abstractmethod
    def whole_epoch(self) -> int:
        """Batches of an epoch that is dealt from its beginning."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Batches of the epoch under way, used ones included, since they were dealt."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """What is left of the epoch under way."""

    @abc.abstractmethod
    def begin_epoch(self, epoch: int, model: nn.Module) -> None:
        """Be at the beginning of an epoch, or, if it is the one under way, where it was left.

        Args:
            epoch: Counted from 0.
            model: What the batches go to; one that carries a state is told if it has to start afresh.
        """

    @abc.abstractmethod
    def resize(self, batch_size: int, *, used: int = 0) -> None:
        """Go on with batches of another size: what is left of the epoch is dealt anew, and later epochs have it too.

        Args:
            batch_size: Most sequences, or streams, in a batch of one worker.
            used: The batches of the epoch that training has used, since they were dealt.
        """

    @abc.abstractmethod
    def report(self) -> FeedReport:
        """The batches of the epoch under way in numbers."""

    @abc.abstractmethod
    def example(self, batch_size: int, length: int) -> Batch:
        """A batch of training data of this size and about this length, to be timed; the position stays as it is."""

    @abc.abstractmethod
    def state_dict(self, *, epoch: int, used: int) -> dict[str, Any]:
        """The position as JSON-ready values.

        Args:
            epoch: The epoch under way.
            used: The batches of it that training has used.
        """

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> Resumed:
        """Continue where `state` was taken; what is left of an epoch is dealt anew if the workers are others."""

    def carried(self, model: nn.Module) -> Checkpoint:  # noqa: ARG002 - of one that carries nothing
        """What a model carries into the next batch, over all workers, all of which must ask."""
        return Checkpoint(tensors={}, state={})

    def load_carried(self, checkpoint: Checkpoint, model: nn.Module) -> None:  # noqa: B027
        """Give the model what it carried, if the batches still are those that follow."""
