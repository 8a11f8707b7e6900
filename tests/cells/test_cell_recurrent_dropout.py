"""Recurrent dropout: one mask a sequence, of the right rate and scale, and none in evaluation.

Shape legend: B sequences, F features, H hidden units.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cells import GRU, LSTM, Clockwork, Elman, RecurrentDropout
from stretto.errors import StrettoError

B, F, H = 200, 3, 40


@settings(deadline=None, max_examples=15)
@given(p=st.floats(0.02, 0.95), seed=st.integers(0, 999))
def test_masks_are_zero_or_the_scale_at_the_given_rate(p: float, seed: int) -> None:
    torch.manual_seed(seed)
    cell = RecurrentDropout(LSTM(F, H), p=p)
    h_BH, c_BH, mask_BH = cell.initial_state(B)
    assert not h_BH.any()
    assert not c_BH.any()
    dropped = mask_BH == 0
    assert torch.equal(mask_BH, torch.where(dropped, 0.0, torch.ones_like(mask_BH) / (1 - p)))
    assert abs(dropped.double().mean().item() - p) < 5 * math.sqrt(p * (1 - p) / mask_BH.numel())
    assert not torch.equal(mask_BH, cell.initial_state(B)[2])


def test_each_sequence_has_its_own_mask() -> None:
    torch.manual_seed(0)
    mask_BH = RecurrentDropout(GRU(F, H), p=0.5).initial_state(B)[1]
    assert len({tuple(row) for row in mask_BH.tolist()}) == B


def test_a_step_is_that_of_the_cell_inside_from_the_masked_state() -> None:
    torch.manual_seed(0)
    inner = LSTM(F, H)
    cell = RecurrentDropout(inner, p=0.3)
    x_BF, h_BH, c_BH = torch.randn(B, F), torch.randn(B, H), torch.randn(B, H)
    mask_BH = cell.initial_state(B)[2]
    y_BH, (new_h, new_c, carried) = cell(x_BF, (h_BH, c_BH, mask_BH))
    expected, (expected_h, expected_c) = inner(x_BF, (h_BH * mask_BH, c_BH))
    for one, two in ((y_BH, expected), (new_h, expected_h), (new_c, expected_c), (carried, mask_BH)):
        assert torch.equal(one, two)


def test_the_mask_stays_the_same_along_a_sequence() -> None:
    torch.manual_seed(0)
    cell = RecurrentDropout(Elman(F, H), p=0.5)
    start = state = cell.initial_state(5)
    with torch.no_grad():
        for _ in range(6):
            _, state = cell(torch.randn(5, F), state)
    assert torch.equal(state[1], start[1])
    assert state[0].all()


def test_in_evaluation_it_is_the_cell_inside() -> None:
    torch.manual_seed(0)
    inner = GRU(F, H)
    cell = RecurrentDropout(inner, p=0.5)
    _, mask_BH = cell.initial_state(4)
    cell.eval()
    x_BF, h_BH = torch.randn(4, F), torch.randn(4, H)
    assert torch.equal(cell.initial_state(4)[1], torch.ones(4, H))
    y_BH, state = cell(x_BF, (h_BH, mask_BH))
    assert torch.equal(y_BH, inner(x_BF, h_BH)[0])
    assert torch.equal(state[1], mask_BH)


def test_without_dropout_it_is_the_cell_inside() -> None:
    torch.manual_seed(0)
    inner = LSTM(F, H)
    cell = RecurrentDropout(inner, p=0.0)
    x_BF = torch.randn(4, F)
    assert torch.equal(cell(x_BF, cell.initial_state(4))[0], inner(x_BF, inner.initial_state(4))[0])


def test_masked_units_pass_no_gradient() -> None:
    torch.manual_seed(0)
    cell = RecurrentDropout(Elman(F, H), p=0.5)
    _, mask_BH = cell.initial_state(3)
    h_BH = torch.randn(3, H, requires_grad=True)
    cell(torch.randn(3, F), (h_BH, mask_BH))[0].sum().backward()
    assert torch.equal(h_BH.grad != 0, mask_BH != 0)


def test_other_parts_can_be_masked_and_the_counter_is_not() -> None:
    torch.manual_seed(0)
    inner = LSTM(F, H)
    cell = RecurrentDropout(inner, p=0.5, masked=(1, 0))
    h_BH, c_BH, mask_c, mask_h = cell.initial_state(4)
    assert not torch.equal(mask_c, mask_h)
    x_BF, h_BH, c_BH = torch.randn(4, F), torch.randn(4, H), torch.randn(4, H)
    y_BH, _ = cell(x_BF, (h_BH, c_BH, mask_c, mask_h))
    assert torch.equal(y_BH, inner(x_BF, (h_BH * mask_h, c_BH * mask_c))[0])
    clockwork = RecurrentDropout(Clockwork(F, H, periods=(1, 5)), p=0.5)
    _, state = clockwork(x_BF, clockwork.initial_state(4))
    assert [part.shape for part in state] == [(4, H), (4, 1), (4, H)]
    assert state[1].tolist() == [[1.0]] * 4


def test_wrappers_nest() -> None:
    torch.manual_seed(0)
    inner = Elman(F, H)
    cell = RecurrentDropout(RecurrentDropout(inner, p=0.5), p=0.5)
    h_BH, first_BH, second_BH = torch.randn(4, H), *cell.initial_state(4)[1:]
    x_BF = torch.randn(4, F)
    y_BH, state = cell(x_BF, (h_BH, first_BH, second_BH))
    torch.testing.assert_close(y_BH, inner(x_BF, h_BH * first_BH * second_BH)[0])
    assert torch.equal(state[1], first_BH)
    assert torch.equal(state[2], second_BH)
    assert cell.passive_parts == 2


def test_resized_keeps_its_settings() -> None:
    other = RecurrentDropout(LSTM(F, H), p=0.3, masked=(1,)).resized(8)
    assert (other.p, other.masked, other.cell.weight_ih.shape) == (0.3, (1,), (4 * H, 8))


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan"), "0.5", True, None])
def test_probabilities_that_are_none_are_refused(p: object) -> None:
    with pytest.raises(StrettoError, match="p="):
        RecurrentDropout(LSTM(F, H), p=p)


@pytest.mark.parametrize("masked", [(), (2,), (-1,), (0, 0), 0, ("h",)])
def test_parts_that_are_not_there_are_refused(masked: object) -> None:
    with pytest.raises(StrettoError, match="whose state has 2 parts"):
        RecurrentDropout(LSTM(F, H), masked=masked)
