"""The clockwork network: which units move when, who reads whom, and the count of steps.

Shape legend: B sequences, F features, H hidden units, T steps.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cells import Clockwork, Elman
from stretto.errors import StrettoError

PERIODS = st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True).map(sorted)


def _by_hand(cell: Clockwork, x_TF: list[list[float]]) -> list[list[float]]:
    """Unit by unit, with the true step and without a mask: forbidden weights are never touched."""
    size, modules = cell.hidden_size, len(cell.periods)
    weight_ih, weight_hh = cell.weight_ih.tolist(), cell.weight_hh.tolist()
    bias = [a + b for a, b in zip(cell.bias_ih.tolist(), cell.bias_hh.tolist(), strict=True)]
    h, states = [0.0] * size, []
    for step, x_F in enumerate(x_TF):
        new = list(h)
        for unit in range(size):
            module = unit * modules // size
            if step % cell.periods[module]:
                continue
            total = bias[unit] + sum(w * v for w, v in zip(weight_ih[unit], x_F, strict=True))
            for other in range(module * size // modules, size):
                total += weight_hh[unit][other] * h[other]
            new[unit] = math.tanh(total)
        h = new
        states.append(h)
    return states


@settings(deadline=None, max_examples=12)
@given(periods=PERIODS, each=st.integers(1, 3), seed=st.integers(0, 99))
def test_it_follows_its_equations_over_more_than_a_cycle(periods: list[int], each: int, seed: int) -> None:
    torch.manual_seed(seed)
    cell = Clockwork(3, each * len(periods), periods=periods).double()
    x_TBF = torch.randn(2 * math.lcm(*periods) % 40 + 7, 2, 3, dtype=torch.float64)
    expected = [_by_hand(cell, x_TBF[:, row].tolist()) for row in range(2)]
    state = cell.initial_state(2)
    for step, x_BF in enumerate(x_TBF):
        y_BH, state = cell(x_BF, state)
        wanted_BH = torch.tensor([expected[row][step] for row in range(2)], dtype=torch.float64)
        torch.testing.assert_close(y_BH, wanted_BH, rtol=1e-12, atol=1e-12)
        assert state[1].tolist() == [[(step + 1) % math.lcm(*periods)]] * 2


@settings(deadline=None, max_examples=15)
@given(periods=PERIODS)
def test_units_off_their_tick_do_not_change_and_the_others_do(periods: list[int]) -> None:
    torch.manual_seed(0)
    cell = Clockwork(2, 2 * len(periods), periods=periods)
    state = cell.initial_state(3)
    for step in range(8):
        before_BH = state[0]
        _, state = cell(torch.randn(3, 2), state)
        for module, period in enumerate(periods):
            units = slice(2 * module, 2 * module + 2)
            if step % period:
                assert torch.equal(state[0][:, units], before_BH[:, units])
            else:
                assert (state[0][:, units] != before_BH[:, units]).all()


def test_slow_modules_never_hear_fast_ones() -> None:
    torch.manual_seed(0)
    cell = Clockwork(2, 9, periods=(1, 3, 9)).double()
    x_BF, count_B1 = torch.randn(1, 2, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    h_BH = torch.randn(1, 9, dtype=torch.float64)
    jacobian_HH = torch.autograd.functional.jacobian(lambda h: cell(x_BF, (h, count_B1))[0], h_BH)[0, :, 0]
    for to, source in itertools.product(range(3), repeat=2):
        block = jacobian_HH[3 * to : 3 * to + 3, 3 * source : 3 * source + 3]
        assert (block != 0).all() if source >= to else not block.any()


def test_one_period_of_one_step_is_an_elman_network() -> None:
    torch.manual_seed(0)
    cell, elman = Clockwork(3, 4, periods=(1,)), Elman(3, 4)
    elman.load_state_dict(cell.state_dict())
    x_BF, h_BH = torch.randn(2, 3), torch.randn(2, 4)
    assert torch.equal(cell(x_BF, (h_BH, torch.zeros(2, 1)))[0], elman(x_BF, h_BH)[0])


def test_rows_may_be_at_different_steps() -> None:
    torch.manual_seed(0)
    cell = Clockwork(2, 4, periods=(2, 3))
    x_BF, h_BH = torch.randn(2, 2), torch.randn(2, 4)
    y_BH, (_, count_B1) = cell(x_BF, (h_BH, torch.tensor([[3.0], [5.0]])))
    assert torch.equal(y_BH[0, :2], h_BH[0, :2])
    assert (y_BH[0, 2:] != h_BH[0, 2:]).all()
    assert torch.equal(y_BH[1], h_BH[1])
    assert count_B1.tolist() == [[4.0], [0.0]]


def test_a_cycle_that_the_dtype_cannot_count_is_refused() -> None:
    cell = Clockwork(2, 2, periods=(16, 17)).to(torch.bfloat16)
    with pytest.raises(StrettoError, match=r"repeats every 272 steps, more than torch.bfloat16 can count"):
        cell.initial_state(1)
    assert Clockwork(2, 2, periods=(128, 256)).to(torch.bfloat16).initial_state(1)[1].dtype == torch.bfloat16
    with pytest.raises(StrettoError, match="smaller common multiple"):
        Clockwork(2, 2, periods=(4096, 4099)).initial_state(1)
    # The last step before a wrap is still told from its neighbours.
    wide = Clockwork(2, 2, periods=(2**23, 2**24))
    wide.initial_state(1)
    _, (_, count_B1) = wide(torch.zeros(1, 2), (torch.zeros(1, 2), torch.full((1, 1), 2.0**24 - 1)))
    assert count_B1.tolist() == [[0.0]]


@pytest.mark.parametrize("periods", [(), (2, 2), (4, 2), (0, 1), (1.5,), 4, None])
def test_periods_that_are_none_are_refused(periods: object) -> None:
    with pytest.raises(StrettoError, match="period"):
        Clockwork(2, 4, periods=periods)


def test_units_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(StrettoError, match="cannot share 7 hidden units evenly among 4 periods"):
        Clockwork(2, 7)
