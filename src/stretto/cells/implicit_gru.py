"""The GRU of Moon and Cyr (2022), which takes an implicit step of the GRU's differential equation.

Shape legend: B sequences, F features, H hidden units.
"""

from typing import final

import torch
from torch.nn.functional import linear

from stretto.cells.cell import State
from stretto.cells.gated import AbstractGatedCell
from stretto.cells.state import one


@final
class ImplicitGRU(AbstractGatedCell):
    """A GRU whose step is implicit in h: h' = (h + q n) / (1 + q) with q = dt (1 - z), and dt = 1.

    r, z and n are those of a GRU (reset after the product), and so are the names and the order of the parameters; but
    n weighs q / (1 + q) here, at most a half, so that weights trained for the one do not fit the other. Grids of
    `stretto.Multigrid` differ in dt alone. The state and the output are h (B, H).

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
    """

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, num_gates=3, bias=bias)

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        return self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and h."""
        h_BH = self._stepped(x_t, one(state, cell=self), 1.0)
        return h_BH, h_BH

    def coarse_step(self, x_t: torch.Tensor, state: State, dt: float) -> State:
        """The same step over `dt` steps at once."""
        return self._stepped(x_t, one(state, cell=self), dt)

    def _stepped(self, x_BF: torch.Tensor, h_BH: torch.Tensor, dt: float) -> torch.Tensor:
        xr_BH, xz_BH, xn_BH = linear(x_BF, self.weight_ih, self.bias_ih).chunk(3, dim=-1)
        hr_BH, hz_BH, hn_BH = linear(h_BH, self.weight_hh, self.bias_hh).chunk(3, dim=-1)
        r_BH = torch.sigmoid(xr_BH + hr_BH)
        q_BH = dt * (1 - torch.sigmoid(xz_BH + hz_BH))
        n_BH = torch.tanh(xn_BH + r_BH * hn_BH)
        return (h_BH + q_BH * n_BH) / (1 + q_BH)
