"""The contestants of the bucketing benchmark: every sampler behind one interface.

Shape legend: N sequences, K buckets.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch

from stretto.batching import BucketSampler, equal_mass_edges, optimal_edges, percentile_edges, uniform_edges
from stretto.errors import StrettoError
from stretto.extras import optional

Lengths = npt.NDArray[np.int64]
EdgeRule = Callable[[Lengths, int], Lengths]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What a contestant is asked for.

    Attributes:
        max_padded_steps: Slots that a batch may have.
        num_buckets: Buckets, for those that have any.
        seed: Of all that is random.
        epoch: Which epoch.
        rank: Whose batches.
        world_size: How many ranks share the epoch.
    """

    max_padded_steps: int
    num_buckets: int
    seed: int
    epoch: int
    rank: int
    world_size: int


class AbstractContestant(abc.ABC):
    """A way to make batches from lengths.

    Attributes:
        name: Shown in tables.
        modules: What must be importable, by `stretto.extras.optional`; nothing for our own.
        has_buckets: Whether the number of buckets matters to it.
        note: What a reader of its numbers should know.
    """

    name: str
    modules: tuple[str, ...] = ()
    has_buckets: bool = True
    note: str = ""

    def require(self) -> None:
        """Raise `StrettoError` when the package cannot be used."""
        for module in self.modules:
            optional(module)

    def prepare(self, lengths_N: Lengths) -> None:  # noqa: B027 - most take the lengths as they are
        """Build what the sampler reads instead of lengths, outside the clock."""

    def edges(self, lengths_N: Lengths, num_buckets: int) -> Lengths | None:  # noqa: ARG002
        """The edges to which its batches can be padded; None when it has none."""
        return None

    @abc.abstractmethod
    def batches(self, lengths_N: Lengths, draw: Draw) -> Iterator[list[int]]:
        """The batches of one rank in one epoch, as sequence numbers; an empty list where nothing is left for it."""


@final
class OptimalContestant(AbstractContestant):
    """`stretto.BucketSampler` as it comes."""

    name = "stretto"
    note = "BucketSampler as it comes: optimal edges, the same bucket on all ranks"

    def edges(self, lengths_N: Lengths, num_buckets: int) -> Lengths:
        """The optimal edges."""
        return optimal_edges(lengths_N, num_buckets)

    def batches(self, lengths_N: Lengths, draw: Draw) -> Iterator[list[int]]:
        """The batches of one rank in one epoch."""
        sampler = BucketSampler(
            lengths_N,
            max_padded_steps=draw.max_padded_steps,
            num_buckets=draw.num_buckets,
            seed=draw.seed,
            rank=draw.rank,
            world_size=draw.world_size,
        )
        sampler.set_epoch(draw.epoch)
        yield from sampler


@final
class AutoContestant(AbstractContestant):
    """`stretto.BucketSampler` with as many buckets as it finds worth having.

    Args:
        fixed_size: Batches of a fixed number of sequences, as the peers without a budget make them.
    """

    has_buckets = False

    def __init__(self, *, fixed_size: bool) -> None:
        self._fixed_size = fixed_size
        self.name = f"{OptimalContestant.name} {'rows' if fixed_size else 'auto'}"
        size = "batches of max_padded_steps / mean length" if fixed_size else "batches under the budget"
        self.note = f"BucketSampler with num_buckets='auto'; {size}"

    def batches(self, lengths_N: Lengths, draw: Draw) -> Iterator[list[int]]:
        """The batches of one rank in one epoch."""
        sampler = BucketSampler(
            lengths_N,
            max_padded_steps=None if self._fixed_size else draw.max_padded_steps,
            batch_size=_fixed_batch_size(lengths_N, draw.max_padded_steps) if self._fixed_size else None,
            seed=draw.seed,
            rank=draw.rank,
            world_size=draw.world_size,
        )
        sampler.set_epoch(draw.epoch)
        yield from sampler


