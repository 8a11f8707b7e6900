"""What cannot be compiled, or not even traced, runs all the same and says why it is not the fastest.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

from typing import Any

import pytest
import torch
from parity_cells import F, drawn
from parity_oracle import assert_close, assert_parity, noise, tensors_in
from parity_own_cells import ODD, BatchNormed, Branching, Centred, own_layer

import stretto
from stretto.cells import Cell
from stretto.errors import StrettoError

MIXING = [Branching, BatchNormed, Centred]
"""Cells whose rows are not apart."""


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


@pytest.mark.parametrize("cell", [cell for cell in ODD if cell not in MIXING])
def test_odd_cells_equal_the_definition(cell: type[Cell]) -> None:
    rnn = own_layer(cell)
    for T, lengths, given in ((5, None, False), (6, [3, 0, 6, 2], True), (1, None, True), (2, [0, 0], True)):
        B = 3 if lengths is None else len(lengths)
        assert_parity(rnn, drawn(rnn, T=T, B=B, lengths=lengths, given=given), kernels=["auto", "eager"])


@pytest.mark.parametrize("cell", [cell for cell in ODD if cell not in MIXING])
def test_odd_cells_both_ways_in_two_layers(cell: type[Cell]) -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(cell(F).double(), num_layers=2, bidirectional=True)
    assert_parity(rnn, drawn(rnn, T=6, B=4, lengths=[3, 0, 6, 2], given=True), kernels=["auto"])


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
    ones = torch.autograd.grad(y_BTH.square().sum() + tensors_in(after)[0].sum(), inputs)
    others = torch.autograd.grad(hand_BTH.square().sum() + state.sum(), inputs)
    assert_close((y_BTH, after, *ones), (hand_BTH, state, *others))


def test_the_cell_itself_runs_where_torch_is_asked_for() -> None:
    rnn = stretto.RNN(stretto.cells.GRU(F, 3).double(), backend="torch")
    assert (rnn.explain().backend, rnn.explain().reason) == ("torch", "backend='torch' was asked for")
    assert_parity(rnn, drawn(rnn, T=6, B=4, lengths=[3, 0, 6, 2], given=True), kernels=["torch"])
