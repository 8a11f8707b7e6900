"""An LSTM with a projected output, after Sak et al. (2014).

Shape legend: B sequences, F features, H hidden units, P projected units, G = 4 H gate units.
"""

from typing import final

import torch
from torch.nn.functional import linear

from stretto.cells.arguments import positive
from stretto.cells.cell import State
from stretto.cells.gated import AbstractGatedCell
from stretto.cells.state import several
from stretto.errors import StrettoError


@final
class ProjectedLSTM(AbstractGatedCell):
    """An LSTM whose h is narrower than its cell: h' = R (o tanh(c')), as `torch.nn.LSTM(proj_size=...)`.

    The parameters are torch's: those of `LSTM` and `weight_hr` (P, H). The state is (h, c), (B, P) and (B, H); the
    output is h.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
        proj_size: P, less than H.
    """

    def __init__(self, input_size: int, hidden_size: int, *, proj_size: int, bias: bool = True) -> None:
        proj_size = positive(proj_size, name="proj_size", cell=self)
        super().__init__(input_size, hidden_size, num_gates=4, bias=bias, recurrent_size=proj_size)
        if proj_size >= self.hidden_size:
            raise StrettoError(
                f"ProjectedLSTM got proj_size={proj_size} with hidden_size={hidden_size}",
                fix="Give a proj_size below hidden_size, or use LSTM, which projects nothing.",
            )
        self.proj_size = proj_size
        self.weight_hr = self.drawn(proj_size, self.hidden_size)

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        return self.zeros(batch_size, self.proj_size), self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and (h, c)."""
        h_BP, c_BH = several(state, 2, cell=self)
        gates_BG = linear(x_t, self.weight_ih, self.bias_ih) + linear(h_BP, self.weight_hh, self.bias_hh)
        i_BH, f_BH, g_BH, o_BH = gates_BG.chunk(4, dim=-1)
        c_BH = torch.sigmoid(f_BH) * c_BH + torch.sigmoid(i_BH) * torch.tanh(g_BH)
        h_BP = linear(torch.sigmoid(o_BH) * torch.tanh(c_BH), self.weight_hr)
        return h_BP, (h_BP, c_BH)
