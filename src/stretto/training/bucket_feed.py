"""Batches of whole sequences, from buckets of similar length."""

from collections.abc import Iterator
from typing import Any, Final, final

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from stretto.batching import Batch, BucketSampler, SamplerReport, bucket_of, collate
from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.training.config import TrainConfig
from stretto.training.feed import AbstractFeed, Resumed

EVALUATION_ROWS: Final = 64


@final
class BucketFeed(AbstractFeed):
    """Every batch from one length bucket, in a new order each epoch.

    Args:
        part: The training sequences.
        config: Cap, buckets and seed.
        batch_size: Most sequences in a batch of one worker.
        world: The workers that share the sequences.

    Attributes:
        sampler: Deals them.
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
        """The training sequences."""
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
        """The share of the sequences that the plan of the epoch has."""
        return len(self.sampler.plan.unused(0)) / max(1, len(self._part))

    @property
    def whole_epoch(self) -> int:
        """Batches of an epoch that is dealt from its beginning."""
        return self.sampler.whole_epoch

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
        """Be at the beginning of an epoch, or where the one under way was left."""
        self.sampler.set_epoch(epoch)

    def resize(self, batch_size: int, *, used: int = 0) -> None:
        """Deal what is left of the epoch, and later ones, in batches of another size."""
        self.sampler.resize(batch_size, used=used)
        self.batch_size = batch_size

    def report(self) -> SamplerReport:
        """Batches, shapes and padding of the epoch."""
        return self.sampler.report()

    def example(self, batch_size: int, length: int) -> Batch:
        """Sequences of the bucket that this length belongs to, again and again if it has too few."""
        bucket_N = bucket_of(self._part.lengths_N, self.sampler.edges)
        bucket = min(int(np.searchsorted(self.sampler.edges, length)), int(bucket_N.max()))
        members_M = np.flatnonzero(bucket_N == bucket)
        chosen_B = np.resize(members_M if len(members_M) else np.arange(len(self._part)), batch_size)
        return collate([self._part[int(index)] for index in chosen_B])

    def state_dict(self, *, epoch: int, used: int) -> dict[str, Any]:
        """The position, and the size of the batches."""
        return self.sampler.state_dict(epoch=epoch, used=used)

    def load_state_dict(self, state: dict[str, Any]) -> Resumed:
        """Continue where `state` was taken; with other workers, what is left is dealt anew."""
        self.sampler.load_state_dict(state)
        self.batch_size = self.sampler.batch_size or self.batch_size
        return Resumed(is_dealt_anew=state["used"][-1][0] != self._world.size)


def refuse_too_long(data: SequenceSet, *, max_padded_steps: int | None) -> None:
    """The cap holds for training and measuring alike, and the message has the sequence's number in the file."""
    longest = int(data.lengths_N.argmax())
    if max_padded_steps is not None and data.lengths_N[longest] > max_padded_steps:
        raise StrettoError(
            f"{data.name}: sequence {data.numbers_N[longest]} has {data.lengths_N[longest]} steps, "
            f"more than max_padded_steps={max_padded_steps}",
            fix="Raise --max-padded-steps to at least that, or shorten or remove the sequence.",
        )


def eval_batches(part: SequenceSet, *, max_padded_steps: int | None, device: str, world: World) -> Iterator[Batch]:
    """Every sequence to be measured on, once, shared out to workers.

    Args:
        part: The sequences.
        max_padded_steps: Most slots of a batch.
        device: Where batches are to be.
        world: The workers; one for which nothing is left gets empty batches.
    """
    sampler = BucketSampler(
        part.lengths_N,
        batch_size=EVALUATION_ROWS,
        max_padded_steps=max_padded_steps,
        shuffle=False,
        rank=world.rank,
        world_size=world.size,
    )
    # A generator of its own: a loader draws a seed, and measuring must not move the random state of training.
    for batch in DataLoader(part, batch_sampler=sampler, collate_fn=collate, generator=torch.Generator()):
        yield batch.to(device)
