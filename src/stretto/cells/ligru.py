"""The light GRU of Ravanelli et al. (2018).

Shape legend: B sequences, F features, H hidden units.
"""

from typing import Literal, final

import torch
from torch import nn
from torch.nn.functional import linear

from stretto.cells.arguments import one_of
from stretto.cells.cell import State
from stretto.cells.gated import AbstractGatedCell
from stretto.cells.state import one


@final
class LiGRU(AbstractGatedCell):
    """A GRU without a reset gate and with a rectified candidate: h' = z h + (1 - z) relu(norm(W x) + U h).

    The paper normalises W x over the batch, which would make a sequence's result depend on its neighbours; here each
    row is normalised over its own 2 H units, or not at all. Gates are in the order z, n. The state and the output are
    h (B, H).

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases; with a norm they are its shifts.
        norm: "layer" or "none".
        eps: What the norm adds to the variance.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        norm: Literal["layer", "none"] = "layer",
        eps: float = 1e-5,
    ) -> None:
        super().__init__(input_size, hidden_size, num_gates=2, bias=bias and norm == "none")
        one_of(norm, "layer", "none", name="norm", cell=self)
        self.norm_ih = nn.LayerNorm(2 * self.hidden_size, eps=eps, bias=bias) if norm == "layer" else nn.Identity()

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        return self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and h."""
        h_BH = one(state, cell=self)
        z_BH, n_BH = self._gates(x_t, h_BH)
        h_BH = z_BH * h_BH + (1 - z_BH) * n_BH
        return h_BH, h_BH

    def coarse_step(self, x_t: torch.Tensor, state: State, dt: float) -> State:
        """An implicit step of dh/dt = (1 - z) (n - h) over `dt` steps, z and n as they are at its start."""
        h_BH = one(state, cell=self)
        z_BH, n_BH = self._gates(x_t, h_BH)
        q_BH = dt * (1 - z_BH)
        return (h_BH + q_BH * n_BH) / (1 + q_BH)

    def _gates(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        xz_BH, xn_BH = self.norm_ih(linear(x_BF, self.weight_ih, self.bias_ih)).chunk(2, dim=-1)
        hz_BH, hn_BH = linear(h_BH, self.weight_hh, self.bias_hh).chunk(2, dim=-1)
        return torch.sigmoid(xz_BH + hz_BH), torch.relu(xn_BH + hn_BH)
