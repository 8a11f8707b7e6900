"""Batch samplers behind one interface: ours, Lhotse's, Hugging Face's, and simpler rules.

Shape legend: N sequences, K buckets.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch

from bench.harness import why_missing
from stretto.batching import BucketSampler, optimal_edges
from stretto.errors import StrettoError
from stretto.extras import optional

Lengths = npt.NDArray[np.int64]
EdgeRule = Callable[[Lengths, int], Lengths]

OURS: Final = "stretto"


def equal_mass_edges(lengths_N: Lengths, num_buckets: int) -> Lengths:
    """Edges that give every bucket about the same number of steps: the rule of Lhotse and NeMo."""
    sorted_N, ranks_K = np.sort(lengths_N), np.arange(1, num_buckets + 1)
    steps_N = np.cumsum(sorted_N)
    return np.unique(sorted_N[np.searchsorted(steps_N * num_buckets, ranks_K * steps_N[-1])])


def percentile_edges(lengths_N: Lengths, num_buckets: int) -> Lengths:
    """Edges that give every bucket about the same number of sequences: the rule of fairseq."""
    ranks_K = np.arange(1, num_buckets + 1)
    return np.unique(np.sort(lengths_N)[-(-ranks_K * len(lengths_N) // num_buckets) - 1])


def uniform_edges(lengths_N: Lengths, num_buckets: int) -> Lengths:
    """Equidistant edges between the smallest and the largest length."""
    shortest, ranks_K = lengths_N.min(), np.arange(1, num_buckets + 1)
    return np.unique(shortest - (-ranks_K * (lengths_N.max() - shortest) // num_buckets))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Which batches to draw: those of one rank in one epoch, under a cap on padded steps."""

    max_padded_steps: int
    num_buckets: int
    seed: int
    epoch: int
    rank: int
    world_size: int


class Sampler(abc.ABC):
    """A way to make batches from lengths."""

    name: str
    note: str  # what a reader of its numbers should know
    modules: tuple[str, ...] = ()  # what must be importable
    has_buckets: bool = True  # whether the number of buckets matters to it

    def require(self) -> None:
        """Raise a `StrettoError` if its package cannot be used."""
        for module in self.modules:
            optional(module)

    def prepare(self, lengths_N: Lengths) -> None:  # noqa: B027 - most read the lengths themselves
        """Convert the lengths into what the sampler reads, before the clock starts."""

    def edges(self, lengths_N: Lengths, num_buckets: int) -> Lengths | None:  # noqa: ARG002
        """The edges to which its batches can be padded; None if it has none."""
        return None

    @abc.abstractmethod
    def batches(self, lengths_N: Lengths, draw: Draw) -> Iterator[list[int]]:
        """Batches as sequence numbers; an empty list if nothing is left for this rank."""


@final
class OurSampler(Sampler):
    """`stretto.BucketSampler` with the edges of a rule, or as many as it chooses; capped, or of a fixed size."""

    def __init__(self, name: str, note: str, *, rule: EdgeRule | None, fixed_size: bool = False) -> None:
        self.name, self.note = name, note
        self.has_buckets = rule is not None
        self._rule, self._fixed_size = rule, fixed_size

    def edges(self, lengths_N: Lengths, num_buckets: int) -> Lengths | None:
        """The edges by the rule."""
        return None if self._rule is None else self._rule(lengths_N, num_buckets)

    def batches(self, lengths_N: Lengths, draw: Draw) -> Iterator[list[int]]:
        """The batches of one rank in one epoch."""
        options: dict[str, Any] = {"seed": draw.seed, "rank": draw.rank, "world_size": draw.world_size}
        if self._fixed_size:
            options["batch_size"] = fixed_batch_size(lengths_N, draw.max_padded_steps)
        else:
            options["max_padded_steps"] = draw.max_padded_steps
        if self._rule is optimal_edges:
            options["num_buckets"] = draw.num_buckets
        elif self._rule is not None:
            options["edges"] = self._rule(lengths_N, draw.num_buckets)
        sampler = BucketSampler(lengths_N, **options)
        sampler.set_epoch(draw.epoch)
        yield from sampler


@final
class LhotseSampler(Sampler):
    """Lhotse's `DynamicBucketingSampler`: one second of audio stands for one step."""

    name = "lhotse"
    note = "DynamicBucketingSampler with its defaults; every rank draws the batches of all ranks"
    modules = ("lhotse", "lhotse.dataset")

    def __init__(self) -> None:
        self._lengths_N: Lengths | None = None
        self._cuts: Any = None

    def prepare(self, lengths_N: Lengths) -> None:
        """Wrap the lengths as cuts, once for all draws."""
        if lengths_N is self._lengths_N:
            return
        lhotse = optional("lhotse")
        cuts = [
            lhotse.MonoCut(id=str(number), start=0, duration=float(length), channel=0)
            for number, length in enumerate(lengths_N)
        ]
        self._cuts, self._lengths_N = lhotse.CutSet(_Stream(cuts)), lengths_N

    def batches(self, lengths_N: Lengths, draw: Draw) -> Iterator[list[int]]:
        """The batches of one rank in one epoch; a cut that appears twice has its number twice."""
        self.prepare(lengths_N)
        sampler = optional("lhotse.dataset").DynamicBucketingSampler(
            self._cuts,
            max_duration=float(draw.max_padded_steps),
            num_buckets=draw.num_buckets,
            shuffle=True,
            seed=draw.seed,
            rank=draw.rank,
            world_size=draw.world_size,
            drop_last=False,
        )
        sampler.set_epoch(draw.epoch)
        for cuts in sampler:
            yield [int(cut.id.partition("_")[0]) for cut in cuts]


