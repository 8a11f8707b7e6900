"""Cells that users might write equal the definition, and are compiled; where they cannot be, the reason is given.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

from typing import Any

import parity_own_cells
import pytest
import torch
from parity_cells import drawn
from parity_oracle import (
    KERNELS,
    Batch,
    assert_close,
    assert_parity,
    assert_same_bits,
    error_of,
    errors_of,
    expected,
    found,
    noise,
)
from parity_own_cells import (
    ODD,
    BatchNormed,
    Branching,
    Centred,
    ConstantState,
    DelayLine,
    H,
    LearnedStart,
    LoopBehindLoop,
    Noisy,
    OldState,
    OneState,
    PureDelay,
    own_layer,
)
from torch import nn

import stretto
from cell_settings import F
from stretto.cells import LSTM, Cell
from stretto.errors import StrettoError
from stretto.state import flatten

OWN: list[type[Cell]] = [
    kind
    for _, kind in sorted(vars(parity_own_cells).items())
    if isinstance(kind, type)
    and issubclass(kind, Cell)
    and kind.__module__ == parity_own_cells.__name__
    and kind not in {*ODD, OneState, parity_own_cells.TwoStates, Noisy}
]
"""All that are compiled and draw no random numbers."""
MIXING: list[type[Cell]] = [Branching, BatchNormed, Centred]
"""Cells whose rows depend on each other."""
ODD_ROWS = [cell for cell in ODD if cell not in MIXING]


@pytest.mark.parametrize("cell", [*OWN, *ODD_ROWS])
def test_cells_equal_the_definition_and_are_compiled_where_possible(cell: type[Cell]) -> None:
    rnn = own_layer(cell)
    for T, lengths, given in ((5, None, False), (6, [3, 0, 6, 2], True), (1, None, True), (2, [0, 0], True)):
        B = 3 if lengths is None else len(lengths)
        assert_parity(rnn, drawn(rnn, T=T, B=B, lengths=lengths, given=given), kernels=["auto", "eager"])
    rnn.backend = "auto"
    explanation = rnn.explain()
    assert explanation.backend == (ODD[cell][0] if cell in ODD else "cpp")
    assert bool(explanation.reason) == (cell in ODD)


@pytest.mark.parametrize("cell", [ConstantState, DelayLine, LoopBehindLoop, OldState, LearnedStart, *ODD_ROWS])
def test_cells_both_ways_in_two_layers(cell: type[Cell]) -> None:
    torch.manual_seed(0)
    # The states of a delay line are as wide as the input, which is fixed.
    rnn = stretto.RNN(cell(F).double(), num_layers=1 if cell is DelayLine else 2, bidirectional=True)
    assert_parity(rnn, drawn(rnn, T=6, B=4, lengths=[3, 0, 6, 2], given=True), kernels=["auto", "eager"])


@pytest.mark.parametrize("cell", ODD)
def test_the_reason_is_reported_and_insisting_on_compiled_code_is_refused(cell: type[Cell]) -> None:
    backend, word = ODD[cell]
    rnn = own_layer(cell)
    explanation = rnn.explain()
    assert explanation.backend == backend
    assert word in explanation.reason
    rnn.backend = "cpp"
    with pytest.raises(StrettoError, match=f"no code can be generated for {cell.__name__}") as caught:
        rnn(torch.zeros(2, 3, F, dtype=torch.float64))
    assert word in str(caught.value)


@pytest.mark.parametrize("lengths", [None, [6, 6, 4, 2]])
@pytest.mark.parametrize("cell", MIXING)
def test_rows_that_mix_are_those_of_the_same_step(cell: type[Cell], lengths: list[int] | None) -> None:
    """With rows that see each other, a step is one call with all sequences that have not ended."""
    rnn = own_layer(cell)
    x_BTF = noise(4, 6, F).requires_grad_()
    y_BTH, after = rnn(x_BTF, lengths=lengths)
    state: Any = rnn.cells[0].initial_state(4)  # type: ignore[operator]
    hand_BTH = torch.zeros_like(y_BTH)
    for t in range(6):
        going = 4 if lengths is None else sum(length > t for length in lengths)
        if going == 0:
            break
        made_BH, new_BH = rnn.cells[0](x_BTF[:going, t], state[:going])
        state = torch.cat([new_BH, state[going:]])
        padded_BH = torch.cat([made_BH, torch.zeros_like(state[going:])])
        hand_BTH = torch.cat([hand_BTH[:, :t], padded_BH[:, None], hand_BTH[:, t + 1 :]], dim=1)
    inputs = [x_BTF, *rnn.parameters()]
    ones = torch.autograd.grad(y_BTH.square().sum() + flatten(after)[0].sum(), inputs)
    others = torch.autograd.grad(hand_BTH.square().sum() + state.sum(), inputs)
    assert_close((y_BTH, after, *ones), (hand_BTH, state, *others))


def test_the_cell_itself_runs_where_torch_is_asked_for() -> None:
    rnn = stretto.RNN(stretto.cells.GRU(F, 3).double(), backend="torch")
    assert (rnn.explain().backend, rnn.explain().reason) == ("torch", "backend='torch' was asked for")
    assert_parity(rnn, drawn(rnn, T=6, B=4, lengths=[3, 0, 6, 2], given=True), kernels=["torch"])


@pytest.mark.parametrize("backend", KERNELS)
def test_what_nothing_depends_on_gets_no_gradient(backend: str) -> None:
    """As when the cell is called by hand: None, not zeros."""

    class UnusedParameter(OneState):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(3, 3)

    rnn = own_layer(UnusedParameter, backend=backend)
    y_BTH, _ = rnn(torch.randn(2, 3, F, dtype=torch.float64))
    y_BTH.sum().backward()
    graded = {name for name, parameter in rnn.cells[0].named_parameters() if parameter.grad is not None}
    assert graded == {"inward.weight", "inward.bias", "around.weight", "around.bias"}


@pytest.mark.parametrize("both_ways", [True, False])
def test_the_same_cell_twice(both_ways: bool) -> None:
    """Tied layers, or tied directions: the gradient is the sum of both."""
    torch.manual_seed(0)
    cell = LSTM(F, F).double()
    rnn = stretto.RNN([cell, cell], num_layers=1 if both_ways else 2, bidirectional=both_ways)
    results = assert_parity(rnn, drawn(rnn, T=6, B=4, lengths=[3, 0, 6, 2], given=True))
    assert len(results["cpp"].gradients) == 1 + 4 + 4


def test_a_parameter_of_two_cells() -> None:
    torch.manual_seed(0)
    one, other = OneState(F).double(), OneState(H).double()
    other.around.weight = one.around.weight
    rnn = stretto.RNN([one, other], num_layers=2)
    assert_parity(rnn, drawn(rnn, T=6, B=4, lengths=[3, 0, 6, 2]))


def test_weights_changed_in_place_are_seen_at_the_next_call() -> None:
    rnn = own_layer(OneState)
    batch = drawn(rnn, T=4, B=3)
    before = found(rnn, batch)
    optimiser = torch.optim.SGD(rnn.parameters(), lr=0.5)
    rnn(batch.x_BTF)[0].square().sum().backward()
    optimiser.step()
    assert_parity(rnn, batch)
    assert error_of(found(rnn, batch).values["y"], before.values["y"]) > 0.01


def test_weights_changed_between_forward_and_backward_are_noticed() -> None:
    rnn = own_layer(OneState)
    y_BTH, _ = rnn(torch.randn(2, 3, F, dtype=torch.float64))
    with torch.no_grad():
        rnn.cells[0].get_parameter("around.weight").add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y_BTH.sum().backward()


@pytest.mark.parametrize("training", [True, False])
def test_random_numbers_of_a_step(training: bool) -> None:
    rnn = own_layer(Noisy, backend="cpp").train(training)
    batch = drawn(rnn, T=6, B=4, lengths=[3, 0, 6, 2])
    compiled = found(rnn, batch, seed=5)
    assert_same_bits(compiled, found(rnn, batch, seed=5))
    assert error_of(found(rnn, batch, seed=6).values["y"], compiled.values["y"]) > 0.01
    rnn.backend = "eager"
    errors = errors_of(compiled, found(rnn, batch, seed=5))
    assert max(errors.values()) < 1e-10, errors


def test_noise_is_drawn_anew_for_each_step_and_sequence() -> None:
    class Noise(PureDelay):
        def forward(self, x_t: torch.Tensor, state: Any) -> Any:
            return self.gain_F + torch.randn_like(x_t), state

    rnn = own_layer(Noise)
    with torch.no_grad():
        rnn.cells[0].get_parameter("gain_F").zero_()
    y_BTF, _ = rnn(torch.zeros(40, 50, F, dtype=torch.float64))
    assert len(y_BTF.unique()) == 40 * 50 * F
    # The mean of 10,000 normal numbers lies within 0.05 of zero but once in two million draws.
    assert abs(y_BTF.mean().item()) < 0.05
    assert abs(y_BTF.std().item() - 1) < 0.05


@pytest.mark.parametrize("backend", KERNELS)
def test_dropout_inside_a_step_drops_its_share(backend: str) -> None:
    class Dropping(OneState):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.25)

        def forward(self, x_t: torch.Tensor, state: Any) -> Any:
            h_BH = self.drop(self.new(x_t, state))
            return h_BH, h_BH

    rnn = own_layer(Dropping, backend=backend)
    batch = Batch(x_BTF=noise(30, 40, F))
    share = (rnn(batch.x_BTF)[0] == 0).double().mean().item()
    assert abs(share - 0.25) < 0.03
    rnn.eval()
    assert max(errors_of(found(rnn, batch), expected(rnn, batch)).values()) < 1e-10


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_torch_cells_are_taken_as_they_are(kind: type[nn.RNNCellBase]) -> None:
    torch.manual_seed(0)
    cell = kind(F, H).double()  # type: ignore[call-arg]
    rnn = stretto.RNN(cell)
    x_BTF = noise(3, 4, F)
    y_BTH, _ = rnn(x_BTF, lengths=[2, 4, 1])
    y_BTH.sum().backward()
    for row, length in enumerate([2, 4, 1]):
        state, made = None, []
        for x_F in x_BTF[row, :length]:
            state = cell(x_F[None], state)
            made.append(state[0] if kind is nn.LSTMCell else state)
        assert_close([y_BTH[row, :length]], [torch.cat(made)])
        assert not y_BTH[row, length:].any()
    assert cell.weight_hh.grad is not None
