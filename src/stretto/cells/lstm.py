"""Long short-term memory, after Hochreiter and Schmidhuber (1997) and Gers et al. (2000).

Shape legend: B sequences, F features, H hidden units, G = 4 H gate units.
"""

from typing import final

import torch
from torch.nn.functional import linear

from stretto.cells.cell import State
from stretto.cells.gated import AbstractGatedCell
from stretto.cells.state import several


@final
class LSTM(AbstractGatedCell):
    """c' = f c + i g, h' = o tanh(c'): the step of `torch.nn.LSTM` with its parameters, gates in the order i, f, g, o.

    The state is (h, c), each (B, H); the output is h.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
    """

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, num_gates=4, bias=bias)

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        return self.zeros(batch_size, self.hidden_size), self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and (h, c)."""
        h_BH, c_BH = several(state, 2, cell=self)
        i_BH, f_BH, g_BH, o_BH = self._gates(x_t, h_BH)
        c_BH = torch.sigmoid(f_BH) * c_BH + torch.sigmoid(i_BH) * torch.tanh(g_BH)
        h_BH = torch.sigmoid(o_BH) * torch.tanh(c_BH)
        return h_BH, (h_BH, c_BH)

    def coarse_step(self, x_t: torch.Tensor, state: State, dt: float) -> State:
        """An implicit step of dc/dt = i g - (1 - f) c over `dt` steps, gates as they are at its start."""
        h_BH, c_BH = several(state, 2, cell=self)
        i_BH, f_BH, g_BH, o_BH = self._gates(x_t, h_BH)
        written_BH = dt * (torch.sigmoid(i_BH) * torch.tanh(g_BH))
        c_BH = (c_BH + written_BH) / (1 + dt * (1 - torch.sigmoid(f_BH)))
        return torch.sigmoid(o_BH) * torch.tanh(c_BH), c_BH

    def carry(self, x_t: torch.Tensor, state: State) -> State:
        """How much of each unit a step keeps: nothing of h, and of c what the forget gate says."""
        h_BH, _ = several(state, 2, cell=self)
        return torch.zeros_like(h_BH), torch.sigmoid(self._gates(x_t, h_BH)[1])

    def _gates(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gates_BG = linear(x_BF, self.weight_ih, self.bias_ih) + linear(h_BH, self.weight_hh, self.bias_hh)
        return gates_BG.chunk(4, dim=-1)
