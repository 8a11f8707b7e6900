"""Features on a common scale, with the scale kept in the model.

Shape legend: B sequences, T steps, F features, S steps of all sequences.
"""

from typing import final

import numpy as np
import torch
from torch import nn

from stretto.data import SequenceSet


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
    def of(cls, data: SequenceSet) -> "Standardise":
        """Measure the sequences of `data`; a feature that never changes is left as it is."""
        count, total_F, square_F = 0, np.zeros(data.num_features), np.zeros(data.num_features)
        # Measured from a value that occurs, the squares of a common offset do not swamp the deviation.
        origin_F = np.asarray(data.features_SF[data.starts_N[0]], dtype=np.float64)
        for start, length in zip(data.starts_N, data.lengths_N, strict=True):
            rows_TF = np.asarray(data.features_SF[start : start + length], dtype=np.float64) - origin_F
            count += len(rows_TF)
            total_F += rows_TF.sum(axis=0)
            square_F += (rows_TF**2).sum(axis=0)
        shift_F = total_F / count
        mean_F = origin_F + shift_F
        deviation_F = np.sqrt(np.maximum(square_F / count - shift_F**2, 0.0))
        constant_F = deviation_F <= 1e-9 * np.maximum(1.0, np.abs(mean_F))
        scale_F = 1.0 / np.where(constant_F, 1.0, deviation_F)
        return cls(torch.tensor(mean_F, dtype=torch.float32), torch.tensor(scale_F, dtype=torch.float32))

    def forward(self, x_BTF: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        """Standardise real steps and zero the rest."""
        scaled_BTF = (x_BTF.to(self.mean_F.dtype) - self.mean_F) * self.scale_F
        # Filled, not multiplied: padding may hold anything, and infinity times zero is not zero.
        return scaled_BTF.masked_fill(~mask_BT[..., None], 0.0)
