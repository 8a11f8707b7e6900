"""Padded, packed and jagged batches without their padding, and back.

Shape legend: B sequences, T steps, P real steps of all sequences, F features.
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from stretto.errors import StrettoError
from stretto.kernels import Layout
from stretto.state import map_state


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
        places = _places_P(layout, self.order_B, num_steps=self.num_steps, batch_first=self.batch_first)
        flat = flat.index_copy(0, places.to(y_PF.device), y_PF)
        shape = (num_rows, self.num_steps) if self.batch_first else (self.num_steps, num_rows)
        return flat.reshape(*shape, *features)


def _places_P(layout: Layout, order_B: torch.Tensor | None, *, num_steps: int, batch_first: bool) -> torch.Tensor:
    """Where each real step lies in the flattened padded batch."""
    sequence_P = layout.sequence_P
    batch_P = sequence_P if order_B is None else order_B[sequence_P]
    return batch_P * num_steps + layout.step_P if batch_first else layout.step_P * layout.num_rows + batch_P


def _jagged_places_P(layout: Layout, order_B: torch.Tensor | None, offsets: torch.Tensor) -> torch.Tensor:
    """Where each real step lies in the values of a jagged batch."""
    starts_B = offsets[:-1] if order_B is None else offsets[:-1][order_B.to(offsets.device)]
    return starts_B[layout.sequence_P.to(offsets.device)] + layout.step_P.to(offsets.device)


def values_of(x: Any) -> torch.Tensor:
    """The steps of all sequences in one tensor, whatever holds them: a padded, packed or jagged batch.

    Raises:
        StrettoError: It is none of these.
    """
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
        values, num_dims = x, 3
    if not isinstance(values, torch.Tensor) or values.dim() < num_dims:
        shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise StrettoError(
            f"the input is {shape}", fix="Give (batch, steps, features), a PackedSequence, or a jagged nested tensor."
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
        steps_first = x.transpose(0, 1) if batch_first else x
        return PackedBatch(
            steps_first.reshape(num_steps * num_rows, *x.shape[2:]), layout, None, num_steps, batch_first
        )
    lengths_B = check_lengths(lengths, num_rows, num_steps)
    if num_rows and bool((lengths_B == num_steps).all()):
        return pack_batch(x, None, batch_first=batch_first)
    falling = bool((lengths_B[1:] <= lengths_B[:-1]).all())
    sorted_B = np.argsort(-lengths_B, kind="stable")
    order_B = None if falling else torch.from_numpy(sorted_B)
    layout = Layout(np.ascontiguousarray(lengths_B[sorted_B]))
    places = _places_P(layout, order_B, num_steps=num_steps, batch_first=batch_first).to(x.device)
    flat = x.reshape(num_rows * num_steps, *x.shape[2:])
    return PackedBatch(flat.index_select(0, places), layout, order_B, num_steps, batch_first)


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
        raise StrettoError(f"lengths are of {given.dtype}", fix="Give whole numbers.")
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
