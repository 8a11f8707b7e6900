"""Numbers that others have published for cells so small that they can be worked out by hand, and sizes others check at.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

from typing import Any

import pytest
import torch
from parity_oracle import KERNELS
from torch import nn

import stretto
from stretto.cells import Cell
from stretto.state import flatten


class OneState(Cell):
    """h' = x K + h R with all weights one, the test cell of Keras: every unit is sum(x) + H h."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.kernel = nn.Parameter(torch.ones(input_size, hidden_size))
        self.recurrent_kernel = nn.Parameter(torch.ones(hidden_size, hidden_size))

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = x_t @ self.kernel + state @ self.recurrent_kernel
        return h_BH, h_BH


class TwoStates(OneState):
    """Two states of the same kind; the output is their sum."""

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, self.hidden_size), self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        one_BH, two_BH = (x_t @ self.kernel + part @ self.recurrent_kernel for part in state)
        return one_BH + two_BH, (one_BH, two_BH)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("cell", "factor"), [(OneState, 1), (TwoStates, 2)])
def test_states_of_ones(cell: type[OneState], factor: int, backend: Any) -> None:
    """Ones of 3 features, 2 units: 3 + 2 * 0 = 3, then 3 + 2 * 3 = 9, 21 and 45. Two states give twice as much.

    Ones of 2 features from a state of 1: 2 + 2 * 1 = 4, 2 + 2 * 4 = 10, 2 + 2 * 10 = 22.
    """
    rnn = stretto.RNN(cell(3, 2), backend=backend)
    y_BTH, state = rnn(torch.ones(1, 2, 3))
    assert (y_BTH / factor).tolist() == [[[3, 3], [9, 9]]]
    assert [part.tolist() for part in flatten(state)] == [[[9, 9]]] * factor
    y_BTH, state = rnn(torch.ones(1, 2, 3), state)
    assert (y_BTH / factor).tolist() == [[[21, 21], [45, 45]]]
    assert [part.tolist() for part in flatten(state)] == [[[45, 45]]] * factor
    narrow = stretto.RNN(cell(2, 2), backend=backend)
    ones_BH = torch.ones(2, 2)
    y_BTH, state = narrow(torch.ones(2, 3, 2), ones_BH if factor == 1 else (ones_BH, ones_BH))
    assert (y_BTH[..., 0] / factor).tolist() == [[4, 10, 22]] * 2
    assert [part.tolist() for part in flatten(state)] == [[[22, 22]] * 2] * factor


@pytest.mark.parametrize("backend", KERNELS)
def test_gradients_of_ones(backend: str) -> None:
    """The sum of h2 over units u is sum k_fu x2_f + sum r_vu h1_v, where h1_v = sum k_fv x1_f = 3.

    So a weight k counts once at step 2 and, through two r, twice at step 1: 3. A weight r counts h1 = 3. A feature of x
    reaches two units at step 2, and two times two by way of step 1.
    """
    rnn = stretto.RNN(OneState(3, 2), backend=backend)  # type: ignore[arg-type]
    x_BTF = torch.ones(1, 2, 3, requires_grad=True)
    _, h_BH = rnn(x_BTF)
    h_BH.sum().backward()
    cell = rnn.cells[0]
    assert cell.get_parameter("kernel").grad.tolist() == [[3, 3]] * 3  # type: ignore[union-attr]
    assert cell.get_parameter("recurrent_kernel").grad.tolist() == [[3, 3]] * 2  # type: ignore[union-attr]
    assert x_BTF.grad is not None
    assert x_BTF.grad.tolist() == [[[4, 4, 4], [2, 2, 2]]]


@pytest.mark.parametrize("backend", KERNELS)
def test_ragged_ones_backwards(backend: str) -> None:
    """One step of ones gives 3 either way; of two, the backward direction has 9 at the first and 3 at the second."""
    rnn = stretto.RNN([OneState(3, 2), OneState(3, 2)], bidirectional=True, backend=backend)  # type: ignore[arg-type]
    y_BTH, (ahead_BH, back_BH) = rnn(torch.ones(3, 2, 3), lengths=[1, 2, 0])
    assert y_BTH[..., [0, 2]].tolist() == [[[3, 3], [0, 0]], [[3, 9], [9, 3]], [[0, 0], [0, 0]]]
    assert ahead_BH[:, 0].tolist() == back_BH[:, 0].tolist() == [3, 9, 0]
