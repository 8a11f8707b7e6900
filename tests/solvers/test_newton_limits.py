"""Where Newton's method ends: what it refuses, what it leaves to walking step after step, and that it says so.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import re
from typing import Any

import pytest
import torch
from newton_cells import CELLS, Counting, F, H, Noisy, Sine, Stateless, assert_close, counted, twin
from solver_oracle import assert_equal, pair, results

import stretto
from stretto.errors import StrettoError
from stretto.solvers.newton import newton


def _strong(hidden: int, scale: float) -> stretto.RNN:
    """A GRU with recurrent weights scaled up."""
    serial = stretto.RNN(stretto.cells.GRU(F, hidden).double(), backend="eager")
    with torch.no_grad():
        serial.cells[0].weight_hh.mul_(scale)  # type: ignore[operator, union-attr]
    return serial


def test_damping_helps_a_net_near_the_edge() -> None:
    torch.manual_seed(2)
    serial = _strong(12, 4.0)
    plain, damped = twin(serial), twin(serial, damping=0.1)
    x_BTF = torch.randn(1, 300, F, dtype=torch.float64)
    with torch.no_grad():
        for parallel in (plain, damped):
            assert_close(parallel(x_BTF), serial(x_BTF))
    assert plain.solution.fell_back
    assert counted(damped) > 5


def test_steps_that_meet_must_meet_over_chunks_too() -> None:
    """Slow iterations end with steps that nearly meet; what adds up over a chunk is more, and is iterated away."""
    torch.manual_seed(0)
    serial = _strong(16, 2.0)
    parallel = twin(serial, damping=0.05)
    x_BTF = torch.randn(1, 1024, F, dtype=torch.float64)
    with torch.no_grad():
        assert_close(parallel(x_BTF), serial(x_BTF))
    assert 1e-12 < parallel.solution.residual <= 1e-6
    assert parallel.solution.iterations == counted(parallel) + 2


def test_fewer_steps_that_miss_are_progress_too() -> None:
    """Units that switch: each iteration leaves fewer steps that miss, and some of these by as much as before."""
    torch.manual_seed(3)
    serial = stretto.RNN(stretto.cells.IndRNN(F, 16).double(), backend="eager")
    parallel = twin(serial)
    x_BTF = torch.randn(2, 1000, F, dtype=torch.float64)
    with torch.no_grad():
        assert_close(parallel(x_BTF), serial(x_BTF))
    assert counted(parallel) > 5


def test_walks_that_do_not_meet_are_walked_step_after_step() -> None:
    """Steps differ by less than the tolerance each time they are taken, and chunks of them by more."""
    torch.manual_seed(0)
    rnn = stretto.RNN(Noisy(torch.eye(2, dtype=torch.float64)), backend="eager", solver=stretto.Newton())
    y_BTH, _ = rnn(torch.zeros(1, 2000, 2, dtype=torch.float64))
    assert rnn.solution.fell_back
    assert "do not meet" in rnn.solution.reason
    assert bool((y_BTH[0, -1] > 1e-4).all())


def test_a_step_that_draws_is_walked_step_after_step() -> None:
    rnn = stretto.RNN(stretto.cells.Zoneout(stretto.cells.GRU(F, H)), backend="eager", solver=stretto.Newton())
    rnn(torch.randn(2, 40, F))
    assert rnn.solution.fell_back
    assert "did not halve" in rnn.solution.reason
    rnn.eval()
    rnn(torch.randn(2, 40, F))
    assert not rnn.solution.fell_back


def test_a_tolerance_finer_than_numbers_is_said_to_be() -> None:
    torch.manual_seed(0)
    serial, parallel = pair(CELLS["gru"](), stretto.Newton(tolerance=1e-12), torch.float32, scale=1.0, backend="eager")
    x_BTF = torch.randn(1, 200, F)
    assert_equal(results(parallel, x_BTF), results(serial, x_BTF), 1e-7)
    assert parallel.solution.fell_back
    assert parallel.solution.reason.endswith("a tolerance of 1.0e-12 is finer than torch.float32 resolves")


def test_so_many_iterations_and_no_more() -> None:
    torch.manual_seed(0)
    serial, parallel = pair(CELLS["gru"](), None, scale=1.0, backend="eager")
    x_BTF = torch.randn(1, 200, F, dtype=torch.float64)
    for most in (1, 2):
        parallel.solver = stretto.Newton(tolerance=1e-13, max_iterations=most)
        assert_equal(results(parallel, x_BTF), results(serial, x_BTF), 1e-12)
        assert parallel.solution.fell_back
        assert parallel.solution.iterations == most + 1
        said = r"a mismatch of \S+ is left after (1 iteration|2 iterations)"
        assert re.fullmatch(said, parallel.solution.reason)
    parallel.solver = stretto.Newton(tolerance=1e-13, max_iterations=20)
    parallel(x_BTF)
    assert counted(parallel) <= 5


def test_dense_jacobians_that_would_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton, "MOST_BYTES", 2 * 100 * (2 * H) ** 2 * 8)
    rnn = stretto.RNN(stretto.cells.LSTM(F, H).double(), backend="eager", solver=stretto.Newton())
    rnn(torch.randn(2, 50, F, dtype=torch.float64))
    assert not rnn.solution.fell_back
    rnn(torch.randn(1, 101, F, dtype=torch.float64))
    assert rnn.solution.fell_back
    assert rnn.solution.work == 1.0
    for said in ("101 steps and 10 numbers", 'jacobian="diagonal"', "stretto.Shooting"):
        assert said in rnn.solution.reason
    rnn.solver = stretto.Newton(jacobian="diagonal")
    rnn(torch.randn(1, 101, F, dtype=torch.float64))
    assert not rnn.solution.fell_back


def test_a_state_of_whole_numbers_is_walked_step_after_step() -> None:
    serial = stretto.RNN(Counting(torch.eye(2)), backend="eager")
    parallel = twin(serial)
    x_BTF = torch.randn(1, 30, 2)
    assert torch.equal(parallel(x_BTF)[0], serial(x_BTF)[0])
    assert parallel.solution.fell_back
    assert parallel.solution.reason == "part 1 of the state is of torch.int64, which has no derivative"


def test_a_cell_without_a_state_is_walked_step_after_step() -> None:
    rnn = stretto.RNN(Stateless(), backend="eager", solver=stretto.Newton())
    x_BTF = torch.randn(2, 5, F)
    assert torch.equal(rnn(x_BTF)[0], torch.tanh(x_BTF))
    assert rnn.solution.fell_back
    assert rnn.solution.reason == "there is no state"


def test_states_that_are_no_numbers_are_walked_step_after_step() -> None:
    rnn = stretto.RNN(stretto.cells.GRU(F, H), backend="eager", solver=stretto.Newton())
    x_BTF = torch.randn(2, 40, F)
    x_BTF[0, 3] = torch.nan
    y_BTH, _ = rnn(x_BTF)
    assert rnn.solution.fell_back
    assert rnn.solution.reason == "a state is no number"
    assert bool(y_BTH[0, :3].isfinite().all())
    assert bool(y_BTH[0, 3:].isnan().all())
    assert bool(y_BTH[1].isfinite().all())


def test_an_overflow_on_the_way_is_walked_step_after_step() -> None:
    """States stay below 1, and differences grow a hundredfold at each step."""
    torch.manual_seed(0)
    serial = stretto.RNN(Sine(100.0 * torch.linalg.qr(torch.randn(4, 4))[0]), backend="eager")
    parallel = twin(serial)
    x_BTF = torch.randn(1, 300, 4)
    with torch.no_grad():
        assert_close(parallel(x_BTF), serial(x_BTF))
    assert parallel.solution.fell_back
    assert re.fullmatch(r"iteration \d+ overflows", parallel.solution.reason)


@pytest.mark.parametrize("lengths", [[1], [1, 0, 1], [0, 0]])
def test_nothing_to_find(lengths: list[int]) -> None:
    serial, parallel = pair(CELLS["lstm"](), stretto.Newton(tolerance=1e-13), backend="eager")
    x_BTF = torch.randn(len(lengths), 2, F, dtype=torch.float64)
    assert_equal(results(parallel, x_BTF, lengths=lengths), results(serial, x_BTF, lengths=lengths), 1e-12)
    assert parallel.solution.fell_back
    assert parallel.solution.reason == "no sequence has more than one step"
    assert (parallel.solution.iterations, parallel.solution.work) == (1, 1.0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    serial, parallel = pair(CELLS["gru"](), stretto.Newton(tolerance=1e-13), backend="eager")
    x_BTF = torch.randn(2, 60, F, dtype=torch.float64)
    with mode():
        x_BTF = 1.0 * x_BTF
        y_BTH, _ = parallel(x_BTF)
        assert torch.allclose(y_BTH, serial(x_BTF)[0], atol=1e-12)
    assert not y_BTH.requires_grad
    assert counted(parallel) >= 1


def test_frozen_parameters_and_gradients_asked_for_again() -> None:
    serial, parallel = pair(CELLS["gru"](), stretto.Newton(tolerance=1e-13), backend="eager")
    x_BTF = torch.randn(2, 60, F, dtype=torch.float64)
    for rnn in (serial, parallel):
        rnn.cells[0].weight_ih.requires_grad_(False)  # type: ignore[union-attr, operator]
        loss = rnn(x_BTF)[0].square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert counted(parallel) >= 1
    assert parallel.cells[0].weight_ih.grad is None
    one, other = parallel.cells[0].weight_hh.grad, serial.cells[0].weight_hh.grad
    assert torch.allclose(one, other, atol=1e-10)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"jacobian": "banded"}, "jacobian is 'banded'"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"tolerance": -1e-6}, "tolerance is -1e-06"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
        ({"tolerance": float("inf")}, "tolerance is inf"),
        ({"tolerance": True}, "tolerance is True"),
        ({"max_iterations": 0}, "max_iterations is 0"),
        ({"max_iterations": 2.5}, "max_iterations is 2.5"),
        ({"damping": -0.1}, "damping is -0.1"),
        ({"damping": 1.0}, "damping is 1.0"),
        ({"damping": "much"}, "damping is 'much'"),
    ],
)
def test_settings_that_make_no_sense(words: dict[str, Any], said: str) -> None:
    with pytest.raises(StrettoError, match=re.escape(said)):
        stretto.Newton(**words)


def test_settings_are_told() -> None:
    assert repr(stretto.Newton()) == "Newton()"
    assert repr(stretto.Newton(jacobian="diagonal", damping=0.1)) == "Newton(jacobian='diagonal', damping=0.1)"
