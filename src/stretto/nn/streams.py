"""Long sequences as parallel streams, cut into consecutive chunks.

Shape legend: B streams, T steps of a chunk, N sequences, S steps of one sequence, K chunks. Dimensions of a step follow
behind B and T and stay as they are.
"""

import bisect
import dataclasses
import hashlib
import heapq
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from stretto.errors import StrettoError

STATE_VERSION: Final = 1

LongSequence: TypeAlias = torch.Tensor | npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """The next steps of every stream.

    A row that is shorter than the chunk has come to its end: in the next chunk it starts another sequence, or has no
    more steps. So the state behind a row's end is never carried on, and masking the loss is enough.

    Attributes:
        x_BT: The steps, as many as the longest row has; zero after each row's end.
        targets_BT: The targets of the same steps, zero after each row's end; None where none were given.
        lengths: Real steps of each row, 0 for a stream that has come to its end; int64 on the CPU.
        resets: Whether the row starts from an initial state here instead of going on; bool on the CPU.
        sequences: The number of the sequence that the row is a part of, -1 for a row without steps.
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
        steps_T = torch.arange(self.x_BT.shape[1], device=self.x_BT.device)
        return steps_T < self.lengths.to(self.x_BT.device)[:, None]

    def to(self, device: torch.device | str) -> "Chunk":
        """Move the steps and the targets; everything else stays on the CPU."""
        targets_BT = None if self.targets_BT is None else self.targets_BT.to(device)
        return dataclasses.replace(self, x_BT=self.x_BT.to(device), targets_BT=targets_BT)

    def pin_memory(self) -> "Chunk":
        """Called by a DataLoader with `pin_memory=True`."""
        targets_BT = None if self.targets_BT is None else self.targets_BT.pin_memory()
        return dataclasses.replace(self, x_BT=self.x_BT.pin_memory(), targets_BT=targets_BT)


class _Piece(NamedTuple):
    """Steps of one sequence, laid in one stream from the chunk `first` on."""

    sequence: int
    begin: int
    length: int
    first: int


@final
class Streams(IterableDataset[Chunk]):
    """Long sequences side by side, in chunks that go on where the chunk before ended.

    One sequence is cut into `num_streams` equal parts. Of a list, each sequence stays whole: it goes to one stream and
    starts there at the beginning of a chunk. The longest are placed first, each in the stream with the fewest chunks;
    within a stream they keep the order of the list. Every step appears exactly once in a pass, in one row of one chunk.

    Iterating to the end begins the next pass, the same as this one. `torch.utils.data.DataLoader(streams,
    batch_size=None)` takes it as it is; several of its workers share the chunks and hand them over in order.

    Args:
        sequence: A tensor or array of shape (S, ...), which may be memory-mapped; or a list of them.
        num_streams: Rows of every chunk.
        chunk: Most steps of a chunk.
        targets: "next" for the step that follows (the last step of a sequence is then a target only); or what has the
            form of `sequence`, with one target a step; or None.

    Attributes:
        num_streams, chunk: As given.
        num_steps: Real steps of a pass.

    Example:
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
    ) -> None:
        self.num_streams = _count("num_streams", num_streams)
        self.chunk = _count("chunk", chunk)
        alone = not isinstance(sequence, list | tuple)
        self._x_N, self._targets_N = _paired(_as_list("sequence", sequence), targets)
        lengths = [len(x) for x in self._x_N]
        self.num_steps = sum(lengths)
        places = lengths[0] if alone else len(lengths)
        if self.num_streams > places:
            raise StrettoError(
                f"num_streams={self.num_streams}, but there are only {places} {'steps' if alone else 'sequences'}",
                fix="Give fewer streams" + ("." if alone else ", or one sequence, not in a list, to have it cut."),
            )
        self._lanes_B = _cut(lengths[0], self.num_streams) if alone else _dealt(lengths, self.num_streams, self.chunk)
        self._firsts_B = [[piece.first for piece in lane] for lane in self._lanes_B]
        self._num_chunks = max(lane[-1].first + -(-lane[-1].length // self.chunk) for lane in self._lanes_B)
        self._start = self._used = 0

    @property
    def padding(self) -> float:
        """The share of a pass's slots, rows times steps of each chunk, that hold no real step."""
        width_K = np.zeros(self._num_chunks, dtype=np.int64)
        for piece in (piece for lane in self._lanes_B for piece in lane):
            full, rest = divmod(piece.length, self.chunk)
            width_K[piece.first : piece.first + full] = self.chunk
            if rest:
                width_K[piece.first + full] = max(width_K[piece.first + full], rest)
        return 1.0 - self.num_steps / (self.num_streams * int(width_K.sum()))

    def __len__(self) -> int:
        return self._num_chunks

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for turn in range(self._start, self._num_chunks, count):
            self._used = min(turn + count, self._num_chunks)
            if turn + number < self._num_chunks:
                yield self._read(turn + number)
        self._start = self._used = 0

    def state_dict(self, *, used: int | None = None) -> dict[str, Any]:
        """The position in the pass, as JSON-ready values. The state of the net is not part of it.

        Args:
            used: The chunks that training has used up, `chunk.index + 1`. To be given where a DataLoader with workers
                draws ahead; otherwise the iteration knows.
        """
        return {"version": STATE_VERSION, "used": self._used if used is None else used, "digest": self._digest()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken: the next iteration yields what is left of the pass, if only nothing."""
        if state.get("version") != STATE_VERSION or state.get("digest") != self._digest():
            raise StrettoError(
                "the state was saved for other streams",
                fix="Restore it into Streams of the same sequences with the same num_streams, chunk and targets.",
            )
        used = state.get("used")
        if not isinstance(used, int) or not 0 <= used <= self._num_chunks:
            raise StrettoError(
                f"the state says that {used!r} of {self._num_chunks} chunks are used",
                fix="Restore a state that was saved by state_dict().",
            )
        self._start = self._used = used

    def _read(self, index: int) -> Chunk:
        pieces = [
            lane[bisect.bisect(firsts, index) - 1] for lane, firsts in zip(self._lanes_B, self._firsts_B, strict=True)
        ]
        done_B = np.array([(index - piece.first) * self.chunk for piece in pieces])
        lengths_B = np.clip([piece.length for piece in pieces] - done_B, 0, self.chunk)
        sequences_B = np.where(lengths_B, [piece.sequence for piece in pieces], -1)
        offsets_B = np.where(lengths_B, [piece.begin for piece in pieces] + done_B, 0)
        rows = [*zip(sequences_B.tolist(), offsets_B.tolist(), lengths_B.tolist(), strict=True)]
        return Chunk(
            x_BT=_padded(self._x_N, rows),
            targets_BT=None if self._targets_N is None else _padded(self._targets_N, rows),
            lengths=torch.from_numpy(lengths_B),
            resets=torch.from_numpy(done_B == 0),
            sequences=torch.from_numpy(sequences_B),
            offsets=torch.from_numpy(offsets_B),
            index=index,
        )

    def _digest(self) -> str:
        settings = [self.chunk, self._targets_N is not None, self._lanes_B]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def _cut(length: int, num_streams: int) -> list[list[_Piece]]:
    """One sequence in parts that differ by a step at most."""
    bounds = [length * stream // num_streams for stream in range(num_streams + 1)]
    return [[_Piece(0, begin, end - begin, 0)] for begin, end in itertools.pairwise(bounds)]


def _dealt(lengths: list[int], num_streams: int, chunk: int) -> list[list[_Piece]]:
    """Whole sequences, the longest first, each to the stream with the fewest chunks."""
    chunks = [-(-length // chunk) for length in lengths]
    fewest = [(0, stream) for stream in range(num_streams)]
    members: list[list[int]] = [[] for _ in range(num_streams)]
    for sequence in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        filled, stream = fewest[0]
        members[stream].append(sequence)
        heapq.heapreplace(fewest, (filled + chunks[sequence], stream))
    lanes: list[list[_Piece]] = []
    for lane in map(sorted, members):
        firsts = itertools.accumulate((chunks[sequence] for sequence in lane), initial=0)
        lanes.append(
            [_Piece(sequence, 0, lengths[sequence], first) for sequence, first in zip(lane, firsts, strict=False)]
        )
    return lanes


def _padded(sources: list[LongSequence], rows: list[tuple[int, int, int]]) -> torch.Tensor:
    """The rows (sequence, offset, length) one below the other, with zeros behind their ends."""
    like = _as_tensor(sources[0][:0])
    padded_BT = like.new_zeros((len(rows), max(length for _, _, length in rows), *like.shape[1:]))
    for row, (sequence, offset, length) in enumerate(rows):
        if length:
            padded_BT[row, :length] = _as_tensor(sources[sequence][offset : offset + length])
    return padded_BT


def _as_tensor(rows: LongSequence) -> torch.Tensor:
    if isinstance(rows, torch.Tensor):
        return rows
    # A copy: torch takes no array of another byte order and warns of one that cannot be written, such as a mapped file.
    return torch.from_numpy(np.array(rows, dtype=rows.dtype.newbyteorder("=")))


def _as_list(name: str, given: Any) -> list[LongSequence]:
    """The sequences, checked: tensors or arrays of numbers with a step in common."""
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


def _paired(sources: list[LongSequence], targets: Any) -> tuple[list[LongSequence], list[LongSequence] | None]:
    """What goes in and what is to come out, one a step."""
    following = isinstance(targets, str) and targets == "next"
    for number, source in enumerate(sources):
        if len(source) < 1 + following:
            raise StrettoError(
                f"sequence {number} has {len(source)} steps" + (", none of which has a next one" if following else ""),
                fix="Remove sequences without steps" + (" or with just one." if following else "."),
            )
    if following:
        return [source[:-1] for source in sources], [source[1:] for source in sources]
    if targets is None:
        return sources, None
    found = _as_list("targets", targets)
    if [len(target) for target in found] != [len(source) for source in sources]:
        raise StrettoError(
            f"targets have {[len(t) for t in found][:8]} steps, the sequences {[len(s) for s in sources][:8]}",
            fix='Give exactly one target for each step, or "next".',
        )
    return sources, found


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise StrettoError(f"{name}={value!r} cannot be used", fix="Give a whole number of at least 1.")
    return int(value)
