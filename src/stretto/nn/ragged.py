"""Padded, packed and jagged batches without their padding, and back.

Shape legend: B sequences, T steps, P real steps of all sequences, F features.
"""

from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from stretto.errors import StrettoError
from stretto.kernels import Layout, Shown
from stretto.signature import Packing
from stretto.state import flatten, map_state


@final
@dataclass(slots=True)
class PackedBatch:
    """The real steps of a batch, sorted as in its layout, and the way back.

    Attributes:
        x_PF: The real steps of all sequences.
        layout: Where each step of each sequence lies.
        order_B: The sequence of the batch that comes at each place of the layout; None if they are the same.
        num_steps: T of the padded batch.
        batch_first: Whether it was (B, T, F).
        packed: The packed batch it was, if it was one.
        offsets: Where each sequence of a jagged batch begins, and the last one ends.
    """

    x_PF: torch.Tensor
    layout: Layout
    order_B: torch.Tensor | None
    num_steps: int
    batch_first: bool
    packed: PackedSequence | None = None
    offsets: torch.Tensor | None = None

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """The real steps of a padded tensor of the same batch."""
        if self.layout.is_even and self.layout.num_steps == self.num_steps and self.order_B is None:
            steps_first = x.transpose(0, 1) if self.batch_first else x
            return steps_first.reshape(self.layout.total, *x.shape[2:])
        return x.reshape(self.layout.num_rows * self.num_steps, *x.shape[2:]).index_select(0, self._places_P(x.device))

    def _places_P(self, device: torch.device) -> torch.Tensor:
        """Where each real step lies in the flattened padded batch."""
        layout = self.layout
        sequence_P, step_P = layout.on_device("sequence_P", device), layout.on_device("step_P", device)
        batch_P = sequence_P if self.order_B is None else self.order_B.to(device)[sequence_P]
        return batch_P * self.num_steps + step_P if self.batch_first else step_P * layout.num_rows + batch_P

    def unpack_shown(self, y: torch.Tensor) -> torch.Tensor | PackedSequence:
        """The same of outputs that were asked for as they are `shown`: no view of anything, as with torch's layers."""
        if self.shown == "steps":
            return y.transpose_(0, 1) if self.batch_first else y
        return self.unpack(y)

    def unpack_copied(self, y_PF: torch.Tensor) -> torch.Tensor | PackedSequence:
        """The same of rows, some of which may be of a larger tensor."""
        if self.shown == "":
            return self.unpack(y_PF)
        steps = (self.layout.num_steps, self.layout.num_rows) if self.shown == "steps" else (self.layout.total,)
        return self.unpack_shown(y_PF.reshape(*steps, *y_PF.shape[1:]).clone())

    def sort_rows(self, state: Any) -> Any:
        """A state of the batch in the order of the layout."""
        if self.order_B is None:
            return state
        order_B = self.order_B
        return map_state(lambda part: part.index_select(0, order_B.to(part.device)), state)

    def restore_rows(self, state: Any) -> Any:
        """A state from the order of the layout back to that of the batch."""
        if self.order_B is None:
            return state
        back_B = torch.argsort(self.order_B)
        return map_state(lambda part: part.index_select(0, back_B.to(part.device)), state)

    @property
    def shown(self) -> Shown:
        """How outputs are asked for that `unpack` gives back as they are; empty if it copies them."""
        if self.packed is not None:
            return "rows"
        is_padded = self.offsets is None and self.order_B is None and self.layout.total > 0
        return "steps" if is_padded and self.layout.is_even and self.layout.num_steps == self.num_steps else ""

    def unpack(self, y_PF: torch.Tensor) -> torch.Tensor | PackedSequence:
        """Outputs in the form of the original batch; zeros after the end of each sequence."""
        if self.packed is not None:
            packed = self.packed
            return PackedSequence(y_PF, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        layout, num_rows = self.layout, self.layout.num_rows
        features = y_PF.shape[1:]
        if self.offsets is not None:
            places = _jagged_places_P(layout, self.order_B, self.offsets)
            values = torch.zeros_like(y_PF).index_copy(0, places, y_PF)
            return torch.nested.nested_tensor_from_jagged(values, offsets=self.offsets)
        if layout.is_even and layout.num_steps == self.num_steps and self.order_B is None:
            y = y_PF.reshape(self.num_steps, num_rows, *features)
            return y.transpose(0, 1) if self.batch_first else y
        flat = y_PF.new_zeros(num_rows * self.num_steps, *features)
        flat = flat.index_copy(0, self._places_P(y_PF.device), y_PF)
        shape = (num_rows, self.num_steps) if self.batch_first else (self.num_steps, num_rows)
        return flat.reshape(*shape, *features)


@final
@dataclass(slots=True)
class CutBatch:
    """A batch cut where its sequences are reset: each segment is a sequence of its own, sorted as in its layout.

        sequence 0   a a a | b b        segments of 3, 2, 2, 1 steps, in any order of the sequences
        sequence 1   c c | d            x_PF of the segments is x_PF of the batch in another order of its rows

    Attributes:
        layout: Of the segments.
        rows_P: The row of the batch that each row of the segments is.
        sequence_S: The sequence of the batch's layout that each segment S is of.
        starts_given_S: Whether the forward direction begins a segment with the state that was given.
        first_B: The first segment of each sequence.
        last_B: Its last one.
    """

    layout: Layout
    rows_P: torch.Tensor
    sequence_S: torch.Tensor
    starts_given_S: torch.Tensor
    first_B: torch.Tensor
    last_B: torch.Tensor

    def cut(self, x_PF: torch.Tensor) -> torch.Tensor:
        """Rows of the batch as rows of its segments."""
        return x_PF.index_select(0, self.rows_P.to(x_PF.device))

    def join(self, y_PF: torch.Tensor) -> torch.Tensor:
        """Rows of the segments as rows of the batch."""
        return y_PF.index_select(0, torch.argsort(self.rows_P).to(y_PF.device))

    def start_states(self, given: Any, fresh: Any, *, reverse: bool) -> Any:
        """The states before each segment, from those of the sequences: a given one at the start of a sequence, which
        for the backward direction is the end of its last segment, and a fresh one elsewhere.
        """
        is_given_S = self.starts_given_S
        if reverse:
            is_given_S = self.last_B[self.sequence_S] == torch.arange(len(self.sequence_S), device="cpu")
        source_S = self.sequence_S + len(self.last_B) * ~is_given_S
        return map_state(lambda a, b: torch.cat([a, b]).index_select(0, source_S.to(a.device)), given, fresh)

    def end_states(self, state: Any, *, reverse: bool) -> Any:
        """The state after each sequence, from those after its segments."""
        end_B = self.first_B if reverse else self.last_B
        return map_state(lambda part: part.index_select(0, end_B.to(part.device)), state)


def cut_at_resets(packed: PackedBatch, resets: Any, *, batch_first: bool) -> CutBatch:
    """The segments of a batch.

    Args:
        packed: The batch.
        resets: Booleans, padded like the batch, or packed like it: whether the state before a step is a fresh one.
        batch_first: Whether they are (B, T), if they are padded.

    Raises:
        StrettoError: They are not booleans of that shape.
    """
    layout = packed.layout
    if isinstance(resets, PackedSequence):
        like = packed.packed
        if like is None or not torch.equal(like.batch_sizes, resets.batch_sizes):
            raise StrettoError("resets are packed and the batch is not packed like them", fix="Pack both alike.")
        given_P = resets.data
    else:
        shape = (layout.num_rows, packed.num_steps) if batch_first else (packed.num_steps, layout.num_rows)
        given_P = resets
        if isinstance(resets, torch.Tensor) and tuple(resets.shape) == shape:
            places = replace(packed, batch_first=batch_first)._places_P(resets.device)
            given_P = resets.reshape(-1).index_select(0, places)
    if not isinstance(given_P, torch.Tensor) or given_P.shape != (layout.total,) or given_P.dtype != torch.bool:
        is_tensor = isinstance(given_P, torch.Tensor)
        raise StrettoError(
            f"resets are {f'{tuple(given_P.shape)} of {given_P.dtype}' if is_tensor else type(resets).__name__}",
            fix="Give booleans with the batch and time dimensions of the input: resets=done.bool().",
        )
    reset_P = given_P.detach().cpu().numpy()
    sequence_P, step_P = layout.sequence_P.numpy(), layout.step_P.numpy()
    # Starts of segments, sequence by sequence; a sequence without steps is one segment without steps.
    starts_P = np.flatnonzero(reset_P | (step_P == 0))
    empty = np.arange(layout.num_nonempty, layout.num_rows)
    sequence_S = np.concatenate([sequence_P[starts_P], empty])
    step_S = np.concatenate([step_P[starts_P], np.zeros_like(empty)])
    is_given_S = np.concatenate([~reset_P[starts_P], np.ones(len(empty), bool)]) & (step_S == 0)
    by_sequence = np.lexsort((step_S, sequence_S))
    sequence_S, step_S, is_given_S = sequence_S[by_sequence], step_S[by_sequence], is_given_S[by_sequence]
    is_last_S = np.append(sequence_S[1:] != sequence_S[:-1], [True] * bool(len(sequence_S))).astype(bool)
    ends_S = np.where(is_last_S, layout.lengths_B[sequence_S], np.append(step_S[1:], 0)[: len(step_S)])
    lengths_S = ends_S - step_S
    order = np.argsort(-lengths_S, kind="stable")
    place_S = np.empty_like(order)
    place_S[order] = np.arange(len(order))
    first_B = place_S[np.searchsorted(sequence_S, np.arange(layout.num_rows))]
    sequence_S, step_S, cut = sequence_S[order], step_S[order], Layout(np.ascontiguousarray(lengths_S[order]))
    piece_P = cut.sequence_P.numpy()
    rows_P = layout.starts_T[step_S[piece_P] + cut.step_P.numpy()] + sequence_S[piece_P]
    return CutBatch(
        layout=cut,
        rows_P=torch.from_numpy(rows_P),
        sequence_S=torch.from_numpy(sequence_S),
        starts_given_S=torch.from_numpy(is_given_S[order]),
        first_B=torch.from_numpy(first_B),
        last_B=torch.from_numpy(place_S[is_last_S]),
    )


def _jagged_places_P(layout: Layout, order_B: torch.Tensor | None, offsets: torch.Tensor) -> torch.Tensor:
    """Where each real step lies in the values of a jagged batch."""
    starts_B = offsets[:-1] if order_B is None else offsets[:-1][order_B.to(offsets.device)]
    return starts_B[layout.sequence_P.to(offsets.device)] + layout.step_P.to(offsets.device)


def values_of(x: Any) -> torch.Tensor:
    """The steps of all sequences in one tensor, whatever holds them: a padded, packed or jagged batch.

    Raises:
        StrettoError: It is none of these.
    """
    if not is_one_input(x):
        parts = input_parts(x)
        return next((part for part in parts if part.is_floating_point()), parts[0])
    if isinstance(x, PackedSequence):
        values, num_dims = x.data, 2
    elif isinstance(x, torch.Tensor) and x.is_nested:
        if x.layout is not torch.jagged or x._ragged_idx != 1:  # type: ignore[attr-defined]
            raise StrettoError(
                "the input is a nested tensor without layout=torch.jagged, or is not ragged in its second dimension",
                fix="Make it with torch.nested.nested_tensor([...], layout=torch.jagged), of (steps, features) each.",
            )
        values, num_dims = x.values(), 2
    else:
        values, num_dims = x, 2 if isinstance(x, torch.Tensor) and not x.is_floating_point() else 3
    if not isinstance(values, torch.Tensor) or values.dim() < num_dims:
        shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise StrettoError(
            f"the input is {shape}",
            fix="Give (batch, steps, features), a PackedSequence, a jagged nested tensor,"
            " or several tensors (batch, steps, ...) in a tuple or dict.",
        )
    return values


def pack_batch(x: torch.Tensor | PackedSequence, lengths: Any, *, batch_first: bool) -> PackedBatch:
    """The real steps of a batch.

    Args:
        x: (B, T, ...) or, unless `batch_first`, (T, B, ...); or a packed or jagged batch.
        lengths: Steps of each sequence; all T by default. Not with a packed or jagged batch.
        batch_first: Which of the two.

    Raises:
        StrettoError: If lengths do not fit.
    """
    if isinstance(x, PackedSequence) or x.is_nested:
        if lengths is not None:
            raise StrettoError(
                f"lengths were given with a {type(x).__name__}, which has its own", fix="Give one of the two, not both."
            )
        return _from_packed(x) if isinstance(x, PackedSequence) else _from_jagged(x, batch_first=batch_first)
    num_rows, num_steps = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    if lengths is None:
        layout = Layout.even(num_steps=num_steps, num_rows=num_rows)
        packed = PackedBatch(x, layout, None, num_steps, batch_first)
        packed.x_PF = packed.rows_of(x)
        return packed
    lengths_B = check_lengths(lengths, num_rows, num_steps)
    if num_rows and bool((lengths_B == num_steps).all()):
        return pack_batch(x, None, batch_first=batch_first)
    falling = bool((lengths_B[1:] <= lengths_B[:-1]).all())
    sorted_B = np.argsort(-lengths_B, kind="stable")
    order_B = None if falling else torch.from_numpy(sorted_B)
    layout = Layout(np.ascontiguousarray(lengths_B[sorted_B]))
    packed = PackedBatch(x, layout, order_B, num_steps, batch_first)
    packed.x_PF = packed.rows_of(x)
    return packed


def pack_inputs(x: Any, lengths: Any, *, batch_first: bool) -> tuple[PackedBatch, Packing | None]:
    """The real steps of a batch, and how several inputs lie side by side in them."""
    if is_one_input(x):
        return pack_batch(x, lengths, batch_first=batch_first), None
    parts = input_parts(x)
    packed, packing = pack_batch(parts[0], lengths, batch_first=batch_first), Packing.of(x, num_lead=2)
    rows = [packed.x_PF, *(packed.rows_of(part) for part in parts[1:])]
    packing.check_exact(rows, name="input")
    packed.x_PF = packing.pack(rows)
    return packed, packing


def is_one_input(x: Any) -> bool:
    """Whether there is one input at each step, and not several in a structure."""
    return isinstance(x, (torch.Tensor, PackedSequence)) or not _is_structure(x)


def _is_structure(x: Any) -> bool:
    try:
        return bool(flatten(x))
    except StrettoError:
        return False


def input_parts(x: Any) -> list[torch.Tensor]:
    """The tensors of several inputs.

    Raises:
        StrettoError: They are not padded batches of the same sequences and steps.
    """
    parts = flatten(x)
    first = parts[0].shape[:2]
    wrong = next((part for part in parts if part.is_nested or part.dim() < 2 or part.shape[:2] != first), None)
    if wrong is not None:
        raise StrettoError(
            f"of several inputs one is {tuple(parts[0].shape)} and one {tuple(wrong.shape)}",
            fix="Give padded batches (batch, steps, ...) of the same sequences and steps, and lengths= if they differ.",
        )
    return parts


def _from_packed(x: PackedSequence) -> PackedBatch:
    sizes_T = x.batch_sizes.numpy().astype(np.int64)
    lengths_B = np.searchsorted(-sizes_T, -np.arange(int(sizes_T[0])), side="left").astype(np.int64)
    return PackedBatch(x.data, Layout(lengths_B), x.sorted_indices, len(sizes_T), batch_first=False, packed=x)


def _from_jagged(x: torch.Tensor, *, batch_first: bool) -> PackedBatch:
    if not batch_first:
        raise StrettoError("a nested tensor was given without batch_first", fix="Make the layer with batch_first=True.")
    values_of(x)
    x = x.contiguous() if x.lengths() is not None else x  # type: ignore[attr-defined]
    offsets: torch.Tensor = x.offsets()  # type: ignore[attr-defined]
    lengths_B = offsets.diff().cpu().numpy().astype(np.int64)
    sorted_B = np.argsort(-lengths_B, kind="stable")
    layout, order_B = Layout(np.ascontiguousarray(lengths_B[sorted_B])), torch.from_numpy(sorted_B)
    x_PF = x.values().index_select(0, _jagged_places_P(layout, order_B, offsets))
    return PackedBatch(x_PF, layout, order_B, layout.num_steps, batch_first, offsets=offsets)


def check_lengths(lengths: Any, num_rows: int, num_steps: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Lengths of a padded batch as int64, or an error that says what does not fit."""
    given = lengths.detach().cpu().numpy() if isinstance(lengths, torch.Tensor) else np.asarray(lengths)
    if given.shape != (num_rows,):
        raise StrettoError(
            f"lengths have the shape {tuple(given.shape)} and the batch has {num_rows} sequences",
            fix=f"Give one length for each sequence, a shape of ({num_rows},).",
        )
    if not np.issubdtype(given.dtype, np.integer) and given.size:
        raise StrettoError(f"lengths are of {given.dtype}", fix="Give integers.")
    if given.size and (given.min() < 0 or given.max() > num_steps):
        worst = int(given.min() if given.min() < 0 else given.max())
        raise StrettoError(
            f"a length is {worst} and the batch has {num_steps} steps", fix=f"Give lengths between 0 and {num_steps}."
        )
    return given.astype(np.int64)


def reverse_padded(x_BTF: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Each sequence back to front; its padding stays after it."""
    steps_T = torch.arange(x_BTF.shape[1], device=x_BTF.device)
    lengths_B1 = lengths_B.to(x_BTF.device)[:, None]
    source_BT = torch.where(steps_T < lengths_B1, lengths_B1 - 1 - steps_T, steps_T)
    return x_BTF.gather(1, source_BT[..., None].expand_as(x_BTF))
