"""Where the batches of an epoch come from: buckets of similar length (`BucketFeed`), or a text in parallel streams.

For a GPU the next batch is made in a thread while the current one is used (`read_ahead`).

Shape legend: N sequences, K buckets, M sequences of a bucket, B sequences or streams of a batch, S words of a text,
R streams of all ranks, T steps of a window.
"""

import abc
import dataclasses
import itertools
import json
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Final, final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader

from stretto.batching import NO_STEP, Batch, BucketSampler, bucket_of, collate, steps_of
from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.nn import CarriedState, Chunk, Streams, carried_states, reset_carried
from stretto.state import flatten, unflatten
from stretto.training.checkpoint import Checkpoint
from stretto.training.config import TrainConfig

EVAL_BATCH_SIZE: Final = 64
EVAL_STREAMS: Final = 20
"""Rows of an evaluation of a text: each starts from an initial state, and together they read every word once."""
STREAM_STATE_VERSION: Final = 3
CARRIED_KEY: Final = "streams"


class AbstractFeed(abc.ABC):
    """Gives one rank its batches, epoch after epoch, each sequence once per epoch.

    All ranks have equally many batches. The position within an epoch is a number of batches, which the trainer counts:
    a feed may read ahead.

    Attributes:
        carries: Whether a batch continues where the one before ended, so that the model carries a state between them.
        can_read_ahead: Whether the next batch may be made in another thread: it depends on the position alone, and
            making it draws no random numbers and changes nothing.
        batch_size: Most sequences, or streams, in a batch of one rank, in the current epoch.
        num_sequences: The largest batch size over all ranks that makes sense.
    """

    carries: ClassVar[bool] = False
    can_read_ahead: ClassVar[bool] = False
    batch_size: int
    num_sequences: int

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

        Epochs count from 0. A model that carries a state is reset where streams begin.
        """

    @abc.abstractmethod
    def resize(self, batch_size: int, *, batches_done: int = 0) -> None:
        """Continue with batches of another size: the rest of the epoch is planned again, and so are later epochs."""

    @abc.abstractmethod
    def report(self) -> dict[str, Any]:
        """The batches of the current epoch in numbers, JSON-ready.

        At least `batches`, of each rank, `padding`, as a share of padded steps, and `num_buckets`.
        """

    @abc.abstractmethod
    def example(self, batch_size: int, length: int) -> Batch:
        """A batch of training data of this size and about this length, to be timed; the position does not change."""

    @abc.abstractmethod
    def state_dict(self, *, epoch: int, batches_done: int) -> dict[str, Any]:
        """The position, after so many batches of the current plan, as JSON-ready values."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> tuple[bool, str]:
        """Continue at a saved position; with another number of ranks the rest of the epoch is re-planned.

        Returns:
            Whether it was re-planned, and what the user should know about it; usually nothing.
        """

    def carried(self, model: nn.Module) -> Checkpoint:  # noqa: ARG002 - nothing is carried
        """The state that a model carries into the next batch, over all ranks, each of which must call."""
        return Checkpoint()

    def load_carried(self, checkpoint: Checkpoint, model: nn.Module) -> None:  # noqa: B027
        """Give the model the state it carried, if the batches still are those that follow."""


def read_ahead(batches: Iterator[Batch], *, device: str, most: int | None = None) -> Generator[Batch, None, None]:
    """The same batches in the same order; for a GPU each is made in a thread while the one before is used.

    One batch is ahead at a time. What goes wrong with it is raised when it is asked for. Closing waits for the thread.

    Args:
        batches: Only asked for the next one by one thread at a time.
        device: Where they are used.
        most: How many may be made ahead: asking for more than there are may change what gives them.
    """
    if not device.startswith("cuda"):
        yield from batches
        return
    ahead = itertools.islice(batches, most)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="stretto-batches") as maker:
        coming = maker.submit(next, ahead, None)
        while (batch := coming.result()) is not None:
            coming = maker.submit(next, ahead, None)
            yield batch
    yield from batches


