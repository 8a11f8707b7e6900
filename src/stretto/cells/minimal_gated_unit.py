"""The minimal gated unit of Zhou et al. (2016).

Shape legend: B sequences, F features, H hidden units.
"""

from typing import final

import torch
from torch.nn.functional import linear

from stretto.cells.cell import State
from stretto.cells.gated import AbstractGatedCell
from stretto.cells.state import one


@final
class MinimalGatedUnit(AbstractGatedCell):
    """One gate f that both resets and updates: n = tanh(W x + U (f h)), h' = (1 - f) h + f n.

    Gates are in the order f, n. Each step has two products in a row. The state and the output are h (B, H).

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
    """

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, num_gates=2, bias=bias)

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        return self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and h."""
        h_BH = one(state, cell=self)
        f_BH, n_BH = self._gates(x_t, h_BH)
        h_BH = (1 - f_BH) * h_BH + f_BH * n_BH
        return h_BH, h_BH

    def coarse_step(self, x_t: torch.Tensor, state: State, dt: float) -> State:
        """An implicit step of dh/dt = f (n - h) over `dt` steps, f and n as they are at its start."""
        h_BH = one(state, cell=self)
        f_BH, n_BH = self._gates(x_t, h_BH)
        q_BH = dt * f_BH
        return (h_BH + q_BH * n_BH) / (1 + q_BH)

    def _gates(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, candidate = self.split_hh(self.hidden_size, self.hidden_size)
        xf_BH, xn_BH = linear(x_BF, self.weight_ih, self.bias_ih).chunk(2, dim=-1)
        f_BH = torch.sigmoid(xf_BH + linear(h_BH, *gate))
        return f_BH, torch.tanh(xn_BH + linear(f_BH * h_BH, *candidate))
