"""The simple recurrent network of Elman (1990).

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
class Elman(AbstractGatedCell):
    """h' = tanh(W x + U h + b), the step of `torch.nn.RNN` with its parameters. The state and the output are h (B, H).

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
        nonlinearity: "tanh" or "relu".
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
    ) -> None:
        super().__init__(input_size, hidden_size, num_gates=1, bias=bias)
        one_of(nonlinearity, "tanh", "relu", name="nonlinearity", cell=self)
        self.nonlinearity = nonlinearity

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        return self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and h."""
        h_BH = one(state, cell=self)
        sum_BH = linear(x_t, self.weight_ih, self.bias_ih) + linear(h_BH, self.weight_hh, self.bias_hh)
        h_BH = torch.tanh(sum_BH) if self.nonlinearity == "tanh" else torch.relu(sum_BH)
        return h_BH, h_BH
