"""The independently recurrent network of Li et al. (2018).

Shape legend: B sequences, F features, H hidden units.
"""

import math
from typing import Literal, final

import torch
from torch import nn
from torch.nn.functional import linear

from stretto.cells.arguments import one_of, positive
from stretto.cells.cell import Cell, State
from stretto.cells.state import one


@final
class IndRNN(Cell):
    """h' = relu(W x + u h + b) with u h elementwise: no unit sees another but through the layers above.

    The parameters are `weight_ih` (H, F), `weight_hh` (H), drawn from 0 to 1, and `bias_ih` (H). The state and the
    output are h (B, H).

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there is a bias.
        nonlinearity: "relu" or "tanh".
    """

    bias_ih: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        nonlinearity: Literal["relu", "tanh"] = "relu",
    ) -> None:
        super().__init__()
        self.input_size = positive(input_size, name="input_size", cell=self)
        self.hidden_size = positive(hidden_size, name="hidden_size", cell=self)
        one_of(nonlinearity, "relu", "tanh", name="nonlinearity", cell=self)
        self.nonlinearity = nonlinearity
        bound = 1.0 / math.sqrt(self.hidden_size)
        self.weight_ih = nn.Parameter(torch.empty(self.hidden_size, self.input_size).uniform_(-bound, bound))
        self.weight_hh = nn.Parameter(torch.empty(self.hidden_size).uniform_(0, 1))
        self.register_parameter("bias_ih", nn.Parameter(torch.zeros(self.hidden_size)) if bias else None)

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        return self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and h."""
        h_BH = one(state, cell=self)
        sum_BH = linear(x_t, self.weight_ih, self.bias_ih) + self.weight_hh * h_BH
        h_BH = torch.tanh(sum_BH) if self.nonlinearity == "tanh" else torch.relu(sum_BH)
        return h_BH, h_BH
