"""States and outputs of any structure and rank, inputs of any rank, and what is refused.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from parity_oracle import KERNELS, Batch, assert_close, assert_parity, noise
from parity_own_cells import H, OneState, own_layer
from torch import nn

import stretto
from cell_settings import F
from stretto.cells import Cell
from stretto.errors import StrettoError


class Memory(NamedTuple):
    """A state with names."""

    hidden: torch.Tensor
    slow: torch.Tensor


class Named(OneState):
    """Reads its state by name."""

    def initial_state(self, batch_size: int) -> Any:
        return Memory(self.zeros(batch_size, H), self.zeros(batch_size, H))

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.new(x_t, state.hidden + state.slow)
        return h_BH, Memory(hidden=h_BH, slow=0.9 * state.slow + 0.1 * h_BH)


@pytest.mark.parametrize("both_ways", [True, False])
def test_a_named_tuple_stays_one(both_ways: bool) -> None:
    rnn = own_layer(Named, bidirectional=both_ways)
    batch = Batch(x_BTF=noise(4, 6, F), lengths=[3, 0, 6, 2])
    assert_parity(rnn, batch)
    _, state = rnn(batch.x_BTF, lengths=batch.lengths)
    for part in state if both_ways else [state]:
        assert isinstance(part, Memory)
        assert part.slow.shape == (4, H)
    _, again = rnn(batch.x_BTF, state)
    assert isinstance(again[0] if both_ways else again, Memory)


class Pictures(Cell):
    """Pictures in, a matrix as state, a matrix or one number a step out."""

    flat = False

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.around = nn.Linear(12, 6), nn.Linear(6, 6)

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, 2, 3)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        new_B23 = torch.tanh(self.inward(x_t.flatten(1)) + self.around(state.flatten(1))).view(-1, 2, 3)
        return (new_B23.sum(dim=(1, 2)) if self.flat else new_B23.transpose(1, 2)), new_B23


class Sums(Pictures):
    """One number a step."""

    flat = True


class Reader(OneState):
    """Whole numbers in, each of which stands for a vector."""

    def __init__(self) -> None:
        super().__init__()
        del self.input_size
        self.letters = nn.Embedding(10, F)

    def new(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inward(self.letters(x_BF[:, 0])) + self.around(h_BH))


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("cell", "x", "shape"),
    [
        (Pictures, noise(3, 5, 3, 4), (3, 5, 3, 2)),
        (Sums, noise(3, 5, 3, 4), (3, 5)),
        (Reader, torch.arange(15).reshape(3, 5, 1) % 10, (3, 5, H)),
    ],
)
def test_inputs_states_and_outputs_of_other_ranks_and_kinds(
    cell: type[Cell], x: torch.Tensor, shape: tuple[int, ...], backend: str
) -> None:
    rnn = own_layer(cell, backend=backend)
    x, lengths = x.clone().requires_grad_(x.is_floating_point()), [2, 5, 0]
    y, state_B = rnn(x, lengths=lengths)
    assert y.shape == shape
    own, total, others = rnn.cells[0], y.square().sum() + state_B.sum(), []
    for row, length in enumerate(lengths):
        state = own.initial_state(1)
        for step in range(length):
            made, state = own(x[row : row + 1, step], state)
            assert_close([y[row : row + 1, step]], [made])
            others.append(made.square().sum())
        others.append(state.sum())
        assert_close([state_B[row : row + 1]], [state])
        assert not y[row, length:].any()
    inputs = [tensor for tensor in (x, *rnn.parameters()) if tensor.requires_grad]
    assert_close(torch.autograd.grad(total, inputs), torch.autograd.grad(torch.stack(others).sum(), inputs))


@pytest.mark.parametrize("backend", KERNELS)
def test_numbers_from_both_ways_lie_side_by_side(backend: str) -> None:
    ahead, back = Sums().double(), Sums().double()
    x_BT34 = noise(3, 5, 3, 4)
    y_BT2, _ = stretto.RNN([ahead, back], bidirectional=True, backend=backend)(x_BT34)  # type: ignore[arg-type]
    ahead_BT, _ = stretto.RNN(ahead, backend="eager")(x_BT34)
    back_BT, _ = stretto.RNN(back, backend="eager")(x_BT34.flip(1))
    assert_close([y_BT2], [torch.stack([ahead_BT, back_BT.flip(1)], dim=-1)])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("backend", KERNELS)
def test_an_initial_state_of_another_number_of_rows_is_refused(backend: str, rows: int) -> None:
    class Stubborn(OneState):
        def initial_state(self, batch_size: int) -> Any:  # noqa: ARG002
            return self.zeros(rows, H)

    with pytest.raises(StrettoError, match="initial_state"):
        own_layer(Stubborn, backend=backend)(noise(2, 3, F))


REFUSED: dict[str, Callable[[stretto.RNN], Any]] = {
    "dtype": lambda rnn: rnn(noise(2, 3, F).float()),
    "features": lambda rnn: rnn(noise(2, 3, F + 1)),
    "state-dtype": lambda rnn: rnn(noise(2, 3, F), torch.zeros(2, H)),
    "state-rows": lambda rnn: rnn(noise(2, 3, F), noise(3, H)),
    "lengths": lambda rnn: rnn(noise(2, 3, F), lengths=[4, 1]),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("backend", KERNELS)
def test_what_does_not_fit_is_refused(backend: str, what: str) -> None:
    with pytest.raises(StrettoError):
        REFUSED[what](own_layer(OneState, backend=backend))
