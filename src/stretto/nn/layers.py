"""Small layers around a recurrent net: attention, dropout, features on a common scale, several steps as one.

Shape legend: B sequences, T steps, F features, G groups of features; of attention, U query steps, S key steps, H units.
"""

import math
from collections.abc import Iterator
from typing import Final, final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from stretto.data import SequenceSet

MAX_BLOCK_VALUES: Final = 1 << 22
"""Values of the training data that are measured at once."""
DRAWN_RANGE: Final = 1 << 16
"""Numbers that each value of a dropout mask draws one of: four of them are a number of 64 bits."""


@final
class Dropout(nn.Dropout):
    """`torch.nn.Dropout`, sooner on a CPU, where drawing random numbers takes longer than all else that dropout does.

    Four values share the 64 random bits that torch draws for each of them. So `p` is rounded to a multiple of 1/65,536,
    and what is kept is scaled by the share that is really kept: the mean is exact. The masks follow from torch's random
    state, as ever, but are not those that `torch.nn.Dropout` would draw. On other devices, and in what is compiled or
    transformed (`torch.compile`, `torch.func`), this is `torch.nn.Dropout`.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each value zero with probability `p`, or scaled up; in evaluation `x` itself."""
        is_plain = x.device.type == "cpu" and x.is_floating_point() and x.layout == torch.strided and not x.is_nested
        if (
            not (self.training and is_plain and 0.0 < self.p < 1.0)
            or torch.compiler.is_compiling()
            or _is_transformed()
        ):
            return super().forward(x)
        kept = min(max(1, round((1.0 - self.p) * DRAWN_RANGE)), DRAWN_RANGE - 1)
        drawn = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None).view(torch.int16)
        # As `x` lies in memory, be it transposed.
        mask = torch.empty_like(x, requires_grad=False)
        values = mask.as_strided((x.numel(),), (1,))
        torch.lt(drawn[: x.numel()], kept - DRAWN_RANGE // 2, out=values)
        return x * mask.mul_(DRAWN_RANGE / kept)


def _is_transformed() -> bool:
    """Whether `torch.func` is at work, whose tensors stand for many."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return active is not None and bool(active())


@final
class Attention(nn.Module):
    """Scaled dot-product attention of one head with a learned bilinear form: softmax(q W k / sqrt(H)) k.

    Queries and keys are normalised first: the outputs of untrained recurrent layers are so small that all keys would
    score alike, and the net would be slow to learn where to look. Padding after the end of the keys is never attended
    to, whatever it holds.

    Args:
        size: Units of queries and keys.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.query_norm = nn.LayerNorm(size)
        self.key_norm = nn.LayerNorm(size)
        self.form = nn.Linear(size, size, bias=False)

    def forward(self, queries_BUH: torch.Tensor, keys_BSH: torch.Tensor, real_BS: torch.Tensor) -> torch.Tensor:
        """For each query, the mean (B, U, H) of the normalised keys, by attention; `real_BS` marks real keys."""
        keys_BSH = self.key_norm(keys_BSH.masked_fill(~real_BS[..., None], 0.0))
        scores_BUS = self.form(self.query_norm(queries_BUH)) @ keys_BSH.transpose(1, 2) / math.sqrt(keys_BSH.shape[-1])
        weights_BUS = scores_BUS.masked_fill(~real_BS[:, None], -torch.inf).softmax(dim=-1)
        context_BUH: torch.Tensor = weights_BUS @ keys_BSH
        return context_BUH


@final
class Standardise(nn.Module):
    """Shifts and scales each feature by the mean and deviation of the training data; padding becomes zero."""

    mean_F: torch.Tensor
    scale_F: torch.Tensor

    def __init__(self, mean_F: torch.Tensor, scale_F: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mean_F", mean_F)
        self.register_buffer("scale_F", scale_F)

    @classmethod
    def of(cls, data: SequenceSet, *, num_groups: int | None = None) -> "Standardise":
        """Measure the sequences of `data`; a feature that never changes is left as it is.

        Args:
            data: The training data.
            num_groups: Features that share one mean and deviation: 1 for all pixels of an image alike, 3 for each of
                three interleaved colours. By default each feature has its own. A scale for each pixel would blow up
                those at the edge, which hardly ever change.
        """
        size = num_groups or data.num_features
        count, total_G, square_G = 0, np.zeros(size), np.zeros(size)
        # Measured from a value that occurs, the squares of a common offset do not swamp the deviation.
        origin_G = np.asarray(data.features_SF[data.starts_N[0], :size], dtype=np.float64)
        for rows_TF in _blocks(data):
            values_G = rows_TF.reshape(-1, size) - origin_G
            count += len(values_G)
            total_G += values_G.sum(axis=0)
            square_G += (values_G**2).sum(axis=0)
        shift_G = total_G / count
        mean_G = origin_G + shift_G
        deviation_G = np.sqrt(np.maximum(square_G / count - shift_G**2, 0.0))
        is_constant_G = deviation_G <= 1e-9 * np.maximum(1.0, np.abs(mean_G))
        scale_G = 1.0 / np.where(is_constant_G, 1.0, deviation_G)
        repeats = data.num_features // size
        mean_F, scale_F = (torch.tensor(np.tile(row, repeats), dtype=torch.float32) for row in (mean_G, scale_G))
        return cls(mean_F, scale_F)

    def forward(self, x_BTF: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        """Standardise real steps and zero the rest."""
        scaled_BTF = (x_BTF.to(self.mean_F.dtype) - self.mean_F) * self.scale_F
        # Filled, not multiplied: padding may hold anything, and infinity times zero is not zero.
        return scaled_BTF.masked_fill(~mask_BT[..., None], 0.0)


def _blocks(data: SequenceSet) -> Iterator[npt.NDArray[np.float64]]:
    """The real steps of all sequences in float64, several sequences at once."""
    ends_N = np.cumsum(data.lengths_N) * data.num_features // MAX_BLOCK_VALUES
    for chosen_N in np.split(np.arange(len(data)), np.flatnonzero(np.diff(ends_N)) + 1):
        yield np.concatenate(data.subset(chosen_N).arrays(), dtype=np.float64, casting="unsafe")


def stacked_lengths(lengths_B: torch.Tensor, *, factor: int) -> torch.Tensor:
    """Lengths after `stack_steps`; a last group that is not full counts."""
    return (lengths_B + factor - 1).div(factor, rounding_mode="floor")


def stack_steps(x_BTF: torch.Tensor, *, factor: int) -> torch.Tensor:
    """Concatenate the features of every `factor` steps into one step; a last group that is not full ends in zeros."""
    num_sequences, num_steps, num_features = x_BTF.shape
    full_BTF = functional.pad(x_BTF, (0, 0, 0, -num_steps % factor))
    return full_BTF.reshape(num_sequences, -1, factor * num_features)
