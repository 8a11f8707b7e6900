"""The gated recurrent unit of Cho et al. (2014), in both its conventions.

Shape legend: B sequences, F features, H hidden units.
"""

from typing import Literal, final

import torch
from torch.nn.functional import linear

from stretto.cells.arguments import one_of
from stretto.cells.cell import State
from stretto.cells.gated import AbstractGatedCell
from stretto.cells.state import one


@final
class GRU(AbstractGatedCell):
    """A reset gate r, an update gate z and a candidate n: h' = (1 - z) n + z h. The state and the output are h (B, H).

    With reset "after", the step of `torch.nn.GRU`, the gate scales the product with the state: n = tanh(W x + r (U h)).
    With reset "before", as first published, it scales the state: n = tanh(W x + U (r h)); each step then has two
    products in a row instead of one. The parameters are torch's either way, gates in the order r, z, n.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
        reset: "after" or "before".
    """

    def __init__(
        self, input_size: int, hidden_size: int, *, bias: bool = True, reset: Literal["after", "before"] = "after"
    ) -> None:
        super().__init__(input_size, hidden_size, num_gates=3, bias=bias)
        one_of(reset, "after", "before", name="reset", cell=self)
        self.reset = reset

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

    def carry(self, x_t: torch.Tensor, state: State) -> State:
        """How much of each unit a step keeps: the update gate z."""
        return self._gates(x_t, one(state, cell=self))[0]

    def _gates(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._reset_after(x_BF, h_BH) if self.reset == "after" else self._reset_before(x_BF, h_BH)

    def _reset_after(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        xr_BH, xz_BH, xn_BH = linear(x_BF, self.weight_ih, self.bias_ih).chunk(3, dim=-1)
        hr_BH, hz_BH, hn_BH = linear(h_BH, self.weight_hh, self.bias_hh).chunk(3, dim=-1)
        r_BH = torch.sigmoid(xr_BH + hr_BH)
        z_BH = torch.sigmoid(xz_BH + hz_BH)
        return z_BH, torch.tanh(xn_BH + r_BH * hn_BH)

    def _reset_before(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates, candidate = self.split_hh(2 * self.hidden_size, self.hidden_size)
        xr_BH, xz_BH, xn_BH = linear(x_BF, self.weight_ih, self.bias_ih).chunk(3, dim=-1)
        hr_BH, hz_BH = linear(h_BH, *gates).chunk(2, dim=-1)
        r_BH = torch.sigmoid(xr_BH + hr_BH)
        z_BH = torch.sigmoid(xz_BH + hz_BH)
        return z_BH, torch.tanh(xn_BH + linear(r_BH * h_BH, *candidate))
