"""Truncated back-propagation through time: the state between the pieces of a long sequence, and overlapping windows.

Shape legend: B rows, M some of them, T steps of a sequence or of a piece of it; dimensions of a step follow after B
and T.

`CarriedState` is the state between chunks, for plain truncation in a loop of one's own. `TruncatedBPTT` is the loop,
with gradients that may also go back into earlier chunks. With window=6 and step=2:

    time      0   2   4   6   8   10
    part 0    S===                          S     stored state, without graph
    part 1    S---====                      ----  run again, so that the gradient goes back through these steps
    part 2    S-------====                  ====  new steps: their loss is back-propagated
    part 3        S-------====
    part 4            S-------====

The state at the beginning of the next window is stored whenever a window is run. Where a row starts a sequence, its
state is set to the initial one, and no gradient goes further back. The net is called once between two such times.
"""

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, cast, final

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from stretto.batching import as_lengths
from stretto.checks import check_int
from stretto.errors import StrettoError
from stretto.nn.streams import Chunk, real_steps
from stretto.state import map_state

NestedState: TypeAlias = torch.Tensor | tuple["NestedState", ...]
Initial: TypeAlias = NestedState | Callable[[int], NestedState] | None


def detach_state(state: NestedState) -> NestedState:
    """The same values without their graph, of a tensor or nested tuples of tensors."""
    return cast("NestedState", map_state(torch.Tensor.detach, state))