@final
class BucketFeed(AbstractFeed):
    """Every batch from one length bucket, in a new order each epoch, as a `BucketSampler` plans them.

    `lengths` are what buckets are cut by: the sequences' own, or (N, 2) for pairs, whose edges count both.
    """

    can_read_ahead: ClassVar[bool] = True

    def __init__(
        self,
        part: SequenceSet,
        *,
        config: TrainConfig,
        batch_size: int,
        world: World,
        lengths: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._part, self._world = part, world
        self._lengths = part.lengths_N if lengths is None else lengths
        self.batch_size, self.num_sequences = batch_size, len(part)
        self.sampler = BucketSampler(
            self._lengths,
            batch_size=batch_size,
            max_padded_steps=config.max_padded_steps,
            num_buckets=config.num_buckets,
            largest_first=config.largest_first,
            seed=config.seed,
            rank=world.rank,
            world_size=world.size,
        )

    @property
    def edges(self) -> list[int]:
        """The bucket edges, of pairs the sums of both sides'."""
        return [int(edge) for edge in steps_of(self.sampler.edges)]

    @property
    def shares(self) -> dict[int, float]:
        """The share of the sequences in each bucket, by its edge."""
        bucket_N = bucket_of(self._lengths, self.sampler.edges)
        edges_N, counts_N = np.unique(np.array(self.edges)[bucket_N], return_counts=True)
        return {int(edge): count / len(self._part) for edge, count in zip(edges_N, counts_N.tolist(), strict=True)}

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

    def report(self) -> dict[str, Any]:
        """The sampler's report."""
        return dataclasses.asdict(self.sampler.report())

    def example(self, batch_size: int, length: int) -> Batch:
        """Sequences of the bucket that this length belongs to, repeated if it has too few."""
        bucket_N = bucket_of(self._lengths, self.sampler.edges)
        bucket = min(int(np.searchsorted(self.edges, length)), int(bucket_N.max()))
        members_M = np.flatnonzero(bucket_N == bucket)
        chosen_B = np.resize(members_M if len(members_M) else np.arange(len(self._part)), batch_size)
        return collate([self._part[int(index)] for index in chosen_B])

    def state_dict(self, *, epoch: int, batches_done: int) -> dict[str, Any]:
        """The position, and the size of the batches."""
        return self.sampler.state_dict(epoch=epoch, batches_done=batches_done)

    def load_state_dict(self, state: dict[str, Any]) -> tuple[bool, str]:
        """Continue at a saved position; with another number of ranks the rest of the epoch is re-planned."""
        self.sampler.load_state_dict(state)
        self.batch_size = self.sampler.batch_size or self.batch_size
        return state["used"][-1][0] != self._world.size, ""


def check_max_length(
    data: SequenceSet, *, max_padded_steps: int | None, lengths: npt.NDArray[np.int64] | None = None
) -> None:
    """Refuse a sequence longer than the cap, in training and evaluation alike, by its number in the file."""
    steps_N = steps_of(data.lengths_N if lengths is None else lengths)
    longest = int(steps_N.argmax())
    if max_padded_steps is not None and steps_N[longest] > max_padded_steps:
        raise StrettoError(
            f"{data.name}: sequence {data.numbers_N[longest]} has {steps_N[longest]} steps, "
            f"more than max_padded_steps={max_padded_steps}",
            fix="Raise --max-padded-steps to at least that, or shorten or remove the sequence.",
        )


def eval_batches(
    part: SequenceSet,
    *,
    max_padded_steps: int | None,
    device: str,
    world: World,
    lengths: npt.NDArray[np.int64] | None = None,
) -> Iterator[Batch]:
    """The batches of an evaluation: every sequence once, divided among the ranks; the last may be empty."""
    sampler = BucketSampler(
        part.lengths_N if lengths is None else lengths,
        batch_size=EVAL_BATCH_SIZE,
        max_padded_steps=max_padded_steps,
        shuffle=False,
        rank=world.rank,
        world_size=world.size,
    )
    # With a generator of its own: a loader draws a seed, and evaluation must not change the random state of training.
    loader: DataLoader[Batch] = DataLoader(
        part,  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=collate,
        generator=torch.Generator(),
    )
    for batch in read_ahead(iter(loader), device=device):
        yield batch.to(device)


@final
class _Text:
    """The sequences of a set joined in order: every word but the last is read, every word but the first a target."""

    def __init__(self, part: SequenceSet) -> None:
        ends_N = part.starts_N + part.lengths_N
        if np.array_equal(part.starts_N[1:], ends_N[:-1]):
            self._words_S = part.features_SF[part.starts_N[0] : ends_N[-1], 0]
        else:
            self._words_S = np.concatenate(part.arrays())[:, 0]
        self._numbers_N, self._ends_N = part.numbers_N, np.cumsum(part.lengths_N)
        self.num_steps = len(self._words_S) - 1
        if self.num_steps < 1:
            raise StrettoError(f"{part.name} has a single word, which nothing follows", fix="Give a longer text.")

    def streams(self, *, num_streams: int, window: int, world: World) -> Streams:
        return Streams(
            self._words_S,
            num_streams=min(num_streams, self.num_steps),
            chunk=window,
            targets="next",
            rank=world.rank,
            world_size=world.size,
        )

    def batch(self, chunk: Chunk) -> Batch:
        """Without the streams that have ended, which are the last; indices are of the sequences that rows begin in."""
        assert chunk.targets_BT is not None
        num_rows = int((chunk.lengths > 0).sum())
        next_BT = chunk.targets_BT[:num_rows].long().masked_fill_(~chunk.mask[:num_rows], NO_STEP)
        sequences_B = np.searchsorted(self._ends_N, chunk.offsets[:num_rows].numpy(), side="right")
        return Batch(
            features_BTF=chunk.x_BT[:num_rows].long()[:, :, None],
            lengths=chunk.lengths[:num_rows],
            targets=next_BT,
            indices=torch.from_numpy(self._numbers_N[sequences_B]),
        )


def eval_windows(part: SequenceSet, *, window: int, world: World, device: str) -> Iterator[Batch]:
    """The batches of an evaluation on a text: windows of up to 20 streams, however many ranks divide these.

    A rank for which no stream is left gets empty batches.
    """
    text = _Text(part)
    most = max(1, min(EVAL_STREAMS, text.num_steps // window))
    windows = map(text.batch, text.streams(num_streams=most, window=window, world=world))
    for batch in read_ahead(windows, device=device):
        yield batch.to(device)


@final
class StreamFeed(AbstractFeed):
    """The text in streams, as many as all ranks have rows, which are read side by side in windows.

    Each epoch reads the same streams from their beginning, every word once. A model carries its state from window to
    window and is reset at the start of every epoch. With another number of streams the text is cut again: in the middle
    of an epoch, what is left of it.

    Args:
        part: The training text; its sequences are joined in order.
        window: Most steps of a batch, and how far gradients go back.
        batch_size: Streams of one rank.
        world: The ranks, each with its share of the streams.
        max_padded_steps: Most padded steps of a batch.
    """

    carries: ClassVar[bool] = True
    can_read_ahead: ClassVar[bool] = True

    def __init__(
        self, part: SequenceSet, *, window: int, batch_size: int, world: World, max_padded_steps: int | None = None
    ) -> None:
        self._text, self._world, self._window, self._max_padded_steps = _Text(part), world, window, max_padded_steps
        self._num_parts = len(part)
        # As many streams as the text has windows: with more, streams would be shorter than a window.
        self.num_sequences = max(1, self._text.num_steps // window)
        self._check_size(batch_size)
        self._made_for = self.batch_size = batch_size
        self._epoch, self._start = 0, 0
        self._streams = self._text.streams(num_streams=batch_size * world.size, window=window, world=world)

    @property
    def edges(self) -> list[int]:
        """The window."""
        return [self._window]

    @property
    def shares(self) -> dict[int, float]:
        """All windows are of one length."""
        return {self._window: 1.0}

    @property
    def left(self) -> float:
        """The fraction of the words that the streams have."""
        return self._streams.planned_steps / self._text.num_steps

    @property
    def whole_epoch(self) -> int:
        """Windows of an epoch that is read from its beginning."""
        longest = -(-self._text.num_steps // (self.batch_size * self._world.size))
        return -(-longest // self._window)

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self._start, len(self._streams)):
            yield self._text.batch(self._streams.read(number))

    def begin_epoch(self, epoch: int, model: nn.Module) -> None:
        """Be at the beginning of the text, with a model that is reset, or where the epoch was left."""
        self._move_to(epoch)
        if self._start == 0:
            reset_carried(model)

    def resize(self, batch_size: int, *, batches_done: int = 0) -> None:
        """Cut what is left of the text, and all of it in later epochs, into another number of streams."""
        self._check_size(batch_size)
        self._streams.resize(batch_size * self._world.size, used=batches_done)
        self.batch_size, self._start = batch_size, 0

    def report(self) -> dict[str, Any]:
        """Windows and padding of the epoch; only the last window can have any."""
        streams, size = self._streams, self._world.size
        shares = [streams.share(rank) for rank in range(size)]
        widest = max(share.stop - share.start for share in shares)
        last_R = streams.chunk_lengths(len(streams) - 1)
        empty = sum(int((last_R[share].max(initial=0) - last_R[share])[last_R[share] > 0].sum()) for share in shares)
        return {
            "epoch": self._epoch,
            "num_sequences": self._num_parts,
            "num_buckets": 1,
            "batches": len(streams),
            "padding": empty / (streams.planned_steps + empty),
            "largest_batch": widest * self._window,
            "most_rows": widest,
            "streams": len(last_R),
            "window": self._window,
        }

    def example(self, batch_size: int, length: int) -> Batch:
        """The first window of so many streams."""
        return self._text.batch(self._text.streams(num_streams=batch_size, window=length, world=World()).read(0))

    def state_dict(self, *, epoch: int, batches_done: int) -> dict[str, Any]:
        """The position: how the epoch was cut and how many windows of each cut were used."""
        self._move_to(epoch)
        return {
            "version": STREAM_STATE_VERSION,
            "epoch": epoch,
            "streams": self._streams.state_dict(used=batches_done),
            "made_for": self._made_for,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> tuple[bool, str]:
        """Continue where `state` was taken; with another number of streams, what is left is cut again."""
        if state.get("version") != STREAM_STATE_VERSION:
            raise StrettoError(
                f"the position in the text has version {state.get('version')!r}, not {STREAM_STATE_VERSION}",
                fix="Resume with the version of Stretto that saved it, or start a new run.",
            )
        saved, world = state["streams"], self._world
        before = self._text.streams(num_streams=saved["num_streams"], window=self._window, world=world)
        if saved["digest"] != before.state_dict()["digest"]:
            raise StrettoError(
                "the position in the text was saved for another text or window",
                fix="Resume with the text, --layout and --window that the run was started with.",
            )
        if state["made_for"] == self._made_for:
            self.batch_size = int(state["batch_size"])
        before.load_state_dict(saved)
        self._streams, self._epoch, self._start = before, int(state["epoch"]), int(saved["used"])
        wanted, is_same = self.batch_size * world.size, saved["num_streams"] == self.batch_size * world.size
        if not is_same:
            self._streams.resize(wanted, used=self._start)
            self._start = 0
        is_cut_short = self._streams.planned_steps < self._text.num_steps
        if self._start >= len(self):
            self._move_to(self._epoch + 1)
        if is_same:
            return False, ""
        what = "what is left of the epoch is" if is_cut_short else "the text is"
        return True, f"{what} cut into {wanted} streams, not {saved['num_streams']}; each starts from its initial state"

    def carried(self, model: nn.Module) -> Checkpoint:
        """The states of all streams, in their order, which each rank has a share of."""
        tensors, forms = {}, []
        for number, carried in enumerate(carried_states(model)):
            own = [] if carried.state is None else flatten(carried.state)
            # A rank without streams has no state: rank 0, which always has some, broadcasts its form.
            form = None if carried.state is None else _describe_state(carried)
            forms.append(json.loads(self._world.broadcast_str(json.dumps(form))))
            for which, (dtype, shape) in enumerate(forms[-1]["tensors"] if forms[-1] else []):
                part = own[which] if own else torch.zeros(shape, dtype=getattr(torch, dtype))
                tensors[f"{CARRIED_KEY}.{number}.{which}"] = self._gather_rows(part, carried.batch_dim)
        return Checkpoint(tensors=tensors, state={CARRIED_KEY: forms})

    def load_carried(self, checkpoint: Checkpoint, model: nn.Module) -> None:
        """Give each row the state of its stream, if the streams still are the same."""
        if self._start == 0:
            return
        device = next(model.parameters()).device
        for number, (carried, form) in enumerate(
            zip(carried_states(model), checkpoint.state[CARRIED_KEY], strict=True)
        ):
            carried.reset()
            if form is not None:
                names = [f"{CARRIED_KEY}.{number}.{which}" for which in range(len(form["tensors"]))]
                carried.state = _unflatten(form["nesting"], [checkpoint.tensors[name].to(device) for name in names])
                carried.state = carried.rows(self._streams.share(self._world.rank))

    def _gather_rows(self, part: torch.Tensor, batch_dim: int) -> torch.Tensor:
        """The rows of all ranks side by side."""
        if self._world.size == 1:
            return part
        own = part.movedim(batch_dim, 0).double()
        padded = own.new_zeros(self._streams.share(0).stop, *own.shape[1:])
        padded[: len(own)] = own
        ranks = self._world.all_gather(padded.flatten().tolist())
        rows = torch.cat([torch.tensor(values, dtype=torch.float64).view_as(padded) for values in ranks])
        return rows[: self._streams.share(self._world.size - 1).stop].to(part.dtype).movedim(0, batch_dim).contiguous()

    def _move_to(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._start = epoch, 0
            self._streams.restart()

    def _check_size(self, batch_size: int) -> None:
        streams, padded_steps = batch_size * self._world.size, batch_size * self._window
        if streams > self._text.num_steps:
            raise StrettoError(
                f"batch_size={batch_size} on {self._world.size} ranks makes {streams} streams of a text of "
                f"{self._text.num_steps} words",
                fix=f"Lower --batch-size; up to {self.num_sequences} streams are as long as a window.",
            )
        if self._max_padded_steps is not None and padded_steps > self._max_padded_steps:
            raise StrettoError(
                f"{batch_size} streams with windows of {self._window} make {padded_steps} padded steps, more than "
                f"max_padded_steps={self._max_padded_steps}",
                fix="Raise --max-padded-steps to at least that, or lower --batch-size or --window.",
            )


def _describe_state(carried: CarriedState) -> dict[str, Any]:
    """How a state is nested, as JSON, and the type of each tensor and its shape without rows."""
    tensors = flatten(carried.state)
    shapes = [[0 if at == carried.batch_dim % t.ndim else size for at, size in enumerate(t.shape)] for t in tensors]
    types = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    nesting = unflatten(carried.state, range(len(tensors)))
    return {"nesting": nesting, "tensors": [[*pair] for pair in zip(types, shapes, strict=True)]}


def _unflatten(nesting: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The state of a form: in JSON tuples, named or not, are lists."""
    if isinstance(nesting, list):
        return tuple(_unflatten(item, tensors) for item in nesting)
    if isinstance(nesting, dict):
        return {key: _unflatten(item, tensors) for key, item in nesting.items()}
    return None if nesting is None else tensors[nesting]
