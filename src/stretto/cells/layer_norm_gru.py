"""A GRU with layer normalisation, after Ba et al. (2016).

Shape legend: B sequences, F features, H hidden units, D = 2 H units of the gates r and z.
"""

from typing import final

import torch
from torch import nn
from torch.nn.functional import linear

from stretto.cells.cell import State
from stretto.cells.gated import AbstractGatedCell
from stretto.cells.state import one


@final
class LayerNormGRU(AbstractGatedCell):
    """A GRU (reset after the product) that normalises its products: the gates r and z together, the candidate n apart.

    The norms are `norm_ih_rz`, `norm_hh_rz`, `norm_ih_n` and `norm_hh_n`; their shifts are the biases. The state and
    the output are h (B, H).

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether the norms have shifts.
        eps: What the norms add to the variance.
    """

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, eps: float = 1e-5) -> None:
        super().__init__(input_size, hidden_size, num_gates=3, bias=False)
        self.norm_ih_rz = nn.LayerNorm(2 * self.hidden_size, eps=eps, bias=bias)
        self.norm_hh_rz = nn.LayerNorm(2 * self.hidden_size, eps=eps, bias=bias)
        self.norm_ih_n = nn.LayerNorm(self.hidden_size, eps=eps, bias=bias)
        self.norm_hh_n = nn.LayerNorm(self.hidden_size, eps=eps, bias=bias)

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        return self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and h."""
        h_BH = one(state, cell=self)
        z_BH, n_BH = self._gates(x_t, h_BH)
        h_BH = (1 - z_BH) * n_BH + z_BH * h_BH
        return h_BH, h_BH

    def coarse_step(self, x_t: torch.Tensor, state: State, dt: float) -> State:
        """An implicit step of dh/dt = (1 - z) (n - h) over `dt` steps, z and n as they are at its start."""
        h_BH = one(state, cell=self)
        z_BH, n_BH = self._gates(x_t, h_BH)
        q_BH = dt * (1 - z_BH)
        return (h_BH + q_BH * n_BH) / (1 + q_BH)

    def _gates(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = [2 * self.hidden_size, self.hidden_size]
        x_rz_BD, x_n_BH = torch.split(linear(x_BF, self.weight_ih), sizes, dim=-1)
        h_rz_BD, h_n_BH = torch.split(linear(h_BH, self.weight_hh), sizes, dim=-1)
        r_BH, z_BH = torch.sigmoid(self.norm_ih_rz(x_rz_BD) + self.norm_hh_rz(h_rz_BD)).chunk(2, dim=-1)
        return z_BH, torch.tanh(self.norm_ih_n(x_n_BH) + r_BH * self.norm_hh_n(h_n_BH))
