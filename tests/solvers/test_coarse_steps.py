"""Coarse steps of cells beside what defines them, and the forced step that coarse grids are made of.

Shape legend: B sequences, F features, H hidden units, D units of the state.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stretto
from stretto import cells
from stretto.errors import StrettoError
from stretto.solvers.multigrid.coarse_step import ForcedCoarseStep, joined, parted

B, F, H = 3, 4, 5
MAKERS: dict[str, Callable[[], stretto.Cell]] = {
    "gru": lambda: cells.GRU(F, H),
    "gru-before": lambda: cells.GRU(F, H, reset="before"),
    "layer-norm-gru": lambda: cells.LayerNormGRU(F, H),
    "ligru": lambda: cells.LiGRU(F, H),
    "ligru-plain": lambda: cells.LiGRU(F, H, norm="none"),
    "minimal": lambda: cells.MinimalGatedUnit(F, H),
    "lstm": lambda: cells.LSTM(F, H),
    "coupled": lambda: cells.CoupledLSTM(F, H),
    "peephole": lambda: cells.PeepholeLSTM(F, H),
    "layer-norm-lstm": lambda: cells.LayerNormLSTM(F, H),
}


def _made(name: str, seed: int) -> tuple[Any, torch.Tensor, Any]:
    """A cell with nothing at its default, an input and a state."""
    torch.manual_seed(seed)
    cell = MAKERS[name]().double()
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    parts = [torch.randn(B, H, dtype=torch.float64) for _ in range(2)]
    state = parts[0] if isinstance(cell.initial_state(1), torch.Tensor) else tuple(parts)
    return cell, torch.randn(B, F, dtype=torch.float64), state


def _memory(state: Any) -> torch.Tensor:
    """The part that remembers: h of a GRU, c of an LSTM."""
    return state if isinstance(state, torch.Tensor) else state[1]  # type: ignore[no-any-return]


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(MAKERS)), seed=st.integers(0, 99), dt=st.sampled_from([1.0, 4.0, 16.0, 729.0]))
def test_it_is_an_implicit_step_of_what_the_step_is_an_explicit_one_of(name: str, seed: int, dt: float) -> None:
    """The step is m + a (b - m), of rate a towards b; implicitly over dt that is m' = m + dt a (b - m')."""
    cell, x_BF, state = _made(name, seed)
    with torch.no_grad():
        m_BH, step_BH = _memory(state), _memory(cell(x_BF, state)[1])
        b_BH = _memory(cell.coarse_step(x_BF, state, 1e12))
        a_BH = (step_BH - m_BH) / (b_BH - m_BH)
        found_BH = _memory(cell.coarse_step(x_BF, state, dt))
    assert bool(((a_BH > 0) & (a_BH < 1)).all())
    # As b is found from a large dt, it is only known so well.
    torch.testing.assert_close(found_BH, m_BH + dt * a_BH * (b_BH - found_BH), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["lstm", "coupled", "peephole", "layer-norm-lstm"])
@pytest.mark.parametrize("dt", [4.0, 64.0])
def test_an_lstm_reads_its_cell_as_the_step_does(name: str, dt: float) -> None:
    """With a forget gate of 1 and nothing written both steps keep c, so that what they read must be the same."""
    cell, x_BF, state = _made(name, 0)
    gates = {"coupled": ("f", "g", "o")}.get(name, ("i", "f", "g", "o"))
    with torch.no_grad():
        if name == "layer-norm-lstm":
            bias, before = cell.norm_hh.bias, cell.norm_hh.bias[:H].clone()
        else:
            bias, before = cell.bias_hh, cell.bias_hh[:H].clone()
        for gate, value in (("f", 60.0), ("i", -60.0)):
            if gate in gates:
                at = gates.index(gate) * H
                bias[at : at + H] += value
        h_BH, c_BH = cell.coarse_step(x_BF, state, dt)
        expected_BH, (_, kept_BH) = cell(x_BF, state)
    assert not torch.equal(bias[:H], before)
    torch.testing.assert_close(c_BH, state[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kept_BH, state[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(h_BH, expected_BH, rtol=1e-12, atol=1e-12)


def test_the_fine_step_of_the_implicit_gru_is_its_coarse_step_over_one() -> None:
    torch.manual_seed(0)
    implicit, usual = cells.ImplicitGRU(F, H).double(), cells.GRU(F, H).double()
    usual.load_state_dict(implicit.state_dict())
    x_BF, h_BH = torch.randn(B, F, dtype=torch.float64), torch.randn(B, H, dtype=torch.float64)
    y_BH, after_BH = implicit(x_BF, h_BH)
    assert torch.equal(y_BH, after_BH)
    assert torch.equal(y_BH, implicit.coarse_step(x_BF, h_BH, 1.0))
    for dt in (1.0, 4.0):
        torch.testing.assert_close(implicit.coarse_step(x_BF, h_BH, dt), usual.coarse_step(x_BF, h_BH, dt))
    assert float((y_BH - usual(x_BF, h_BH)[0]).detach().abs().max()) > 0.01


def test_cells_without_an_equation_in_time_have_none() -> None:
    for cell in (cells.Elman(F, H), cells.IndRNN(F, H), cells.Zoneout(cells.GRU(F, H)), cells.AttentionCell(F, H)):
        assert not hasattr(cell, "coarse_step")


def test_the_forced_step_adds_what_comes_with_the_input() -> None:
    cell, x_BF, state = _made("lstm", 1)
    forced = ForcedCoarseStep(cell, dt=4.0, features=(F,))
    g_BD = torch.randn(B, 2 * H, dtype=torch.float64)
    y_BD, after = forced(torch.cat([x_BF, g_BD], dim=1), state)
    h_BH, c_BH = cell.coarse_step(x_BF, state, 4.0)
    torch.testing.assert_close(after, (h_BH + g_BD[:, :H], c_BH + g_BD[:, H:]))
    assert torch.equal(y_BD, torch.cat(after, dim=1))


def test_states_of_any_shape_are_joined_and_parted_again() -> None:
    parts = [torch.randn(B, 2), torch.randn(B), torch.randn(B, 2, 3), torch.randn(B, 1)]
    state_BD = joined(parts)
    assert state_BD.shape == (B, 10)
    for one, other in zip(parted(state_BD, parts), parts, strict=True):
        assert torch.equal(one, other)
    assert joined([torch.zeros(0, 2, 3), torch.zeros(0)]).shape == (0, 7)


class Wrong(stretto.Cell):
    """A cell whose coarse step returns what a test says."""

    def __init__(self, returned: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner = cells.LSTM(F, H)
        self.returned = returned

    def initial_state(self, batch_size: int) -> Any:
        return self.inner.initial_state(batch_size)

    def forward(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        return self.inner(x_t, state)  # type: ignore[no-any-return]

    def coarse_step(self, x_t: torch.Tensor, state: Any, dt: float) -> Any:
        return self.returned(self.inner.coarse_step(x_t, state, dt))


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda state: (state[0], state), r"\(\(\d+, 5\) of torch.float32, \(\(\d+, 5\)"),
        (lambda state: state[0], r"returned \(\d+, 5\) of torch.float32 and its state is \("),
        (lambda state: (state[0], state[1][:, :3]), r"\(\d+, 3\) of torch.float32"),
        (lambda state: (state[0], state[1][:1]), r"\(1, 5\) of torch.float32"),
        (lambda state: (state[0], state[1].double()), "torch.float64"),
        (lambda state: {"h": state[0]}, "returned dict"),
        (lambda _: None, "returned NoneType"),
    ],
)
def test_a_coarse_step_of_the_wrong_make_up_is_refused(returned: Callable[[Any], Any], said: str) -> None:
    rnn = stretto.RNN(Wrong(returned), backend="eager", solver=stretto.Multigrid())
    with pytest.raises(StrettoError, match=rf"Wrong\.coarse_step returned .*{said.removeprefix('returned ')}"):
        rnn(torch.randn(2, 40, F))
