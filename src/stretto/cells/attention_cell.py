"""A cell that attends over its own past: attention inside the time loop.

Shape legend: B sequences, F features, H hidden units, M remembered states, G = 3 H gate units.
"""

import math
from typing import Final, final

import torch
from torch.nn.functional import linear

from stretto.cells.arguments import positive
from stretto.cells.cell import State
from stretto.cells.gated import AbstractGatedCell
from stretto.cells.state import several


@final
class AttentionCell(AbstractGatedCell):
    """A GRU (reset after the product) that also reads a mixture of its last M states.

    The query Q h scores each remembered state, softmax turns the scores into shares, and the mixture, times
    `weight_read` (3 H, H), is added to the input's side of all gates. Before the first M steps the free places hold
    zeros, which take part. The state is (h, memory), (B, H) and (B, M, H), the oldest first; the output is h.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
        memory_size: M.
    """

    passive_parts: Final = 1

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, memory_size: int = 8) -> None:
        super().__init__(input_size, hidden_size, num_gates=3, bias=bias)
        self.memory_size = positive(memory_size, name="memory_size", cell=self)
        self.weight_query = self.drawn(self.hidden_size, self.hidden_size)
        self.weight_read = self.drawn(3 * self.hidden_size, self.hidden_size)

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        memory_BMH = self.zeros(batch_size, self.memory_size, self.hidden_size)
        return self.zeros(batch_size, self.hidden_size), memory_BMH

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and (h, memory)."""
        h_BH, memory_BMH = several(state, 2, cell=self)
        query_B1H = linear(h_BH, self.weight_query).unsqueeze(1)
        scores_BM = (memory_BMH * query_B1H).sum(dim=-1) / math.sqrt(self.hidden_size)
        shares_BM = torch.softmax(scores_BM, dim=-1)
        read_BH = (memory_BMH * shares_BM.unsqueeze(-1)).sum(dim=1)

        inward_BG = linear(x_t, self.weight_ih, self.bias_ih) + linear(read_BH, self.weight_read)
        xr_BH, xz_BH, xn_BH = inward_BG.chunk(3, dim=-1)
        hr_BH, hz_BH, hn_BH = linear(h_BH, self.weight_hh, self.bias_hh).chunk(3, dim=-1)
        r_BH = torch.sigmoid(xr_BH + hr_BH)
        z_BH = torch.sigmoid(xz_BH + hz_BH)
        n_BH = torch.tanh(xn_BH + r_BH * hn_BH)
        h_BH = (1 - z_BH) * n_BH + z_BH * h_BH
        return h_BH, (h_BH, torch.cat([memory_BMH[:, 1:], h_BH.unsqueeze(1)], dim=1))