@final
class HeuristicContestant(AbstractContestant):
    """Our batch former with edges by another rule: what the edges alone are worth.

    Args:
        name: Shown in tables.
        rule: Gives the edges from lengths and number of buckets.
    """

    note = "BucketSampler with these edges instead of its own"

    def __init__(self, name: str, *, rule: EdgeRule) -> None:
        self.name = name
        self._rule = rule

    def edges(self, lengths_N: Lengths, num_buckets: int) -> Lengths:
        """The edges by the rule."""
        return self._rule(lengths_N, num_buckets)

    def batches(self, lengths_N: Lengths, draw: Draw) -> Iterator[list[int]]:
        """The batches of one rank in one epoch."""
        sampler = BucketSampler(
            lengths_N,
            max_padded_steps=draw.max_padded_steps,
            edges=self._rule(lengths_N, draw.num_buckets),
            seed=draw.seed,
            rank=draw.rank,
            world_size=draw.world_size,
        )
        sampler.set_epoch(draw.epoch)
        yield from sampler


@final
class LhotseContestant(AbstractContestant):
    """Lhotse's `DynamicBucketingSampler`: one second of audio stands for one step."""

    name = "lhotse"
    modules = ("lhotse", "lhotse.dataset")
    note = "DynamicBucketingSampler with its defaults; every rank draws the batches of all ranks"

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
        """The batches of one rank in one epoch; a cut that is dealt twice has its number twice."""
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
class LengthGroupedContestant(AbstractContestant):
    """The length-grouped sampler of the Hugging Face Trainer, dealt to ranks as Accelerate deals batches."""

    name = "transformers"
    modules = ("transformers.trainer_pt_utils",)
    has_buckets = False
    note = "LengthGroupedSampler; batches of max_padded_steps / mean length; repeats fill up the last round"

    def __init__(self) -> None:
        self._lengths_N: Lengths | None = None
        self._list: list[int] = []

    def require(self) -> None:
        """Raise `StrettoError` when Transformers or its sampler cannot be imported."""
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
        batch_size = _fixed_batch_size(lengths_N, draw.max_padded_steps)
        sampler = optional(self.modules[0]).LengthGroupedSampler(
            batch_size, lengths=self._list, generator=torch.Generator().manual_seed(draw.seed + draw.epoch)
        )
        yield from _round_robin(list(sampler), batch_size=batch_size, rank=draw.rank, world_size=draw.world_size)


@final
class ShuffledContestant(AbstractContestant):
    """Shuffled sequences cut into batches of a fixed size: no thought of length."""

    name = "shuffled"
    has_buckets = False
    note = "batches of max_padded_steps / mean length; repeats fill up the last round"

    def batches(self, lengths_N: Lengths, draw: Draw) -> Iterator[list[int]]:
        """The batches of one rank in one epoch."""
        order = torch.randperm(len(lengths_N), generator=torch.Generator().manual_seed(draw.seed + draw.epoch)).tolist()
        batch_size = _fixed_batch_size(lengths_N, draw.max_padded_steps)
        yield from _round_robin(order, batch_size=batch_size, rank=draw.rank, world_size=draw.world_size)


@final
class _Stream:
    """Cuts behind an iterator, as when they are read from a file; Lhotse advises against its sampler on a list."""

    def __init__(self, cuts: Iterable[Any]) -> None:
        self._cuts = cuts

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cuts)


OURS: Final = OptimalContestant.name


def contestants() -> tuple[AbstractContestant, ...]:
    """All of them, ours first, the peers next."""
    return (
        OptimalContestant(),
        AutoContestant(fixed_size=False),
        AutoContestant(fixed_size=True),
        LhotseContestant(),
        LengthGroupedContestant(),
        HeuristicContestant("equal mass", rule=equal_mass_edges),
        HeuristicContestant("percentile", rule=percentile_edges),
        HeuristicContestant("uniform", rule=uniform_edges),
        ShuffledContestant(),
    )


def _fixed_batch_size(lengths_N: Lengths, max_padded_steps: int) -> int:
    return max(1, int(max_padded_steps // lengths_N.mean()))


def _round_robin(order: list[int], *, batch_size: int, rank: int, world_size: int) -> Iterator[list[int]]:
    """Consecutive batches to consecutive ranks; the order begins again until the last round is full."""
    per_step = batch_size * world_size
    num_steps = -(-len(order) // per_step)
    filled = order + [order[number % len(order)] for number in range(num_steps * per_step - len(order))]
    for begin in range(rank * batch_size, len(filled), per_step):
        yield filled[begin : begin + batch_size]
