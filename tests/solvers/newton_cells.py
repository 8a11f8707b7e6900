"""Cells for Newton's method, easy and hard.

Shape legend: B sequences, F features, H hidden units.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch

import stretto

F, H = 3, 5


class TwoParts(stretto.Cell):
    """A state of several shapes: a table that mixes within its rows, and a number that leaks."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.inward = torch.nn.Linear(input_size, 6)
        self.around = torch.nn.Linear(3, 3, bias=False)

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        return self.zeros(batch_size, 2, 3), self.zeros(batch_size)

    def forward(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        table_B23, leak_B = state
        inward_B23 = self.inward(x_t).unflatten(1, (2, 3))
        table_B23 = torch.tanh(inward_B23 + 0.4 * self.around(table_B23) + 0.5 * leak_B[:, None, None])
        leak_B = 0.5 * leak_B + 0.05 * table_B23.sum(dim=(1, 2))
        return table_B23.flatten(1), (table_B23, leak_B)


class Linear(stretto.Cell):
    """h' = activation(A h + x); linear here."""

    activation: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda h_BH: h_BH)

    def __init__(self, weight_HH: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight_HH)

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return self.zeros(batch_size, len(self.weight))

    def forward(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        state = self.activation(state @ self.weight.T + x_t)
        return state, state


class Rotated(Linear):
    activation = staticmethod(torch.tanh)


class Sine(Linear):
    activation = staticmethod(torch.sin)


class WeightsAsInput(stretto.Cell):
    """h' = tanh(A_t h + b_t + b), where the input at each step is A_t, flattened, and b_t."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(0.1 * torch.randn(hidden_size))

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return self.zeros(batch_size, len(self.bias))

    def forward(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        size = len(self.bias)
        weight_BHH, shift_BH = x_t[:, : size * size].unflatten(1, (size, size)), x_t[:, size * size :]
        state = torch.tanh((weight_BHH * state[:, None, :]).sum(dim=2) + shift_BH + self.bias)
        return state, state


class Counting(Linear):
    """A state with an integer part."""

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, len(self.weight)), torch.zeros(batch_size, dtype=torch.int64)

    def forward(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        h_BH = 0.5 * state[0] + x_t + torch.sin(state[1].to(x_t.dtype))[:, None]
        return h_BH, (h_BH, state[1] + 1)


class Stateless(stretto.Cell):
    """y = tanh(x)."""

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return torch.zeros(batch_size, 0)

    def forward(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        return torch.tanh(x_t), state


class Noisy(Linear):
    """Each step adds a little noise, drawn again at every evaluation."""

    def forward(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        state = state @ self.weight.T + x_t + 3e-7 * torch.rand_like(state)
        return state, state


CELLS = {
    "gru": lambda: stretto.cells.GRU(F, H),
    "lstm": lambda: stretto.cells.LSTM(F, H),
    "elman": lambda: stretto.cells.Elman(F, H),
    "indrnn": lambda: stretto.cells.IndRNN(F, H),
    "layer-norm-lstm": lambda: stretto.cells.LayerNormLSTM(F, H),
    "recurrent-dropout": lambda: stretto.cells.RecurrentDropout(stretto.cells.GRU(F, H)),
    "two-parts": lambda: TwoParts(F),
}
CONVERGING = sorted(set(CELLS) - {"layer-norm-lstm"})


def twin(serial: stretto.RNN, **words: Any) -> stretto.RNN:
    parallel = copy.deepcopy(serial)
    parallel.solver = stretto.Newton(**words)
    return parallel


def assert_close(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-6


def counted(rnn: stretto.RNN) -> int:
    """Iterations of Newton's method, as reported."""
    said = re.match(r"(\d+) iterations?, then \d+ chunks of \d+ steps", rnn.solution.reason)
    assert said is not None, rnn.solution
    assert not rnn.solution.fell_back
    return int(said[1])
