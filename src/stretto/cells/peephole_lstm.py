"""An LSTM whose gates see the cell, after Gers and Schmidhuber (2000).

Shape legend: B sequences, F features, H hidden units, G = 4 H gate units.
"""

from typing import final

import torch
from torch.nn.functional import linear

from stretto.cells.cell import State
from stretto.cells.gated import AbstractGatedCell
from stretto.cells.state import several


@final
class PeepholeLSTM(AbstractGatedCell):
    """An LSTM with peepholes: the gates i and f add p c of the step before, the gate o adds p c' of its own step.

    The parameters are those of `LSTM` and one vector (H) for each gate: `peephole_i`, `peephole_f`, `peephole_o`. The
    state is (h, c), each (B, H); the output is h.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
    """

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, num_gates=4, bias=bias)
        self.peephole_i = self.drawn(self.hidden_size)
        self.peephole_f = self.drawn(self.hidden_size)
        self.peephole_o = self.drawn(self.hidden_size)

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        return self.zeros(batch_size, self.hidden_size), self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and (h, c)."""
        h_BH, c_BH = several(state, 2, cell=self)
        i_BH, f_BH, g_BH, o_BH = self._gates(x_t, h_BH, c_BH)
        c_BH = f_BH * c_BH + i_BH * torch.tanh(g_BH)
        h_BH = self._read(o_BH, c_BH)
        return h_BH, (h_BH, c_BH)

    def coarse_step(self, x_t: torch.Tensor, state: State, dt: float) -> State:
        """An implicit step of dc/dt = i g - (1 - f) c over `dt` steps, i, f and g as they are at its start."""
        h_BH, c_BH = several(state, 2, cell=self)
        i_BH, f_BH, g_BH, o_BH = self._gates(x_t, h_BH, c_BH)
        c_BH = (c_BH + dt * (i_BH * torch.tanh(g_BH))) / (1 + dt * (1 - f_BH))
        return self._read(o_BH, c_BH), c_BH

    def _gates(self, x_BF: torch.Tensor, h_BH: torch.Tensor, c_BH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gates_BG = linear(x_BF, self.weight_ih, self.bias_ih) + linear(h_BH, self.weight_hh, self.bias_hh)
        i_BH, f_BH, g_BH, o_BH = gates_BG.chunk(4, dim=-1)
        i_BH = torch.sigmoid(i_BH + self.peephole_i * c_BH)
        f_BH = torch.sigmoid(f_BH + self.peephole_f * c_BH)
        return i_BH, f_BH, g_BH, o_BH

    def _read(self, o_BH: torch.Tensor, c_BH: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(o_BH + self.peephole_o * c_BH) * torch.tanh(c_BH)
