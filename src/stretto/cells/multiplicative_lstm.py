"""An LSTM whose transition depends on the input, after Krause et al. (2016).

Shape legend: B sequences, F features, H hidden units, G = 4 H gate units.
"""

from typing import final

import torch
from torch.nn.functional import linear

from stretto.cells.cell import State
from stretto.cells.gated import AbstractGatedCell
from stretto.cells.state import several


@final
class MultiplicativeLSTM(AbstractGatedCell):
    """An LSTM that reads m = (W x) (U h), elementwise, in the place of h.

    The parameters are those of `LSTM`, with `weight_hh` applied to m, and `weight_mx` (H, F) and `weight_mh` (H, H).
    Each step has two products in a row. The state is (h, c), each (B, H); the output is h.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
    """

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, num_gates=4, bias=bias)
        self.weight_mx = self.drawn(self.hidden_size, self.input_size)
        self.weight_mh = self.drawn(self.hidden_size, self.hidden_size)

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        return self.zeros(batch_size, self.hidden_size), self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and (h, c)."""
        h_BH, c_BH = several(state, 2, cell=self)
        m_BH = linear(x_t, self.weight_mx) * linear(h_BH, self.weight_mh)
        gates_BG = linear(x_t, self.weight_ih, self.bias_ih) + linear(m_BH, self.weight_hh, self.bias_hh)
        i_BH, f_BH, g_BH, o_BH = gates_BG.chunk(4, dim=-1)
        c_BH = torch.sigmoid(f_BH) * c_BH + torch.sigmoid(i_BH) * torch.tanh(g_BH)
        h_BH = torch.sigmoid(o_BH) * torch.tanh(c_BH)
        return h_BH, (h_BH, c_BH)
