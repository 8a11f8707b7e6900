"""An LSTM that writes where it forgets, as compared by Greff et al. (2015).

Shape legend: B sequences, F features, H hidden units, G = 3 H gate units.
"""

from typing import final

import torch
from torch.nn.functional import linear

from stretto.cells.cell import State
from stretto.cells.gated import AbstractGatedCell
from stretto.cells.state import several


@final
class CoupledLSTM(AbstractGatedCell):
    """An LSTM with the input gate 1 - f: c' = f c + (1 - f) g. A quarter fewer parameters; gates in the order f, g, o.

    The state is (h, c), each (B, H); the output is h.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
    """

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, num_gates=3, bias=bias)

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        return self.zeros(batch_size, self.hidden_size), self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and (h, c)."""
        h_BH, c_BH = several(state, 2, cell=self)
        f_BH, g_BH, o_BH = self._gates(x_t, h_BH)
        c_BH = f_BH * c_BH + (1 - f_BH) * torch.tanh(g_BH)
        h_BH = torch.sigmoid(o_BH) * torch.tanh(c_BH)
        return h_BH, (h_BH, c_BH)

    def coarse_step(self, x_t: torch.Tensor, state: State, dt: float) -> State:
        """An implicit step of dc/dt = (1 - f) (g - c) over `dt` steps, gates as they are at its start."""
        h_BH, c_BH = several(state, 2, cell=self)
        f_BH, g_BH, o_BH = self._gates(x_t, h_BH)
        q_BH = dt * (1 - f_BH)
        c_BH = (c_BH + q_BH * torch.tanh(g_BH)) / (1 + q_BH)
        return torch.sigmoid(o_BH) * torch.tanh(c_BH), c_BH

    def _gates(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gates_BG = linear(x_BF, self.weight_ih, self.bias_ih) + linear(h_BH, self.weight_hh, self.bias_hh)
        f_BH, g_BH, o_BH = gates_BG.chunk(3, dim=-1)
        return torch.sigmoid(f_BH), g_BH, o_BH