@final
class _Stream:
    """Cuts behind an iterator, as when they are read from a file; Lhotse advises against its sampler on a list."""

    def __init__(self, cuts: Iterable[Any]) -> None:
        self._cuts = cuts

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cuts)


@final
class LengthGroupedSampler(Sampler):
    """The length-grouped sampler of the Hugging Face Trainer, split over ranks as Accelerate splits batches."""

    name = "transformers"
    note = "LengthGroupedSampler; batches of max_padded_steps / mean length; repeats fill up the last round"
    modules = ("transformers.trainer_pt_utils",)
    has_buckets = False

    def __init__(self) -> None:
        self._lengths_N: Lengths | None = None
        self._list: list[int] = []

    def require(self) -> None:
        """Raise a `StrettoError` if Transformers or its sampler cannot be imported."""
        super().require()
        if not hasattr(optional(self.modules[0]), "LengthGroupedSampler"):
            raise StrettoError(
                "the installed 'transformers' has no LengthGroupedSampler",
                fix="Install one that has it with: pip install 'stretto[peers]'.",
            )

    def prepare(self, lengths_N: Lengths) -> None:
        """Make the list of lengths that the sampler takes, once for all draws."""
        if lengths_N is not self._lengths_N:
            self._list, self._lengths_N = lengths_N.tolist(), lengths_N

    def batches(self, lengths_N: Lengths, draw: Draw) -> Iterator[list[int]]:
        """The batches of one rank in one epoch."""
        self.prepare(lengths_N)
        batch_size = fixed_batch_size(lengths_N, draw.max_padded_steps)
        generator = torch.Generator().manual_seed(draw.seed + draw.epoch)
        sampler = optional(self.modules[0]).LengthGroupedSampler(batch_size, lengths=self._list, generator=generator)
        yield from _round_robin(list(sampler), batch_size=batch_size, rank=draw.rank, world_size=draw.world_size)


@final
class ShuffledSampler(Sampler):
    """Shuffled sequences cut into batches of a fixed size, whatever their lengths."""

    name = "shuffled"
    note = "batches of max_padded_steps / mean length; repeats fill up the last round"
    has_buckets = False

    def batches(self, lengths_N: Lengths, draw: Draw) -> Iterator[list[int]]:
        """The batches of one rank in one epoch."""
        generator = torch.Generator().manual_seed(draw.seed + draw.epoch)
        order = torch.randperm(len(lengths_N), generator=generator).tolist()
        batch_size = fixed_batch_size(lengths_N, draw.max_padded_steps)
        yield from _round_robin(order, batch_size=batch_size, rank=draw.rank, world_size=draw.world_size)


def all_samplers() -> tuple[Sampler, ...]:
    """All samplers, ours first."""
    same = "BucketSampler with these edges instead of its own"
    auto = "BucketSampler with num_buckets='auto'"
    return (
        OurSampler(OURS, "BucketSampler as it comes: optimal edges, the same bucket on all ranks", rule=optimal_edges),
        OurSampler(f"{OURS} auto", f"{auto}; batches under the cap", rule=None),
        OurSampler(f"{OURS} rows", f"{auto}; batches of max_padded_steps / mean length", rule=None, fixed_size=True),
        LhotseSampler(),
        LengthGroupedSampler(),
        OurSampler("equal mass", same, rule=equal_mass_edges),
        OurSampler("percentile", same, rule=percentile_edges),
        OurSampler("uniform", same, rule=uniform_edges),
        ShuffledSampler(),
    )


def available_samplers() -> tuple[list[Sampler], dict[str, str]]:
    """The samplers whose packages work, and the reason for each of the others."""
    reasons = {sampler: why_missing(sampler.require) for sampler in all_samplers()}
    missing = {sampler.name: reason for sampler, reason in reasons.items() if reason is not None}
    return [sampler for sampler, reason in reasons.items() if reason is None], missing


def fixed_batch_size(lengths_N: Lengths, max_padded_steps: int) -> int:
    """The number of average sequences under the cap."""
    return max(1, int(max_padded_steps // lengths_N.mean()))


def _round_robin(order: list[int], *, batch_size: int, rank: int, world_size: int) -> Iterator[list[int]]:
    """Consecutive batches to consecutive ranks; the order begins again until the last round is full."""
    per_round = batch_size * world_size
    num_rounds = -(-len(order) // per_round)
    filled = order + [order[number % len(order)] for number in range(num_rounds * per_round - len(order))]
    for begin in range(rank * batch_size, len(filled), per_round):
        yield filled[begin : begin + batch_size]
