"""States and outputs of any structure and rank, inputs of any rank, and what is refused.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

from typing import Any, NamedTuple

import pytest
import torch
from parity_cells import F
from parity_oracle import Batch, assert_parity, error_of
from parity_own_cells import H, OneState
from torch import nn

import stretto
from stretto.cells import Cell
from stretto.errors import StrettoError

KERNELS = ["cpp", "eager"]


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


class Nested(OneState):
    """Tuples in tuples, one of them of one part."""

    def initial_state(self, batch_size: int) -> Any:
        return (self.zeros(batch_size, H), (self.zeros(batch_size, H),)), self.zeros(batch_size, 1)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        (h_BH, (slow_BH,)), count_B1 = state
        h_BH = self.new(x_t, h_BH + slow_BH / (1 + count_B1))
        return h_BH, ((h_BH, (0.9 * slow_BH + 0.1 * h_BH,)), count_B1 + 1)


def _layer(cell: type[Cell], **options: Any) -> stretto.RNN:
    torch.manual_seed(0)
    return stretto.RNN(cell().double(), **options)


def _x(*shape: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, dtype=torch.float64)


def test_nested_states() -> None:
    rnn = _layer(Nested)
    batch = Batch(x_BTF=_x(4, 6, F), lengths=[3, 0, 6, 2])
    assert_parity(rnn, batch)
    _, state = rnn(batch.x_BTF)
    (_, (slow_BH,)), count_B1 = state
    assert slow_BH.shape == (4, H)
    assert count_B1.tolist() == [[6]] * 4
    assert_parity(rnn, Batch(x_BTF=batch.x_BTF, lengths=batch.lengths, state=state))


@pytest.mark.parametrize("both_ways", [True, False])
def test_a_named_tuple_stays_one(both_ways: bool) -> None:
    rnn = _layer(Named, bidirectional=both_ways)
    batch = Batch(x_BTF=_x(4, 6, F), lengths=[3, 0, 6, 2])
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


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("cell", [Pictures, Sums])
def test_inputs_states_and_outputs_of_other_ranks(cell: type[Cell], backend: str) -> None:
    rnn = _layer(cell, backend=backend)
    x_BT34, lengths = _x(3, 5, 3, 4).requires_grad_(), [2, 5, 0]
    y, state_B23 = rnn(x_BT34, lengths=lengths)
    assert y.shape == ((3, 5) if cell is Sums else (3, 5, 3, 2))
    own, total, others = rnn.cells[0], y.square().sum() + state_B23.sum(), []
    for row, length in enumerate(lengths):
        state = own.initial_state(1)  # type: ignore[operator]
        for step in range(length):
            made, state = own(x_BT34[row : row + 1, step], state)
            assert error_of(y[row : row + 1, step], made) < 1e-10
            others.append(made.square().sum())
        others.append(state.sum())
        assert error_of(state_B23[row : row + 1], state) < 1e-10
        assert not y[row, length:].any()
    inputs = [x_BT34, *rnn.parameters()]
    for one, other in zip(
        torch.autograd.grad(total, inputs), torch.autograd.grad(torch.stack(others).sum(), inputs), strict=True
    ):
        assert error_of(one, other) < 1e-10


@pytest.mark.parametrize("backend", KERNELS)
def test_numbers_from_both_ways_lie_side_by_side(backend: str) -> None:
    ahead, back = Sums().double(), Sums().double()
    x_BT34 = _x(3, 5, 3, 4)
    y_BT2, _ = stretto.RNN([ahead, back], bidirectional=True, backend=backend)(x_BT34)  # type: ignore[arg-type]
    ahead_BT, _ = stretto.RNN(ahead, backend="eager")(x_BT34)
    back_BT, _ = stretto.RNN(back, backend="eager")(x_BT34.flip(1))
    assert error_of(y_BT2, torch.stack([ahead_BT, back_BT.flip(1)], dim=-1)) < 1e-10


@pytest.mark.parametrize("backend", KERNELS)
def test_whole_numbers_as_input(backend: str) -> None:
    class Reader(OneState):
        def __init__(self) -> None:
            super().__init__()
            self.letters = nn.Embedding(10, F)

        def new(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inward(self.letters(x_BF[:, 0])) + self.around(h_BH))

    torch.manual_seed(0)
    cell = Reader().double()
    del cell.input_size
    rnn = stretto.RNN(cell, backend=backend)  # type: ignore[arg-type]
    x_BT1 = torch.randint(10, (3, 5, 1))
    y_BTH, _ = rnn(x_BT1, lengths=[2, 5, 0])
    others = []
    for row, length in enumerate([2, 5, 0]):
        state = cell.initial_state(1)
        for step in range(length):
            made, state = cell(x_BT1[row : row + 1, step], state)
            assert error_of(y_BTH[row : row + 1, step], made) < 1e-10
            others.append(made.square().sum())
    inputs = list(rnn.parameters())
    ones = torch.autograd.grad(y_BTH.square().sum(), inputs)
    for one, other in zip(ones, torch.autograd.grad(torch.stack(others).sum(), inputs), strict=True):
        assert error_of(one, other) < 1e-10


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("backend", KERNELS)
def test_an_initial_state_of_another_number_of_rows_is_refused(backend: str, rows: int) -> None:
    class Stubborn(OneState):
        def initial_state(self, batch_size: int) -> Any:  # noqa: ARG002
            return self.zeros(rows, H)

    with pytest.raises(StrettoError, match="initial_state"):
        _layer(Stubborn, backend=backend)(_x(2, 3, F))


def _wrong_dtype(rnn: stretto.RNN) -> Any:
    return rnn(_x(2, 3, F).float())


def _wrong_features(rnn: stretto.RNN) -> Any:
    return rnn(_x(2, 3, F + 1))


def _wrong_state_dtype(rnn: stretto.RNN) -> Any:
    return rnn(_x(2, 3, F), torch.zeros(2, H))


def _wrong_state_rows(rnn: stretto.RNN) -> Any:
    return rnn(_x(2, 3, F), _x(3, H))


def _wrong_lengths(rnn: stretto.RNN) -> Any:
    return rnn(_x(2, 3, F), lengths=[4, 1])


@pytest.mark.parametrize("call", [_wrong_dtype, _wrong_features, _wrong_state_dtype, _wrong_state_rows, _wrong_lengths])
@pytest.mark.parametrize("backend", KERNELS)
def test_what_does_not_fit_is_refused(backend: str, call: Any) -> None:
    with pytest.raises(StrettoError):
        call(_layer(OneState, backend=backend))