def reset_rows(
    state: NestedState, rows_B: torch.Tensor, *, initial: NestedState | None = None, batch_dim: int = 0
) -> NestedState:
    """The state with some rows put back to their initial values; no gradient goes from them into the old state.

    Args:
        state: A tensor or nested tuples of tensors.
        rows_B: Which rows, true or false.
        initial: The values of these rows, in the form of `state`, with their graph if they are learned; None for zeros.
        batch_dim: Where each tensor has its rows: 0 for `stretto.RNN`, 1 for `torch.nn.LSTM`, `GRU` and `RNN`.
    """
    if rows_B.dtype != torch.bool or rows_B.ndim != 1:
        raise StrettoError(
            f"rows are {rows_B.dtype} of shape {tuple(rows_B.shape)}", fix="Give one true or false for each row."
        )

    def reset(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        _check_rows(old, len(rows_B), batch_dim=batch_dim)
        shape = [1] * old.ndim
        shape[batch_dim] = -1
        return torch.where(rows_B.to(old.device).view(shape), new.to(old), old)

    return cast(
        "NestedState", map_state(reset, state, map_state(torch.zeros_like, state) if initial is None else initial)
    )


@final
class CarriedState:
    """The state between the chunks of `Streams`: detached after each one, initial in rows that start a sequence.

    Kept as an attribute of a module, it is neither a parameter nor a buffer: a trained model is the same without it.
    `stretto.train` finds it there, saves it in checkpoints and resets it at the start of an epoch.

    Args:
        initial: What a sequence starts from: a state of all rows, or a function that makes one for a number of rows,
            such as a cell's `initial_state`. None for zeros, as `torch.nn.LSTM` has them.
        batch_dim: Where each tensor of the state has its rows: 0 for `stretto.RNN`, 1 for `torch.nn.LSTM` and its like.
        state: What to continue from, when streams are resumed.

    Attributes:
        state: What was kept last, None before that.
        batch_dim: As given.

    Examples:
        >>> carried = CarriedState(batch_dim=1)
        >>> for chunk in streams:
        ...     y_BTF, state = lstm(chunk.x_BT, carried.start(chunk.resets))
        ...     carried.keep(state)
    """

    def __init__(self, *, initial: Initial = None, batch_dim: int = 0, state: NestedState | None = None) -> None:
        self._initial = initial
        self.batch_dim = batch_dim
        self.state = state

    def start(self, resets_B: torch.Tensor) -> NestedState | None:
        """The state before a chunk, or None where all rows start and the net is to make its own initial state."""
        initial = self._initial(len(resets_B)) if callable(self._initial) else self._initial
        if resets_B.all():
            return initial
        if self.state is None:
            raise StrettoError(
                f"{int((~resets_B).sum())} of {len(resets_B)} rows continue a sequence with no state to continue from",
                fix="Give the state that was carried when the streams were left, or begin with the first chunk.",
            )
        if not resets_B.any():
            return self.state
        return reset_rows(self.state, resets_B, initial=initial, batch_dim=self.batch_dim)

    def rows(self, rows: slice) -> NestedState | None:
        """The kept state of some rows, or None at the start: streams that have ended are the last rows."""
        if self.state is None:
            return None

        def take(tensor: torch.Tensor) -> torch.Tensor:
            every_B = torch.arange(tensor.shape[self.batch_dim], device=tensor.device)
            return tensor.index_select(self.batch_dim, every_B[rows])

        return cast("NestedState", map_state(take, self.state))

    def keep(self, state: NestedState) -> None:
        """Store the state after a chunk, without its graph."""
        self.state = detach_state(state)

    def reset(self) -> None:
        """Forget the state; the next chunk may have another number of rows."""
        self.state = None


def carried_states(model: nn.Module) -> list[CarriedState]:
    """All carried states that a model or its parts have as attributes, in the order of the parts."""
    return [item for part in model.modules() for item in vars(part).values() if isinstance(item, CarriedState)]


def reset_carried(model: nn.Module) -> None:
    """Reset all carried states of a model."""
    for carried in carried_states(model):
        carried.reset()


@contextlib.contextmanager
def fresh_state(model: nn.Module) -> Iterator[None]:
    """Run the body with carried states reset; afterwards they are what they were before."""
    before = [(carried, carried.state) for carried in carried_states(model)]
    reset_carried(model)
    try:
        yield
    finally:
        for carried, state in before:
            carried.state = state


def in_turn(model: nn.Module, rows: Sequence[slice], *, num_rows: int) -> Iterator[slice]:
    """Let a model compute a batch in parts, each from its own rows of the state; afterwards it carries that of all.

    Args:
        model: Called with a part each time that its rows are given.
        rows: The parts, which together are the batch.
        num_rows: Of the batch.
    """
    every = carried_states(model)
    for carried in every:
        carried.state = carried.rows(slice(num_rows))
    before = [[carried.rows(part) for carried in every] for part in rows]
    after = []
    for part, states in zip(rows, before, strict=True):
        for carried, state in zip(every, states, strict=True):
            carried.state = state
        yield part
        after.append([carried.state for carried in every])
    order_B = torch.cat([torch.arange(num_rows, device="cpu")[part] for part in rows]).argsort()

    def join(batch_dim: int, *parts: torch.Tensor) -> torch.Tensor:
        return torch.cat(parts, dim=batch_dim).index_select(batch_dim, order_B.to(parts[0].device))

    for carried, *found in zip(every, *after, strict=True):
        if all(state is not None for state in found):
            carried.state = map_state(partial(join, carried.batch_dim), *found)


def _check_rows(tensor: torch.Tensor, count: int, *, batch_dim: int) -> None:
    if not -tensor.ndim <= batch_dim < tensor.ndim or tensor.shape[batch_dim] != count:
        raise StrettoError(
            f"a state of shape {tuple(tensor.shape)} does not have {count} rows in dimension {batch_dim}",
            fix="Give batch_dim, the dimension of the rows: 0 for stretto.RNN, 1 for torch.nn.LSTM, GRU and RNN.",
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """New steps, whose loss is to be back-propagated.

    Attributes:
        y_new: Outputs of the new steps, with the graph of the whole window behind them; of no steps where all rows have
            ended and other ranks have steps left.
        span: Where the new steps are in time: `target[:, part.span]`.
        lengths: Real new steps of each row; int64 on the CPU.
        state: After the new steps, and of a row that has ended after its last one; without its graph.
        depth: Steps of the window: how far the gradient goes back from the end of the part, unless a row starts in it.
        chunk: The chunk that the new steps are, None where they are from a tensor.
    """

    y_new: torch.Tensor
    span: slice
    lengths: torch.Tensor
    state: NestedState
    depth: int
    chunk: Chunk | None

    @property
    def mask(self) -> torch.Tensor:
        """(B, new steps), true on real steps, on the device of the outputs."""
        return real_steps(self.lengths.to(self.y_new.device), self.y_new.shape[1])


@dataclasses.dataclass(slots=True, kw_only=True)
class _Window:
    """What the next part runs again: chunks, without the first steps of the first one, and the state before them."""

    state: NestedState | None
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    skipped: int = 0
    time: int = 0

    def move(self, num_steps: int, state: NestedState | None) -> None:
        """Begin so many steps later."""
        self.state = None if state is None else detach_state(state)
        self.skipped += num_steps
        while self.chunks and self.skipped >= self.chunks[0].x_BT.shape[1]:
            self.skipped -= self.chunks.pop(0).x_BT.shape[1]


@final
class TruncatedBPTT:
    """Truncated back-propagation through time, BPTT(h; h') of Hwang and Sung, as an iterable over parts.

    Each part has `step` (h') new steps. Its loss is that of the new steps alone; its gradient goes back through
    `window` (h) steps, the new ones and `window - step` before them. With plain truncation, `window == step`, the first
    of the new steps sends no gradient into its past; otherwise each sends it at least `window - step` steps back.

    The graphs of earlier parts are of no use: the optimiser has since changed the weights in place, so torch refuses to
    go back through them, and their values belong to older weights. Each part runs its whole window again instead, with
    the current weights, from a stored state without graph. That is exact: the gradient is that of back-propagation over
    the window from that state with the current weights. The stored state is the one that the part before had there, so
    its latest `step` steps are one update old. The price is that each step is run `window / step` times. With
    `window == step`, or without gradients (`torch.no_grad`), nothing is run twice.

    A window begins `window - step` steps before its new steps, also where a row, or all of them, end before `step` new
    steps. So a row has the same gradients in a ragged batch as alone.

    Args:
        rnn: Called as `y, state = rnn(x, state)`, batch first: `stretto.RNN`, `torch.nn.LSTM(batch_first=True)` and its
            like, any module or function. Ragged rows are packed for what torch has, and call `rnn(x, state,
            lengths=lengths)` otherwise.
        x: (B, T, ...); or chunks of `Streams`, at whose resets the state is initial and the gradient ends. If
            the net takes no `lengths`, the state of a row after its end is meaningless, and nothing depends on it.
        window: Steps that the gradient goes back through, h.
        step: New steps of a part, h'; with chunks, the most that one has.
        state: Before the first step, used without its graph. None for the net's own initial state, made again as long
            as the window reaches back to it: a learned one gets its gradient.
        lengths: Real steps of each row of a tensor `x`, None for all. Steps after the longest are left out.
        initial: With chunks, what a row starts from: a state, or a function that makes one for a number of rows. None
            for `rnn.initial_state` where there is one, else zeros.
        batch_dim: Where each tensor of the state has its rows: 0 for `stretto.RNN`, 1 for `torch.nn.LSTM` and its like.
            Used for ragged rows and resets only.

    Examples:
        >>> for part in TruncatedBPTT(rnn, x, window=256, step=128):
        ...     loss = criterion(part.y_new, target[:, part.span])
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        rnn: Callable[..., Any],
        x: torch.Tensor | Iterable[Chunk],
        *,
        window: int,
        step: int,
        state: NestedState | None = None,
        lengths: Any = None,
        initial: Initial = None,
        batch_dim: int = 0,
    ) -> None:
        window, step = check_int(window, name="window"), check_int(step, name="step")
        if window < step:
            raise StrettoError(
                f"window={window} is shorter than step={step}, so some new steps would get no gradient",
                fix="Give a window no shorter than step; window=step is plain truncation.",
            )
        if getattr(rnn, "bidirectional", False):
            raise StrettoError(
                f"{type(rnn).__name__} is bidirectional: it needs the end of a sequence before its beginning",
                fix="Give a net that runs forward only.",
            )
        if not getattr(rnn, "batch_first", True):
            raise StrettoError(f"{type(rnn).__name__} has batch_first=False", fix="Make it with batch_first=True.")
        if initial is not None and isinstance(x, torch.Tensor):
            raise StrettoError(
                "initial is for rows that start in chunks, and x is a tensor", fix="Give `state` instead of `initial`."
            )
        self._rnn, self._x, self._overlap, self._step = rnn, x, window - step, step
        self._state = None if state is None else detach_state(state)
        self._lengths_B = _check_lengths(x, lengths)
        self._initial = initial
        if initial is None and not isinstance(x, torch.Tensor):
            self._initial = getattr(rnn, "initial_state", None)
        self._batch_dim = batch_dim
        is_torch = isinstance(rnn, nn.RNNBase)
        self._packs = is_torch and not _has_lengths(rnn)
        self._takes_lengths = is_torch or _has_lengths(rnn)
        needs_rows = lengths is not None or not isinstance(x, torch.Tensor)
        if is_torch and needs_rows and batch_dim != 1:
            raise StrettoError(
                f"the state of {type(rnn).__name__} has its rows in dimension 1", fix="Give batch_dim=1."
            )
        if lengths is not None and not self._takes_lengths:
            raise StrettoError(
                f"lengths are given, but {type(rnn).__name__} takes none, so the states after each row's end would be "
                "wrong",
                fix="Let it take `lengths`, or leave them out and mask the loss if the last state is not needed.",
            )

    def __len__(self) -> int:
        if isinstance(self._x, torch.Tensor):
            return math.ceil(int(self._lengths_B.max()) / self._step)
        return len(self._x)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Part]:
        window = _Window(state=self._state)
        for chunk in self._chunks():
            # Not bound to a name, which would keep the graph until the next part is there.
            yield self._advance(window, chunk)

    def _chunks(self) -> Iterator[Chunk]:
        """The given chunks; of a tensor, `step` steps at a time."""
        if not isinstance(self._x, torch.Tensor):
            for chunk in self._x:
                _check_chunk(chunk, step=self._step)
                yield chunk
            return
        longest = int(self._lengths_B.max())
        if longest > self._step:
            _check_graph(self._x)
        for index, begin in enumerate(range(0, longest, self._step)):
            x_BT = self._x[:, begin : min(begin + self._step, longest)]
            yield Chunk(
                x_BT=x_BT,
                targets_BT=None,
                lengths=(self._lengths_B - begin).clamp(0, x_BT.shape[1]),
                resets=torch.full((len(x_BT),), begin == 0 and self._state is None),
                sequences=torch.arange(len(x_BT)),
                offsets=torch.full((len(x_BT),), begin),
                index=index,
            )

    def _advance(self, window: _Window, chunk: Chunk) -> Part:
        """Run the window that ends with this chunk, and move its beginning to that of the next one."""
        if chunk.resets.all():
            window.chunks, window.skipped, window.state = [], 0, None
        # Where all rows have ended and other ranks have steps left, one padded step makes outputs with a graph.
        num_new, run = chunk.x_BT.shape[1], chunk
        if not num_new:
            run = dataclasses.replace(chunk, x_BT=chunk.x_BT.new_zeros((len(chunk), 1, *chunk.x_BT.shape[2:])))
        window.chunks.append(run)
        chunks, skipped, num_run = window.chunks, window.skipped, run.x_BT.shape[1]
        x_BT = _join([one.x_BT for one in chunks])[:, skipped:]
        real_BT = _join([real_steps(one.lengths, one.x_BT.shape[1]) for one in chunks])[:, skipped:]
        # Times are counted from the window's beginning.
        begins = accumulate((one.x_BT.shape[1] for one in chunks), initial=-skipped)
        starts = zip(begins, (one.resets for one in chunks), strict=False)
        resets = {begin: resets_B for begin, resets_B in starts if begin == 0 or (begin > 0 and resets_B.any())}
        depth = x_BT.shape[1]
        next_begin = max(0, depth - (self._overlap if torch.is_grad_enabled() else 0))
        outputs, states = [], {0: window.state}
        for begin, end in pairwise(sorted({0, *resets, next_begin, depth})):
            state = states[begin]
            if begin in resets:
                carried = CarriedState(initial=self._initial, batch_dim=self._batch_dim, state=state)
                state = carried.start(resets[begin])
            y_BT, states[end] = self._run(x_BT[:, begin:end], state, real_BT[:, begin:end].sum(dim=1))
            if end > depth - num_run:
                outputs.append(y_BT[:, max(0, depth - num_run - begin) :])
        window.move(next_begin, states[next_begin])
        window.time += num_new
        return Part(
            y_new=_join(outputs)[:, :num_new],
            span=slice(window.time - num_new, window.time),
            lengths=chunk.lengths,
            state=detach_state(cast("NestedState", states[depth])),
            depth=depth - num_run + num_new,
            chunk=None if isinstance(self._x, torch.Tensor) else chunk,
        )

    def _run(
        self, x_BT: torch.Tensor, state: NestedState | None, lengths_B: torch.Tensor
    ) -> tuple[torch.Tensor, NestedState]:
        """Outputs, and the state after each row's last real step if the net can know of it.

        Rows without steps keep their state; neither packed batches nor nets with `lengths` have to take such rows.
        """
        if not self._takes_lengths or bool((lengths_B == x_BT.shape[1]).all()):
            return self._call(x_BT, state, None)
        rows_M = lengths_B.nonzero().flatten()
        if state is None or len(rows_M) == len(lengths_B):
            return self._call(x_BT, state, lengths_B)
        if not len(rows_M):
            return self._call(x_BT, state, None)[0], state
        there_M = rows_M.to(x_BT.device)
        dim = self._batch_dim

        def take(tensor: torch.Tensor) -> torch.Tensor:
            _check_rows(tensor, len(lengths_B), batch_dim=dim)
            return tensor.index_select(dim, rows_M.to(tensor.device))

        y_MT, after = self._call(x_BT[there_M], map_state(take, state), lengths_B[rows_M])
        y_BT = y_MT.new_zeros((len(lengths_B), *y_MT.shape[1:])).index_copy(0, there_M, y_MT)
        return y_BT, map_state(lambda old, new: old.index_copy(dim, rows_M.to(old.device), new), state, after)

    def _call(
        self, x_BT: torch.Tensor, state: NestedState | None, lengths_B: torch.Tensor | None
    ) -> tuple[torch.Tensor, NestedState]:
        if lengths_B is None:
            answer = self._rnn(x_BT, state)
        elif self._packs:
            packed = pack_padded_sequence(x_BT, lengths_B, batch_first=True, enforce_sorted=False)
            y, after = self._rnn(packed, state)
            answer = pad_packed_sequence(y, batch_first=True, total_length=x_BT.shape[1])[0], after
        else:
            answer = self._rnn(x_BT, state, lengths=lengths_B)
        if not isinstance(answer, tuple | list) or len(answer) != 2 or not isinstance(answer[0], torch.Tensor):
            raise StrettoError(
                f"{type(self._rnn).__name__} gave {type(answer).__name__} instead of outputs and state",
                fix="Let it return (y, state).",
            )
        if answer[0].shape[:2] != x_BT.shape[:2]:
            raise StrettoError(
                f"{type(self._rnn).__name__} gave outputs of shape {tuple(answer[0].shape)} for {tuple(x_BT.shape)}",
                fix="Let it be batch first and return one output per step.",
            )
        return answer[0], answer[1]


def _join(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Pieces of time one after the other."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _has_lengths(rnn: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(rnn.forward if isinstance(rnn, nn.Module) else rnn).parameters
    except (TypeError, ValueError):
        return False
    return "lengths" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _check_lengths(x: Any, lengths: Any) -> torch.Tensor:
    """The real steps of each row of a tensor; none for chunks, which know theirs."""
    if not isinstance(x, torch.Tensor):
        if lengths is not None:
            raise StrettoError("lengths are given for chunks, which have their own", fix="Leave lengths out.")
        return torch.empty(0, dtype=torch.int64)
    if x.ndim < 2 or 0 in x.shape[:2]:
        raise StrettoError(
            f"x has shape {tuple(x.shape)}", fix="Give rows and steps: (B, T, ...), at least one of each."
        )
    if lengths is None:
        return torch.full((x.shape[0],), x.shape[1])
    lengths_B = torch.from_numpy(as_lengths(lengths))
    if len(lengths_B) != x.shape[0] or int(lengths_B.max()) > x.shape[1]:
        raise StrettoError(
            f"{len(lengths_B)} lengths of up to {int(lengths_B.max())} steps do not fit x of shape {tuple(x.shape)}",
            fix="Give one length for each row, none longer than x.",
        )
    return lengths_B


def _check_graph(x_BT: torch.Tensor) -> None:
    if x_BT.grad_fn is not None and torch.is_grad_enabled():
        raise StrettoError(
            f"x is the output of other layers ({x_BT.grad_fn.name()}), and each part would go back there again",
            fix="Give rnn as a module that has these layers in it, or x.detach() if they are not to be trained.",
        )


def _check_chunk(chunk: Any, *, step: int) -> None:
    if not isinstance(chunk, Chunk):
        raise StrettoError(
            f"x is neither a tensor nor made of chunks: it gave a {type(chunk).__name__}",
            fix="Give a tensor (B, T, ...), or Streams, or what yields their chunks.",
        )
    if not len(chunk):
        raise StrettoError(
            f"chunk {chunk.index} of x has no rows: too few streams for this rank to have one",
            fix="Give Streams a num_streams that is a multiple of world_size.",
        )
    if chunk.x_BT.shape[1] > step:
        raise StrettoError(
            f"chunk {chunk.index} has {chunk.x_BT.shape[1]} steps, more than step={step}",
            fix="Give step the `chunk` of the streams.",
        )
    _check_graph(chunk.x_BT)
