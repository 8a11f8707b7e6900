"""Cells that no loop is made of, or no compiled one: they must run all the same, and say why they are not the fastest.

Shape legend: B sequences, F features, H hidden units.
"""

from typing import Any

import torch
from parity_cells import F
from parity_own_cells import H, OneState, TwoStates
from torch import nn


class Counting(OneState):
    """A step counter of whole numbers."""

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, H), torch.zeros(batch_size, dtype=torch.long)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH, count_B = state
        h_BH = self.new(x_t, h_BH / (1 + count_B[:, None]))
        return h_BH, (h_BH, count_B + 1)


class Switch(OneState):
    """A truth value that is turned over at each step."""

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, H), torch.zeros(batch_size, 1, dtype=torch.bool)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH, on_B1 = state
        h_BH = torch.where(on_B1, self.new(x_t, h_BH), h_BH - x_t[:, :1])
        return h_BH, (h_BH, ~on_B1)


class Branching(OneState):
    """A branch that the data decide."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state)
        if h_BH.sum() > 0:
            h_BH = 0.5 * h_BH
        return h_BH, h_BH


class BatchNormed(OneState):
    """A norm over the batch, which mixes rows."""

    def __init__(self, input_size: int = F) -> None:
        super().__init__(input_size)
        self.norm = nn.BatchNorm1d(H, track_running_stats=False)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = torch.tanh(self.norm(self.inward(x_t) + self.around(state)))
        return h_BH, h_BH


class Centred(OneState):
    """The mean of the batch is taken off, behind the loop."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state)
        return h_BH - h_BH.mean(dim=0), h_BH


class OverwritesState(TwoStates):
    """Writes into the state that it was given."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state[0])
        memory_BH = state[1].clone()
        memory_BH[:, 0] = h_BH[:, 1]
        return h_BH + memory_BH, (h_BH, memory_BH)


class Sorted(OneState):
    """An operator that no code is generated for."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = torch.sort(self.new(x_t, state), dim=1).values
        return h_BH, h_BH


class Gamma(OneState):
    """An operator within a row that no code is generated for."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = torch.lgamma(2 + self.new(x_t, state))
        return h_BH, h_BH
