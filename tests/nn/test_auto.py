"""solver="auto": whichever way is chosen, the result is that of a sequential run.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
import math
import sys
from pathlib import Path

import pytest
import torch

import stretto
from stretto.errors import StrettoError
from stretto.nn import auto
from stretto.nn.auto import MIN_TIMINGS, TRIAL_BUDGET, TimingRecord

sys.path.insert(0, str(Path(__file__).parent.parent / "solvers"))

from solver_oracle import assert_equal, pair, results

F, H = 3, 7


@pytest.fixture
def eager_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials at once, however much they cost."""
    monkeypatch.setattr(auto, "TRIAL_BUDGET", math.inf)


def _said(rnn: stretto.RNN) -> str:
    return rnn.solution.reason


@pytest.mark.usefixtures("eager_trials")
@pytest.mark.parametrize("layers", [1, 2])
def test_every_call_equals_a_sequential_run(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """First sequential runs are timed, then chunks, then the faster is kept; here chunks, by a clock that says so."""
    torch.manual_seed(0)
    serial, rnn = pair(stretto.cells.GRU(F, H), "auto", num_layers=layers)
    monkeypatch.setattr(auto, "TOLERANCE", 1e-13)
    x_BTF = torch.randn(1, 4000, F, dtype=torch.float64)
    expected = results(serial, x_BTF)
    ways = []
    for _ in range(2 * MIN_TIMINGS + 2):
        assert_equal(results(rnn, x_BTF), expected, 1e-10)
        ways.append(rnn.solution.solver)
        for record in rnn._autotuner._records.values():
            monkeypatch.setattr(record, "serial", 1e9)
    assert ways == ["serial"] * MIN_TIMINGS + ["shooting"] * (MIN_TIMINGS + 2)
    assert "auto: chunks of time take 0.00 of the time of a sequential run; " in _said(rnn)


@pytest.mark.usefixtures("eager_trials")
def test_a_net_that_remembers_too_long_is_tried_once() -> None:
    torch.manual_seed(0)
    serial, rnn = pair(stretto.cells.GRU(F, 32), "auto", scale=8.0)
    x_BTF = torch.randn(1, 1000, F, dtype=torch.float64)
    expected = results(serial, x_BTF)
    ways = []
    for _ in range(MIN_TIMINGS + 3):
        assert_equal(results(rnn, x_BTF), expected, 1e-12)
        ways.append((rnn.solution.solver, rnn.solution.fell_back))
    assert ways == [("serial", False)] * MIN_TIMINGS + [("shooting", True)] + [("serial", False)] * 2
    assert "the net remembers too long" in _said(rnn)


@pytest.mark.usefixtures("eager_trials")
def test_calls_without_gradients_are_timed_separately() -> None:
    torch.manual_seed(0)
    serial, rnn = pair(stretto.cells.GRU(F, H), "auto")
    x_BTF = torch.randn(1, 2000, F, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(MIN_TIMINGS + 2):
            assert torch.allclose(rnn(x_BTF)[0], serial(x_BTF)[0], atol=1e-5)
    assert rnn.solution.solver == "shooting"
    rnn(x_BTF)
    assert rnn.solution.solver == "serial"
    assert len(rnn._autotuner._records) == 2


def test_batches_without_chunks_say_so() -> None:
    rnn = stretto.RNN(stretto.cells.GRU(F, H), solver="auto")
    rnn(torch.randn(64, 200, F))
    assert _said(rnn) == "auto: too few steps, or too many sequences, for chunks to pay"
    rnn(torch.randn(1, 2000, F))
    assert _said(rnn) == "auto: sequential until a trial of chunks is cheap in comparison"


def test_trials_wait_until_they_cost_little() -> None:
    """However slow chunks turn out to be, all calls together cost little more than sequential runs."""
    record = TimingRecord(shooting=stretto.Shooting())
    lost = 0.0
    for call in range(1, 2001):
        chunked = record.chunked < record.serial if record.is_judged else record.may_try
        record.add(1.4 if chunked else 1.0, chunked=chunked, fell_back=False)
        lost += 0.4 if chunked else 0.0
        assert lost <= 2 * TRIAL_BUDGET * call
    assert record.is_judged
    assert record.num_chunked == MIN_TIMINGS


def test_a_choice_is_reconsidered() -> None:
    rnn = stretto.RNN(stretto.cells.GRU(F, H), solver="auto")
    x_BTF = torch.randn(1, 512, F)
    with torch.no_grad():
        rnn(x_BTF)
        (record,) = rnn._autotuner._records.values()
        record.num_serial = record.num_chunked = MIN_TIMINGS
        record.calls, record.total = auto.RETRY_CALLS - 1, 1e9
        rnn(x_BTF)
    assert (record.num_chunked, rnn.solution.solver) == (1, "shooting")


def test_a_copy_measures_for_itself() -> None:
    rnn = stretto.RNN(stretto.cells.GRU(F, H), solver="auto")
    rnn(torch.randn(1, 512, F))
    twin = copy.deepcopy(rnn)
    assert len(rnn._autotuner._records) == 1
    assert not twin._autotuner._records


def test_it_does_not_go_with_recomputing() -> None:
    with pytest.raises(StrettoError, match="save='states' was given with solver='auto'"):
        stretto.RNN(stretto.cells.GRU(F, H), save="states", solver="auto")
