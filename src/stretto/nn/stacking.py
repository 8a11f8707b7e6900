"""Several time steps as one, to shorten sequences before the recurrent layer.

Shape legend: B sequences, T steps, U stacked steps, F features.
"""

import torch
from torch.nn import functional


def stacked_lengths(lengths_B: torch.Tensor, *, factor: int) -> torch.Tensor:
    """Steps left of each sequence; a last group that is not full counts."""
    return (lengths_B + factor - 1).div(factor, rounding_mode="floor")


def stack_steps(x_BTF: torch.Tensor, *, factor: int) -> torch.Tensor:
    """Lay `factor` steps side by side as one of `factor` times the features; what is missing at the end is zero."""
    num_sequences, num_steps, num_features = x_BTF.shape
    full_BTF = functional.pad(x_BTF, (0, 0, 0, -num_steps % factor))
    return full_BTF.reshape(num_sequences, -1, factor * num_features)
