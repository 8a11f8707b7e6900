"""Batches of a long text in parallel streams, each batch going on where the one before ended.

Shape legend: L layers, R streams of all workers, B streams of one, H hidden units.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any, ClassVar, Final, final

import torch
from torch import nn

from stretto.batching import Batch
from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.training.carrying import carrying_parts, reset_carried
from stretto.training.checkpoint import Checkpoint
from stretto.training.feed import AbstractFeed, Resumed
from stretto.training.stream_cut import StreamCut
from stretto.training.stream_text import StreamText

STATE_VERSION: Final = 2
PREFIX: Final = "streams"
MOST_TENSORS: Final = 4
"""That the state of a recurrent layer is made of; an LSTM's has two."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """The windows of one epoch over all workers.

    Attributes:
        epoch: Which epoch.
        num_sequences: Sequences of the text.
        num_buckets: One: windows are of one length.
        batches: Windows, the same number for every worker.
        padding: Share of slots that is padding; only the last window can have any.
        largest_batch: Most slots of one batch.
        most_rows: Most streams of one batch.
        streams: Of all workers.
        window: Most steps of a batch.
    """

    epoch: int
    num_sequences: int
    num_buckets: int
    batches: int
    padding: float
    largest_batch: int
    most_rows: int
    streams: int
    window: int


@final
class StreamFeed(AbstractFeed):
    """The text cut into streams, as many as all workers have rows, which are read side by side in windows.

    Each epoch reads the same streams from their beginning, every word once. A model carries its state from window to
    window and starts from zero in every epoch. With another number of streams the text is cut anew: in the middle of an
    epoch, what is left of it.

    Args:
        part: The training text; its sequences are joined in order.
        window: Most steps of a batch, and how far gradients go back.
        batch_size: Streams of one worker.
        max_padded_steps: Most slots of a batch.
        world: The workers, each with its share of the streams.
    """

    carries: ClassVar[bool] = True

    def __init__(
        self, part: SequenceSet, *, window: int, batch_size: int, world: World, max_padded_steps: int | None = None
    ) -> None:
        self._text, self._world, self._window, self._max_padded_steps = (
            StreamText(part),
            world,
            window,
            max_padded_steps,
        )
        self._num_parts = len(part)
        self._epoch, self._start = 0, 0
        self._earlier: tuple[tuple[int, int], ...] = ()
        self._refuse(batch_size)
        self._made_for = self.batch_size = batch_size
        self._cut = self._whole()

    @property
    def num_sequences(self) -> int:
        """As many streams as the text has windows: with more, streams would be shorter than a window."""
        return max(1, self._text.num_steps // self._window)

    @property
    def edges(self) -> list[int]:
        """The window."""
        return [self._window]

    @property
    def shares(self) -> dict[int, float]:
        """All windows are of one length."""
        return {self._window: 1.0}

    @property
    def is_bucketed(self) -> bool:
        """No: all streams are of one length."""
        return False

    @property
    def left(self) -> float:
        """The share of the words that the cut has."""
        return self._cut.num_steps / self._text.num_steps

    @property
    def whole_epoch(self) -> int:
        """Windows of an epoch that is read from its beginning."""
        return self._whole().num_windows

    def __len__(self) -> int:
        return self._cut.num_windows

    def __iter__(self) -> Iterator[Batch]:
        share = self._cut.share(rank=self._world.rank, size=self._world.size)
        for number in range(self._start, self._cut.num_windows):
            yield self._text.batch(self._cut.read(number, share))

    def begin_epoch(self, epoch: int, model: nn.Module) -> None:
        """Be at the beginning of the text, with a model that starts from zero, or where the epoch was left."""
        self._move_to(epoch)
        if self._start == 0:
            reset_carried(model)

    def resize(self, batch_size: int, *, used: int = 0) -> None:
        """Cut what is left of the text, and all of it in later epochs, into another number of streams.

        The new streams begin in the middle of old ones, so each starts from a state of zero.
        """
        self._refuse(batch_size)
        if used:
            self._earlier = (*self._earlier, (self._streams, used))
        self.batch_size, self._start = batch_size, 0
        self._cut = self._after(self._earlier)

    def report(self) -> StreamReport:
        """Windows and padding of the epoch."""
        cut, size = self._cut, self._world.size
        shares = [cut.share(rank=rank, size=size) for rank in range(size)]
        widest = max(share.stop - share.start for share in shares)
        last = [cut.read(cut.num_windows - 1, share) for share in shares]
        empty = sum(window.places_BT.size - int(window.lengths_B.sum()) for window in last)
        return StreamReport(
            epoch=self._epoch,
            num_sequences=self._num_parts,
            num_buckets=1,
            batches=cut.num_windows,
            padding=empty / (cut.num_steps + empty),
            largest_batch=widest * self._window,
            most_rows=widest,
            streams=cut.num_streams,
            window=self._window,
        )

    def example(self, batch_size: int, length: int) -> Batch:
        """The first window of so many streams."""
        cut = StreamCut(self._text.runs, num_streams=batch_size, window=length)
        return self._text.batch(cut.read(0, slice(0, cut.num_streams)))

    def state_dict(self, *, epoch: int, used: int) -> dict[str, Any]:
        """The position: how the epoch was cut and how many windows of each cut were used."""
        self._move_to(epoch)
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "used": [[*segment] for segment in (*self._earlier, (self._streams, used))],
            "digest": self._digest(),
            "made_for": self._made_for,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> Resumed:
        """Continue where `state` was taken; with another number of streams, what is left is cut anew."""
        if state.get("version") != STATE_VERSION:
            raise StrettoError(
                f"the position in the text has version {state.get('version')!r}, not {STATE_VERSION}",
                fix="Resume with the version of Stretto that saved it, or start a new run.",
            )
        if state.get("digest") != self._digest():
            raise StrettoError(
                "the position in the text was saved for another text or window",
                fix="Resume with the text, --layout and --window that the run was started with.",
            )
        if state["made_for"] == self._made_for:
            self.batch_size = int(state["batch_size"])
        *earlier, (streams, used) = [(int(number), int(windows)) for number, windows in state["used"]]
        self._epoch = int(state["epoch"])
        same = streams == self._streams
        if same or not used:
            self._earlier, self._start = tuple(earlier), used
        else:
            self._earlier, self._start = (*earlier, (streams, used)), 0
        self._cut = self._after(self._earlier)
        if self._cut.num_steps == 0 or self._start >= len(self):
            self._move_to(self._epoch + 1)
        if same:
            return Resumed(is_dealt_anew=False)
        what = "what is left of the epoch is" if self._earlier else "the text is"
        told = f"{what} cut into {self._streams} streams, not {streams}; each starts from a state of zero"
        return Resumed(is_dealt_anew=True, told=told)

    def carried(self, model: nn.Module) -> Checkpoint:
        """The states of all streams, in their order, which each worker has a share of."""
        tensors = {}
        for number, part in enumerate(carrying_parts(model)):
            for which, state_LRH in enumerate(self._gathered(part.carried)):
                tensors[f"{PREFIX}.{number}.{which}"] = state_LRH
        return Checkpoint(tensors=tensors, state={})

    def load_carried(self, checkpoint: Checkpoint, model: nn.Module) -> None:
        """Give each row the state of its stream, if the streams still are the same."""
        if self._start == 0:
            return
        share = self._cut.share(rank=self._world.rank, size=self._world.size)
        like = next(model.parameters())
        for number, part in enumerate(carrying_parts(model)):
            names = [f"{PREFIX}.{number}.{which}" for which in range(MOST_TENSORS)]
            states = [checkpoint.tensors[name] for name in names if name in checkpoint.tensors]
            part.carried = tuple(state_LRH[:, share].to(like.device) for state_LRH in states)

    @property
    def _streams(self) -> int:
        return self.batch_size * self._world.size

    def _whole(self) -> StreamCut:
        return StreamCut(self._text.runs, num_streams=self._streams, window=self._window)

    def _after(self, earlier: tuple[tuple[int, int], ...]) -> StreamCut:
        """What is left when so many windows of so many streams were used, cut into the streams of now."""
        runs = self._text.runs
        for streams, used in earlier:
            runs = StreamCut(runs, num_streams=streams, window=self._window).rest(used)
        return StreamCut(runs, num_streams=self._streams, window=self._window)

    def _move_to(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._start, self._earlier = epoch, 0, ()
            self._cut = self._whole()

    def _gathered(self, states: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """The states (L, B, H) of all workers side by side; a worker without streams has none."""
        world = self._world
        if world.size == 1:
            return list(states)
        shapes = [float(size) for state_LBH in states for size in (state_LBH.shape[0], state_LBH.shape[2])]
        headers = world.all_gather([*shapes, *[0.0] * (2 * MOST_TENSORS - len(shapes))])
        sizes = [int(max(column)) for column in zip(*headers, strict=True)]
        each = -(-self._cut.num_streams // world.size)
        found = []
        for which in range(MOST_TENSORS):
            num_layers, width = sizes[2 * which : 2 * which + 2]
            if not num_layers:
                break
            mine_LBH = torch.zeros(num_layers, each, width, dtype=torch.float64)
            if states:
                mine_LBH[:, : states[which].shape[1]] = states[which]
            rows = world.all_gather(mine_LBH.flatten().tolist())
            all_LRH = torch.cat([torch.tensor(r, dtype=torch.float64).view_as(mine_LBH) for r in rows], dim=1)
            dtype = states[which].dtype if states else torch.float32
            found.append(all_LRH[:, : self._cut.num_streams].to(dtype))
        return found

    def _refuse(self, batch_size: int) -> None:
        streams = batch_size * self._world.size
        if streams > self._text.num_steps:
            raise StrettoError(
                f"batch_size={batch_size} on {self._world.size} workers makes {streams} streams of a text of "
                f"{self._text.num_steps} words",
                fix=f"Lower --batch-size; up to {self.num_sequences} streams are as long as a window.",
            )
        if self._max_padded_steps is not None and batch_size * self._window > self._max_padded_steps:
            raise StrettoError(
                f"{batch_size} streams with windows of {self._window} make {batch_size * self._window} slots, "
                f"more than max_padded_steps={self._max_padded_steps}",
                fix="Raise --max-padded-steps to at least that, or lower --batch-size or --window.",
            )

    def _digest(self) -> str:
        return hashlib.sha256(json.dumps([self._text.num_steps, self._window]).encode()).hexdigest()[:16]
