"""Sequences of unequal length to one padded batch.

Shape legend: B sequences, T steps of the longest, F features, S steps of all sequences.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from stretto.checks import check_list
from stretto.data import Sample
from stretto.errors import StrettoError
from stretto.transfer import to_device

NO_STEP: Final = -1
"""The label of a padded step, after a sequence's end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A padded batch that knows what is real.

    Attributes:
        features_BTF: Features, zero after each sequence's end.
        lengths: Real steps of each sequence; int64 and always on the CPU, where torch wants them.
        targets: What came with the sequences: an int64 tensor for labels, (B, T) for labels of steps, -1 after each
            sequence's end; a list for anything else, None for nothing.
        indices: The number of each sequence in its set, or None if the dataset does not give it.
    """

    features_BTF: torch.Tensor
    lengths: torch.Tensor
    targets: Any
    indices: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_steps(self) -> int:
        """Real steps."""
        return int(self.lengths.sum())

    @property
    def num_padded_steps(self) -> int:
        """Rows times the padded length: real steps and padding."""
        return self.features_BTF.shape[0] * self.features_BTF.shape[1]

    @property
    def mask(self) -> torch.Tensor:
        """(B, T), true on real steps, on the device of the features."""
        steps = torch.arange(self.features_BTF.shape[1], device=self.features_BTF.device)
        return steps < self.lengths.to(self.features_BTF.device)[:, None]

    def to(self, device: torch.device | str) -> "Batch":
        """Move the features and tensor targets; the lengths stay on the CPU.

        To a GPU they go through pinned memory, and are copied asynchronously.
        """
        return self._map_data(lambda data: to_device(data, device))

    def take(self, rows: slice) -> "Batch":
        """Some of the sequences, padded as they are."""
        return dataclasses.replace(
            self,
            features_BTF=self.features_BTF[rows],
            lengths=self.lengths[rows],
            targets=None if self.targets is None else self.targets[rows],
            indices=None if self.indices is None else self.indices[rows],
        )

    def pin_memory(self) -> "Batch":
        """Called by a DataLoader with `pin_memory=True`."""
        return self._map_data(torch.Tensor.pin_memory)

    def _map_data(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        targets = change(self.targets) if isinstance(self.targets, torch.Tensor) else self.targets
        return dataclasses.replace(self, features_BTF=change(self.features_BTF), targets=targets)


def collate(items: Sequence[Any], *, edges: npt.ArrayLike | None = None, num_features: int | None = None) -> Batch:
    """Pad sequences to one batch: the `collate_fn` of a DataLoader.

    Args:
        items: Each a `stretto.data.Sample`, a (features, target) pair, or features alone; features are a tensor or
            array of shape (steps,) or (steps, features). May be empty: the batch of a rank for which nothing is left.
        edges: Pad to the first edge that fits instead of to the longest sequence, for few distinct shapes; give
            them with `functools.partial(collate, edges=sampler.edges)`.
        num_features: Features of an empty batch, which holds no sequence to read them from.
    """
    given = check_list(items, name="items", owner="collate", fix="Give a list of samples, as a DataLoader does.")
    samples = [_as_sample(item, position) for position, item in enumerate(given)]
    if not samples:
        return Batch(
            features_BTF=torch.zeros(0, 0, num_features or 0),
            lengths=torch.zeros(0, dtype=torch.int64),
            targets=None,
            indices=torch.zeros(0, dtype=torch.int64),
        )
    features = [sample.features_TF for sample in samples]
    widths = {(rows.shape[1:], rows.dtype) for rows in features}
    if len(widths) > 1:
        raise StrettoError(
            f"sequences of one batch differ in features or type: {sorted(map(str, widths))}",
            fix="Give all sequences the same number of features and one dtype.",
        )
    lengths = torch.tensor([rows.shape[0] for rows in features], dtype=torch.int64)
    steps = _padded_length(int(lengths.max()), edges)
    of_steps = [
        torch.from_numpy(item.target)
        for item in items
        if isinstance(item, Sample) and isinstance(item.target, np.ndarray)
    ]
    return Batch(
        features_BTF=torch.stack(features) if int(lengths.min()) == steps else _pad(features, steps=steps, value=0),
        lengths=lengths,
        targets=_pad(of_steps, steps=steps, value=NO_STEP)
        if len(of_steps) == len(samples)
        else _join_targets([sample.target for sample in samples]),
        indices=None if samples[0].index < 0 else torch.tensor([sample.index for sample in samples]),
    )


def _pad(parts: list[torch.Tensor], *, steps: int, value: int) -> torch.Tensor:
    padded = parts[0].new_full((len(parts), steps, *parts[0].shape[1:]), value)
    for row, part in zip(padded, parts, strict=True):
        row[: len(part)] = part
    return padded


def _padded_length(longest: int, edges: npt.ArrayLike | None) -> int:
    if edges is None:
        return longest
    edges_K = np.asarray(edges, dtype=np.int64)
    bucket = int(np.searchsorted(edges_K, longest))
    if bucket == len(edges_K):
        raise StrettoError(
            f"a sequence of {longest} steps is longer than the edges {edges_K.tolist()}",
            fix="Pass the edges of the sampler that drew the batch.",
        )
    return int(edges_K[bucket])


def _as_sample(item: Any, position: int) -> Sample:
    if isinstance(item, Sample):
        return item
    features, target = (item[0], item[1]) if isinstance(item, tuple | list) and len(item) == 2 else (item, None)
    rows = _as_rows(features, position)
    if rows.ndim == 0 or rows.ndim > 2:
        raise StrettoError(
            f"item {position} of the batch has features of shape {tuple(rows.shape)}",
            fix="Give (steps,) or (steps, features), alone or in a (features, target) pair.",
        )
    return Sample(features_TF=rows if rows.ndim == 2 else rows[:, None], target=target, index=-1)


def _as_rows(features: Any, position: int) -> torch.Tensor:
    try:
        if isinstance(features, np.ndarray):
            # torch takes neither reversed arrays nor those of another byte order.
            features = np.ascontiguousarray(features, dtype=features.dtype.newbyteorder("="))
        return torch.as_tensor(features)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StrettoError(
            f"item {position} of the batch is not a sequence ({error})",
            fix="Give features as a tensor or array of numbers, alone or in a (features, target) pair.",
        ) from error


def _is_label(target: Any) -> bool:
    if isinstance(target, torch.Tensor):
        return target.ndim == 0 and not target.is_floating_point() and not target.is_complex()
    return isinstance(target, int | np.integer)


def _join_targets(targets: list[Any]) -> Any:
    if all(target is None for target in targets):
        return None
    if all(map(_is_label, targets)):
        return torch.tensor([int(t) for t in targets], dtype=torch.int64)
    return targets
