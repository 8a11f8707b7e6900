"""Long sequences as parallel streams, cut into consecutive chunks.

Shape legend: B streams, T steps of a chunk, N sequences, S steps of one sequence, K chunks. Dimensions of a step follow
after B and T and stay as they are.

A stream is a row of spans. One long sequence is cut into streams of equal length, without gaps; whole sequences start
at the beginning of a chunk:

    one sequence                                a list of sequences
    stream 0 |aaaaaa|aaaaaa|aaaa|               stream 0 |aaaaaa|aaa   |bbbbbb|
    stream 1 |bbbbbb|bbbbbb|bbbb|               stream 1 |cccccc|cccccc|dd    |
             chunk 0 chunk 1 chunk 2                     chunk 0 chunk 1 chunk 2

When the number of streams of one sequence changes in the middle of a pass, the rests of all streams are laid end to
end and cut again. A stream may then consist of several spans, one directly after the other.
"""

import bisect
import dataclasses
import hashlib
import heapq
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from stretto.checks import check_int
from stretto.errors import StrettoError
from stretto.transfer import to_device

STATE_VERSION: Final = 2

LongSequence: TypeAlias = torch.Tensor | npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """The next steps of every stream.

    A row that is shorter than the chunk has come to its end: in the next chunk it starts another sequence, or has no
    more steps. So the state after a row's end is never used again, and masking the loss is enough.

    Attributes:
        x_BT: The steps, as many as the longest row has; zero after each row's end.
        targets_BT: The targets of the same steps, zero after each row's end; None where none were given.
        lengths: Real steps of each row, 0 for a stream that has come to its end; int64 on the CPU.
        resets: Whether the row starts from an initial state here instead of continuing; bool on the CPU.
        sequences: The number of the sequence that the row's first step is in, -1 for a row without steps.
        offsets: The place of the row's first step in that sequence.
        index: The number of the chunk in the pass.
    """

    x_BT: torch.Tensor
    targets_BT: torch.Tensor | None
    lengths: torch.Tensor
    resets: torch.Tensor
    sequences: torch.Tensor
    offsets: torch.Tensor
    index: int

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def mask(self) -> torch.Tensor:
        """(B, T), true on real steps, on the device of the steps."""
        return real_steps(self.lengths.to(self.x_BT.device), self.x_BT.shape[1])

    def to(self, device: torch.device | str) -> "Chunk":
        """Move the steps and the targets; everything else stays on the CPU.

        To a GPU they go through pinned memory, and are copied asynchronously.
        """
        return self._map_data(lambda data_BT: to_device(data_BT, device))

    def pin_memory(self) -> "Chunk":
        """Called by a DataLoader with `pin_memory=True`."""
        return self._map_data(torch.Tensor.pin_memory)

    def _map_data(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Chunk":
        targets_BT = None if self.targets_BT is None else change(self.targets_BT)
        return dataclasses.replace(self, x_BT=change(self.x_BT), targets_BT=targets_BT)


def real_steps(lengths_B: torch.Tensor, num_steps: int) -> torch.Tensor:
    """(B, num_steps), true on each row's first `lengths_B` steps."""
    return torch.arange(num_steps, device=lengths_B.device) < lengths_B[:, None]


class _Span(NamedTuple):
    """Steps of one sequence, from `begin` on, which are in a stream from its step `at` on."""

    sequence: int
    begin: int
    length: int
    at: int

    @property
    def end(self) -> int:
        return self.at + self.length


@final
class Streams(IterableDataset[Chunk]):
    """Long sequences side by side, in chunks that continue where the chunk before ended.

    One sequence is cut into `num_streams` parts that differ by at most one step. Of a list, each sequence stays whole:
    it goes to one stream and starts there at the beginning of a chunk. The longest are placed first, each in the stream
    with the fewest chunks; within a stream they keep the order of the list. Every step appears exactly once in a pass,
    in one row of one chunk.

    Iterating to the end begins the next pass. `torch.utils.data.DataLoader(streams, batch_size=None)` takes it as it
    is; several of its workers share the chunks and return them in order.

    Args:
        sequence: A tensor or array of shape (S, ...), which may be memory-mapped; or a list of them.
        num_streams: Rows of every chunk, over all ranks.
        chunk: Most steps of a chunk.
        targets: "next" for the step that follows (the last step of a sequence is then a target only); or what has the
            form of `sequence`, with one target per step; or None.
        rank: Which rank's rows to read.
        world_size: Ranks that divide the streams: each has as many as the first, but the last ones may have fewer, or
            none. All have equally many chunks.

    Attributes:
        num_streams, chunk: As given.
        num_steps: Real steps of a pass, over all ranks.
        planned_steps: Those of the pass under way since `resize`, if it was called.

    Examples:
        >>> streams = Streams(torch.arange(10), num_streams=2, chunk=3)
        >>> len(streams)
        2
    """

    def __init__(
        self,
        sequence: LongSequence | Sequence[LongSequence],
        *,
        num_streams: int,
        chunk: int,
        targets: LongSequence | Sequence[LongSequence] | Literal["next"] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.num_streams = check_int(num_streams, name="num_streams")
        self.chunk = check_int(chunk, name="chunk")
        self._world_size = check_int(world_size, name="world_size")
        self._rank = check_int(rank, name="rank", at_least=0)
        if self._rank >= self._world_size:
            raise StrettoError(f"rank={rank} of world_size={world_size}", fix="Give a rank below world_size.")
        self._is_cut = not isinstance(sequence, list | tuple)
        self._x_N, self._targets_N = _check_targets(_check_sequences("sequence", sequence), targets)
        self._sum_lengths = [len(x) for x in self._x_N]
        self.num_steps = sum(self._sum_lengths)
        self._refuse_too_many(self.num_streams)
        self._start = self._used = 0
        self._earlier: tuple[tuple[int, int], ...] = ()
        self._plan()

    @property
    def padding(self) -> float:
        """The fraction of a pass's padded steps, rows times steps of each rank's chunks, that are not real."""
        lengths_KB = np.stack([self.chunk_lengths(index) for index in range(len(self))])
        shares = [lengths_KB[:, self.share(rank)] for rank in range(self._world_size)]
        padded_steps: int = sum(share.shape[1] * int(share.max(axis=1, initial=0).sum()) for share in shares)
        return 1.0 - self.planned_steps / padded_steps

    def share(self, rank: int) -> slice:
        """The streams of one rank."""
        total = len(self._streams_B)
        each = -(-total // self._world_size)
        return slice(min(rank * each, total), min((rank + 1) * each, total))

    def chunk_lengths(self, index: int) -> npt.NDArray[np.int64]:
        """Real steps of every stream of all ranks in one chunk."""
        return _sum_lengths(self._rows(index, slice(None)))

    def __len__(self) -> int:
        return self._num_chunks

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for turn in range(self._start, self._num_chunks, count):
            self._used = min(turn + count, self._num_chunks)
            if turn + number < self._num_chunks:
                yield self.read(turn + number)
        self.restart()

    def restart(self) -> None:
        """Go to the beginning of a whole pass, with the number of streams that is in force."""
        self._earlier = ()
        self._plan()

    def resize(self, num_streams: int, *, used: int | None = None) -> None:
        """Cut the rest of the pass, and later passes, into another number of streams.

        The new streams begin in the middle of old ones, so all start from an initial state.

        Args:
            num_streams: Over all ranks.
            used: The chunks that training has used, `chunk.index + 1`; by default those that the iteration has given.

        Raises:
            StrettoError: There are not as many steps, or the streams hold whole sequences.
        """
        if not self._is_cut:
            raise StrettoError("streams of whole sequences cannot be cut again", fix="Make new Streams.")
        number, used = check_int(num_streams, name="num_streams"), self._used if used is None else used
        self._refuse_too_many(number)
        if used:
            self._earlier = (*self._earlier, (self.num_streams, used))
        self.num_streams = number
        self._plan()

    def state_dict(self, *, used: int | None = None) -> dict[str, Any]:
        """The position in the pass, as JSON-ready values. The state of the net is not part of it.

        Args:
            used: The chunks that training has used, `chunk.index + 1`. Needed if a DataLoader with workers reads
                ahead; by default, those that the iteration has given.
        """
        return {
            "version": STATE_VERSION,
            "digest": self._digest(),
            "num_streams": self.num_streams,
            "earlier": [[*cut] for cut in self._earlier],
            "used": self._used if used is None else used,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken: the next iteration yields the rest of the pass, which may be empty."""
        same = state.get("num_streams") == self.num_streams and state.get("digest") == self._digest()
        if state.get("version") != STATE_VERSION or not same:
            raise StrettoError(
                "the state was saved for other streams",
                fix="Restore it into Streams of the same sequences with the same num_streams, chunk and targets.",
            )
        used, before = state.get("used"), self._earlier
        self._earlier = tuple((int(number), int(chunks)) for number, chunks in state["earlier"])
        self._plan()
        if not isinstance(used, int) or not 0 <= used <= self._num_chunks:
            self._earlier = before
            self._plan()
            raise StrettoError(
                f"the state says that {used!r} of {self._num_chunks} chunks are used",
                fix="Restore a state that was saved by state_dict().",
            )
        self._start = self._used = used

    def read(self, index: int) -> Chunk:
        """The chunk with this number of the pass under way."""
        rows = self._rows(index, self.share(self._rank))
        lengths_B = _sum_lengths(rows)
        firsts = [(spans[0].sequence, spans[0].begin) if spans else (-1, 0) for spans in rows]
        # Streams of one sequence start in the middle of it, but all in the first chunk.
        resets = [bool(spans) and (index == 0 if self._is_cut else spans[0].begin == 0) for spans in rows]
        return Chunk(
            x_BT=_gather(self._x_N, rows, lengths_B),
            targets_BT=None if self._targets_N is None else _gather(self._targets_N, rows, lengths_B),
            lengths=torch.from_numpy(lengths_B),
            resets=torch.tensor(resets, dtype=torch.bool),
            sequences=torch.tensor([sequence for sequence, _ in firsts], dtype=torch.int64),
            offsets=torch.tensor([begin for _, begin in firsts], dtype=torch.int64),
            index=index,
        )

    def _rows(self, index: int, streams: slice) -> list[list[_Span]]:
        """What streams have in a chunk."""
        return [_clip(stream, index * self.chunk, (index + 1) * self.chunk) for stream in self._streams_B[streams]]

    def _plan(self) -> None:
        """Lay out the streams of the pass: all of it, or what earlier numbers of streams have left."""
        if self._is_cut:
            left = [_Span(0, 0, self._sum_lengths[0], 0)]
            for num_streams, used in self._earlier:
                rests = [
                    _clip(stream, used * self.chunk, len(self._x_N[0])) for stream in _cut_stream(left, num_streams)
                ]
                left = _join_streams(span for rest in rests for span in rest)
            self._streams_B = _cut_stream(left, self.num_streams)
        else:
            self._streams_B = _distribute(self._sum_lengths, self.num_streams, self.chunk)
        self.planned_steps = sum(span.length for stream in self._streams_B for span in stream)
        self._num_chunks = max(-(-stream[-1].end // self.chunk) if stream else 0 for stream in self._streams_B)
        self._start = self._used = 0

    def _refuse_too_many(self, num_streams: int) -> None:
        most, unit = (self.num_steps, "steps") if self._is_cut else (len(self._sum_lengths), "sequences")
        if num_streams > most:
            raise StrettoError(
                f"num_streams={num_streams}, but there are only {most} {unit}",
                fix="Give fewer streams"
                + ("." if self._is_cut else ", or one sequence, not in a list, to have it cut."),
            )

    def _digest(self) -> str:
        settings = [self.chunk, self._targets_N is not None, self._is_cut, self._sum_lengths]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def _clip(stream: list[_Span], begin: int, end: int) -> list[_Span]:
    """What a stream has between two of its steps."""
    found = []
    for span in itertools.islice(stream, bisect.bisect_right(stream, begin, key=lambda span: span.end), None):
        if span.at >= end:
            break
        skipped = max(0, begin - span.at)
        length = min(span.end, end) - span.at - skipped
        found.append(_Span(span.sequence, span.begin + skipped, length, span.at + skipped))
    return found


def _sum_lengths(rows: list[list[_Span]]) -> npt.NDArray[np.int64]:
    return np.array([sum(span.length for span in spans) for spans in rows], dtype=np.int64)


def _join_streams(spans: Iterable[_Span]) -> list[_Span]:
    """One stream of all spans, without gaps."""
    stream: list[_Span] = []
    for span in spans:
        stream.append(span._replace(at=stream[-1].end if stream else 0))
    return stream


def _cut_stream(stream: list[_Span], num_streams: int) -> list[list[_Span]]:
    """A stream without gaps, cut into streams that differ by a step at most; the longer ones come first.

    So the streams that have come to their end are always the last rows. Fewer steps than streams make fewer streams.
    """
    total = stream[-1].end if stream else 0
    num_streams = max(1, min(num_streams, total))
    shortest, num_longer = divmod(total, num_streams)
    bounds = [number * shortest + min(number, num_longer) for number in range(num_streams + 1)]
    return [_join_streams(_clip(stream, begin, end)) for begin, end in itertools.pairwise(bounds)]


def _distribute(lengths: list[int], num_streams: int, chunk: int) -> list[list[_Span]]:
    """Whole sequences, the longest first, each to the stream with the fewest chunks."""
    chunks = [-(-length // chunk) for length in lengths]
    fewest = [(0, stream) for stream in range(num_streams)]
    members: list[list[int]] = [[] for _ in range(num_streams)]
    for sequence in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        filled, stream = fewest[0]
        members[stream].append(sequence)
        heapq.heapreplace(fewest, (filled + chunks[sequence], stream))
    streams = []
    for member in map(sorted, members):
        firsts = itertools.accumulate((chunks[sequence] for sequence in member), initial=0)
        streams.append([_Span(n, 0, lengths[n], first * chunk) for n, first in zip(member, firsts, strict=False)])
    return streams


def _gather(sources: list[LongSequence], rows: list[list[_Span]], lengths_B: npt.NDArray[np.int64]) -> torch.Tensor:
    """The rows one below the other, with zeros after their ends."""
    num_steps = int(lengths_B.max()) if len(rows) else 0
    if num_steps and len(sources) == 1 and all(len(spans) == 1 and spans[0].length == num_steps for spans in rows):
        # Almost all chunks of one sequence: one indexing instead of a copy per row.
        places_BT = np.array([spans[0].begin for spans in rows])[:, None] + np.arange(num_steps)
        (source,) = sources
        return _as_tensor(source[torch.from_numpy(places_BT) if isinstance(source, torch.Tensor) else places_BT])
    like = _as_tensor(sources[0][:0])
    padded_BT = like.new_zeros((len(rows), num_steps, *like.shape[1:]))
    for row, spans in enumerate(rows):
        filled = 0
        for span in spans:
            steps = _as_tensor(sources[span.sequence][span.begin : span.begin + span.length])
            padded_BT[row, filled : filled + span.length] = steps
            filled += span.length
    return padded_BT


def _as_tensor(rows: LongSequence) -> torch.Tensor:
    if isinstance(rows, torch.Tensor):
        return rows
    # A copy: torch takes no array of another byte order and warns of one that cannot be written, such as a mapped file.
    return torch.from_numpy(np.array(rows, dtype=rows.dtype.newbyteorder("=")))


def _check_sequences(name: str, given: Any) -> list[LongSequence]:
    """The sequences: tensors or arrays of numbers whose steps have one shape and dtype."""
    sources = list(given) if isinstance(given, list | tuple) else [given]
    if not sources:
        raise StrettoError(f"{name} is an empty list", fix="Give at least one sequence.")
    kinds: list[str] = []
    for number, source in enumerate(sources):
        which = f"{name} {number}" if isinstance(given, list | tuple) else name
        if not isinstance(source, torch.Tensor | np.ndarray) or source.ndim == 0:
            raise StrettoError(
                f"{which} is {type(source).__name__} {str(source)[:40]!r}, not a sequence of steps",
                fix="Give a tensor or array of shape (steps, ...), or a list of them.",
            )
        try:
            like = _as_tensor(source[:0])
        except TypeError as error:
            raise StrettoError(f"{which} holds {source.dtype} values", fix="Give an array of numbers.") from error
        kinds.append(f"{like.dtype} steps of shape {tuple(like.shape[1:])}")
        if kinds[-1] != kinds[0]:
            raise StrettoError(
                f"{which} has {kinds[-1]}, the first one {kinds[0]}",
                fix="Give all sequences the same shape of a step and one dtype.",
            )
    return sources


def _check_targets(sources: list[LongSequence], targets: Any) -> tuple[list[LongSequence], list[LongSequence] | None]:
    """Inputs and targets, one of each per step."""
    is_next = isinstance(targets, str) and targets == "next"
    for number, source in enumerate(sources):
        if len(source) < 1 + is_next:
            raise StrettoError(
                f"sequence {number} has {len(source)} steps" + (", none of which has a next one" if is_next else ""),
                fix="Remove sequences without steps" + (" or with just one." if is_next else "."),
            )
    if is_next:
        return [source[:-1] for source in sources], [source[1:] for source in sources]
    if targets is None:
        return sources, None
    found = _check_sequences("targets", targets)
    if [len(target) for target in found] != [len(source) for source in sources]:
        raise StrettoError(
            f"targets have {[len(t) for t in found][:8]} steps, the sequences {[len(s) for s in sources][:8]}",
            fix='Give exactly one target for each step, or "next".',
        )
    return sources, found
