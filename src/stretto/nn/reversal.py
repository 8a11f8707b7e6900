"""Reversing ragged sequences in place.

Shape legend: B sequences, T steps, F features.
"""

import torch


def reverse_padded(x_BTF: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Each sequence back to front; its padding stays behind it."""
    steps_T = torch.arange(x_BTF.shape[1], device=x_BTF.device)
    lengths_B1 = lengths_B.to(x_BTF.device)[:, None]
    source_BT = torch.where(steps_T < lengths_B1, lengths_B1 - 1 - steps_T, steps_T)
    return x_BTF.gather(1, source_BT[..., None].expand_as(x_BTF))
