"""An LSTM with layer normalisation, after Ba et al. (2016).

Shape legend: B sequences, F features, H hidden units, G = 4 H gate units.
"""

from typing import final

import torch
from torch import nn
from torch.nn.functional import linear

from stretto.cells.cell import State
from stretto.cells.gated import AbstractGatedCell
from stretto.cells.state import several


@final
class LayerNormLSTM(AbstractGatedCell):
    """An LSTM that normalises both products, each over its G units, and the cell where it is read.

    Gates are LN(W x) + LN(U h) in the order i, f, g, o; then c' = f c + i g and h' = o tanh(LN(c')). The shifts of the
    norms `norm_ih`, `norm_hh` and `norm_c` are the biases. The state is (h, c), each (B, H); the output is h.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether the norms have shifts.
        eps: What the norms add to the variance.
    """

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, eps: float = 1e-5) -> None:
        super().__init__(input_size, hidden_size, num_gates=4, bias=False)
        self.norm_ih = nn.LayerNorm(4 * self.hidden_size, eps=eps, bias=bias)
        self.norm_hh = nn.LayerNorm(4 * self.hidden_size, eps=eps, bias=bias)
        self.norm_c = nn.LayerNorm(self.hidden_size, eps=eps, bias=bias)

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        return self.zeros(batch_size, self.hidden_size), self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and (h, c)."""
        h_BH, c_BH = several(state, 2, cell=self)
        i_BH, f_BH, g_BH, o_BH = self._gates(x_t, h_BH)
        c_BH = torch.sigmoid(f_BH) * c_BH + torch.sigmoid(i_BH) * torch.tanh(g_BH)
        h_BH = torch.sigmoid(o_BH) * torch.tanh(self.norm_c(c_BH))
        return h_BH, (h_BH, c_BH)

    def coarse_step(self, x_t: torch.Tensor, state: State, dt: float) -> State:
        """An implicit step of dc/dt = i g - (1 - f) c over `dt` steps, gates as they are at its start."""
        h_BH, c_BH = several(state, 2, cell=self)
        i_BH, f_BH, g_BH, o_BH = self._gates(x_t, h_BH)
        written_BH = dt * (torch.sigmoid(i_BH) * torch.tanh(g_BH))
        c_BH = (c_BH + written_BH) / (1 + dt * (1 - torch.sigmoid(f_BH)))
        return torch.sigmoid(o_BH) * torch.tanh(self.norm_c(c_BH)), c_BH

    def _gates(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gates_BG: torch.Tensor = self.norm_ih(linear(x_BF, self.weight_ih)) + self.norm_hh(linear(h_BH, self.weight_hh))
        return gates_BG.chunk(4, dim=-1)
