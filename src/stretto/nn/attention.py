"""Attention: for each step of one sequence, what matters in another.

Shape legend: B sequences, U steps that ask, S steps that are asked, H units.
"""

import math
from typing import final

import torch
from torch import nn


@final
class Attention(nn.Module):
    """Scaled dot-product attention of one head, with a learnt form: softmax(q W m / sqrt(H)) m.

    Both sides are normalised first: the outputs of fresh recurrent layers are so small that all steps would fit alike,
    and the net would be long in learning where to look. All steps ask at once. What stands behind the end of an asked
    sequence is never looked at, whatever it is.

    Args:
        size: Units of both sides.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.asking_norm = nn.LayerNorm(size)
        self.asked_norm = nn.LayerNorm(size)
        self.form = nn.Linear(size, size, bias=False)

    def forward(self, asking_BUH: torch.Tensor, asked_BSH: torch.Tensor, real_BS: torch.Tensor) -> torch.Tensor:
        """The mean of the asked steps (B, U, H), normalised, each weighted by how well it answers."""
        asked_BSH = self.asked_norm(asked_BSH.masked_fill(~real_BS[..., None], 0.0))
        fit_BUS = self.form(self.asking_norm(asking_BUH)) @ asked_BSH.transpose(1, 2) / math.sqrt(asked_BSH.shape[-1])
        weights_BUS = fit_BUS.masked_fill(~real_BS[:, None], -torch.inf).softmax(dim=-1)
        context_BUH: torch.Tensor = weights_BUS @ asked_BSH
        return context_BUH
