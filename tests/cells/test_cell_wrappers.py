"""Zoneout, exactly old or new in training and the mean in evaluation; recurrent dropout, one mask per sequence.

Shape legend: B sequences, F features, H hidden units.
"""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cells import GRU, LSTM, AttentionCell, Cell, Clockwork, Elman, RecurrentDropout, State, Zoneout
from stretto.errors import StrettoError

B, F, H = 200, 3, 40


class Doubling(Cell):
    """Its output is no part of its state, which is one tensor; it has no parameters."""

    def initial_state(self, batch_size: int) -> State:
        return self.zeros(batch_size, 2)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        assert isinstance(state, torch.Tensor)
        return 3 * state + x_t, 2 * state


def _states() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(B, F), torch.randn(B, H), torch.randn(B, H)


def _assert_rate(kept: torch.Tensor, p: float) -> None:
    spread = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.double().mean().item() - p) < 4.5 * spread
    # No row and no unit is left out of the draw.
    assert (kept.double().mean(dim=0) - p).abs().max() < 6 * math.sqrt(p * (1 - p) / len(kept))
    assert (kept.double().mean(dim=1) - p).abs().max() < 6 * math.sqrt(p * (1 - p) / kept.shape[1])


def test_in_training_a_unit_is_the_old_or_the_new_one_at_the_given_rate() -> None:
    torch.manual_seed(0)
    inner = LSTM(F, H)
    cell = Zoneout(inner, p=(0.2, 0.6))
    x_BF, h_BH, c_BH = _states()
    _, (new_h, new_c) = inner(x_BF, (h_BH, c_BH))
    y_BH, (mixed_h, mixed_c) = cell(x_BF, (h_BH, c_BH))
    assert torch.equal(y_BH, mixed_h)
    for old, new, mixed, p in ((h_BH, new_h, mixed_h, 0.2), (c_BH, new_c, mixed_c, 0.6)):
        kept = mixed == old
        assert torch.equal(mixed, torch.where(kept, old, new))
        _assert_rate(kept, p)
    # The parts of the state are drawn apart.
    both = ((mixed_h == h_BH) & (mixed_c == c_BH)).double().mean().item()
    assert abs(both - 0.12) < 0.02


def test_each_step_draws_its_own_mask() -> None:
    torch.manual_seed(0)
    cell = Zoneout(Elman(F, H), p=0.5)
    x_BF, h_BH, _ = _states()
    first, second = (cell(x_BF, h_BH)[0] == h_BH for _ in range(2))
    assert abs((first == second).double().mean().item() - 0.5) < 0.03


def test_in_evaluation_zoneout_takes_the_expectation() -> None:
    torch.manual_seed(0)
    inner = LSTM(F, H)
    cell = Zoneout(inner, p=(0.2, 0.6)).eval()
    x_BF, h_BH, c_BH = _states()
    _, (new_h, new_c) = inner(x_BF, (h_BH, c_BH))
    y_BH, (mixed_h, mixed_c) = cell(x_BF, (h_BH, c_BH))
    torch.testing.assert_close(mixed_h, 0.2 * h_BH + 0.8 * new_h)
    torch.testing.assert_close(mixed_c, 0.6 * c_BH + 0.4 * new_c)
    assert torch.equal(y_BH, mixed_h)
    assert torch.equal(cell(x_BF, (h_BH, c_BH))[0], y_BH)
    cell.train()
    mean_h = torch.stack([cell(x_BF[:5], (h_BH[:5], c_BH[:5]))[0] for _ in range(800)]).mean(dim=0)
    bound_BH = 6 * (h_BH - new_h)[:5].abs() * math.sqrt(0.2 * 0.8 / 800)
    assert ((mean_h - mixed_h[:5]).abs() <= bound_BH + 1e-5).all()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("wrapper", [Zoneout, RecurrentDropout])
def test_at_probability_0_it_is_the_cell_inside(wrapper: Callable[..., Cell], training: bool) -> None:
    torch.manual_seed(0)
    inner = LSTM(F, H)
    cell = wrapper(inner, p=0.0).train(training)
    x_BF, h_BH, c_BH = _states()
    masks = cell.initial_state(B)[2:]
    assert torch.equal(cell(x_BF, (h_BH, c_BH, *masks))[0], inner(x_BF, (h_BH, c_BH))[0])


@pytest.mark.parametrize("training", [True, False])
def test_an_output_that_is_no_state_is_left_alone(training: bool) -> None:
    cell = Zoneout(Doubling(), p=0.5).train(training)
    y, state = cell(torch.zeros(4, 1), torch.ones(4, 2))
    assert torch.equal(y, torch.full((4, 2), 3.0))
    assert isinstance(state, torch.Tensor)
    assert set(state.unique().tolist()) <= {1.0, 1.5, 2.0}


@pytest.mark.parametrize("training", [True, False])
def test_counters_and_masks_are_spared(training: bool) -> None:
    torch.manual_seed(0)
    inner = RecurrentDropout(Clockwork(F, H, periods=(1, 3)), p=0.5)
    cell = Zoneout(inner, p=0.9).train(training)
    assert cell.p == (0.9, 0.0, 0.0)
    assert cell.passive_parts == inner.passive_parts == 2
    state = cell.initial_state(4)
    for step in range(4):
        _, after = cell(torch.randn(4, F), state)
        assert after[1].tolist() == [[(step + 1) % 3]] * 4
        assert torch.equal(after[2], state[2])
        state = after


def test_remembered_states_are_spared() -> None:
    torch.manual_seed(0)
    inner = AttentionCell(F, H, memory_size=2)
    cell = Zoneout(inner, p=0.9)
    state = (torch.randn(4, H), torch.randn(4, 2, H))
    x_BF = torch.randn(4, F)
    assert torch.equal(cell(x_BF, state)[1][1], inner(x_BF, state)[1][1])


@pytest.mark.parametrize("wrapper", [Zoneout, RecurrentDropout])
@pytest.mark.parametrize("p", [-0.1, 1, 1.0, 1.5, float("nan"), "0.5", True, None, (0.1,), (0.1, 0.2, 0.3), (0.1, 2.0)])
def test_probabilities_outside_0_to_1_are_refused(wrapper: Callable[..., Cell], p: object) -> None:
    with pytest.raises(StrettoError, match="p="):
        wrapper(LSTM(F, H), p=p)


def test_only_cells_can_be_wrapped() -> None:
    for wrapper in (Zoneout, RecurrentDropout):
        with pytest.raises(StrettoError, match="got GRUCell in the place of a cell"):
            wrapper(torch.nn.GRUCell(2, 3))
        with pytest.raises(StrettoError, match="got the class LSTM in the place of a cell"):
            wrapper(LSTM)


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


def test_in_evaluation_dropout_is_the_cell_inside() -> None:
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


@pytest.mark.parametrize("masked", [(), (2,), (-1,), (0, 0), 0, ("h",)])
def test_parts_that_are_not_there_are_refused(masked: object) -> None:
    with pytest.raises(StrettoError, match="whose state has 2 parts"):
        RecurrentDropout(LSTM(F, H), masked=masked)
