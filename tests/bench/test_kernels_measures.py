"""The pieces of the kernel benchmark: gate, clock, peers, limits, fits and fresh processes.

Shape legend: T steps, B sequences, F features of the input, H hidden units, S points of a sweep.
"""

import importlib.util
import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from bench import fresh_process
from bench.fresh_process import Request, measure, measure_here
from bench.interleaved import LEAST_ROUNDS, Pace, interleaved, with_threads
from bench.kernel_compile import compile_rows
from bench.kernel_gate import pass_gate, relative_error
from bench.kernel_growth import fitted_exponent, share_off_line
from bench.kernel_limits import step_flops, weight_bytes
from bench.kernel_memory import memory_rows
from bench.kernel_peers import drawn_cell, loop_step, our_step, torch_layer, torch_step
from bench.kernel_ragged import drawn_lengths
from bench.machine_limits import LargeProduct, RepeatedRead
from bench.training_step import StepShape, drawn_batch
from stretto.errors import StrettoError
from stretto.kernels import NoCompiler, find_compiler
from stretto.nn import RNN

SHAPE = StepShape(num_steps=6, batch=2, input_size=4, hidden_size=8)


@pytest.fixture
def compiler() -> None:
    try:
        find_compiler()
    except NoCompiler as reason:
        pytest.skip(str(reason))


def _gate(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return pass_gate(found, wanted=wanted, name="one", peer="another", where="here")


def test_the_gate_lets_rounding_pass_and_gives_the_largest_error() -> None:
    wanted = {"output": torch.tensor([1.0, 100.0]), "gradient of w": torch.tensor([2.0])}
    found = {"output": torch.tensor([1.001, 100.0]), "gradient of v": torch.tensor([2.0])}
    assert _gate(found, wanted) == pytest.approx(1e-5, rel=1e-2)


@pytest.mark.parametrize(
    "found",
    [torch.tensor([1.0, 100.1]), torch.tensor([1.0, float("nan")]), torch.tensor([[1.0, 100.0]]), torch.zeros(0)],
    ids=["off", "nan", "shape", "empty"],
)
def test_the_gate_stops_what_is_wrong(found: torch.Tensor) -> None:
    with pytest.raises(StrettoError, match="the output of one differs from that of another"):
        _gate({"output": found}, {"output": torch.tensor([1.0, 100.0])})


def test_the_gate_stops_when_a_result_is_missing() -> None:
    with pytest.raises(StrettoError, match="gives 1 results and another gives 2"):
        _gate({"output": torch.ones(1)}, {"output": torch.ones(1), "gradient of w": torch.ones(1)})


def test_a_reference_that_is_not_finite_passes_no_gate() -> None:
    assert not relative_error(torch.ones(2), wanted=torch.tensor([1.0, float("nan")])) <= 1e9
    assert relative_error(torch.zeros(3), wanted=torch.zeros(3)) == 0


def test_tasks_take_turns_equally_often() -> None:
    turns: list[str] = []
    timings = interleaved(
        {"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, pace=Pace(rounds=4, budget=60.0)
    )
    assert turns == ["a", "b"] * 4
    assert all(timing.rounds == 4 and 0 < timing.least <= timing.median for timing in timings.values())


def test_a_budget_that_is_spent_still_leaves_three_rounds() -> None:
    turns: list[int] = []
    timings = interleaved({"a": lambda: turns.append(1)}, pace=Pace(rounds=9, budget=0.0))
    assert len(turns) == timings["a"].rounds == LEAST_ROUNDS


def test_a_short_task_is_run_on_end_for_a_whole_turn() -> None:
    turns: list[str] = []

    def short() -> None:
        turns.append("short")
        time.sleep(0.002)

    def long() -> None:
        turns.append("long")
        time.sleep(0.03)

    timings = interleaved({"short": short, "long": long}, pace=Pace(rounds=3, budget=60.0, turn=0.02))
    assert [name for name, _ in itertools.groupby(turns)] == ["short", "long"] * 3
    assert turns.count("long") == 3 < turns.count("short")
    assert 0.002 <= timings["short"].least < 0.02 < timings["long"].least


def test_a_task_runs_with_its_threads() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    try:
        with_threads(lambda: seen.append(torch.get_num_threads()), 2)()
    finally:
        torch.set_num_threads(before)
    assert seen == [2]


JAX_AGAINST_TORCH = f"""
from bench.kernel_gate import pass_gate
from bench.kernel_peers import JaxStep, drawn_cell, torch_layer, torch_step
from bench.training_step import StepShape, drawn_batch
shape = {SHAPE!r}
cell, batch = drawn_cell("GRU", shape), drawn_batch(shape)
theirs = torch_step(torch_layer([cell], "GRU", shape), batch=batch).results()
found = JaxStep(cell, batch=batch).results()
print(pass_gate(found, wanted=theirs, name="JAX", peer="torch", where="here"))
"""


def test_jax_computes_what_torch_does() -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    # In a process of its own: JAX has threads, and tests after this one fork.
    done = subprocess.run([sys.executable, "-c", JAX_AGAINST_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


@pytest.mark.parametrize("net", ["GRU", "LSTM"])
def test_the_loop_computes_what_torch_does(net: Any) -> None:
    cell, batch = drawn_cell(net, SHAPE), drawn_batch(SHAPE)
    theirs = torch_step(torch_layer([cell], net, SHAPE), batch=batch).results()
    assert len(theirs) == 5
    assert _gate(loop_step(cell, batch=batch).results(), theirs) < 1e-5


def test_a_step_gives_the_same_gradients_again_and_leaves_the_input_alone() -> None:
    batch = drawn_batch(SHAPE)
    step = our_step(RNN(drawn_cell("GRU", SHAPE), batch_first=False, backend="eager"), batch=batch)
    first = step.results()
    step.run()
    assert _gate(step.results(), dict(first)) == 0
    assert batch.x_TBF.grad is None


def test_cells_and_batches_are_drawn_the_same_and_chance_goes_on_elsewhere() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = drawn_cell("LayerNormLSTM", SHAPE), drawn_cell("LayerNormLSTM", SHAPE)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(drawn_batch(SHAPE).x_TBF, drawn_batch(SHAPE).x_TBF)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("net", ["GRU", "LSTM"])
def test_flops_are_those_that_torch_counts(net: Any) -> None:
    step = loop_step(drawn_cell(net, SHAPE), batch=drawn_batch(SHAPE))
    with FlopCounterMode(display=False) as counter:
        step.run()
    # Nothing asks for the gradient of the state before the first step.
    spared = 2 * SHAPE.batch * weight_bytes(net, SHAPE) // 4
    assert counter.get_total_flops() == step_flops(net, SHAPE) - spared


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("threads", [1, 2])
def test_reading_reads_all_of_it_every_time(threads: int) -> None:
    read = RepeatedRead(5000, threads=threads, total_bytes=20_000)
    assert read.work >= 15_000
    assert read.run() == int(read.work) // 8 * 0x0101010101010101 % 2**64


def test_a_product_counts_two_flops_for_each_multiplication() -> None:
    product = LargeProduct(8)
    product.run()
    assert product.work == 2 * 8**3


@given(exponent=st.floats(0.1, 3), factor=st.floats(1e-6, 1))
@settings(deadline=None, max_examples=30)
def test_a_power_is_found_again(exponent: float, factor: float) -> None:
    sizes_S = np.array([1.0, 2, 4, 8, 16])
    assert fitted_exponent(sizes_S, factor * sizes_S**exponent) == pytest.approx(exponent, abs=1e-6)


@given(offset=st.floats(0, 1), slope=st.floats(1e-3, 1))
@settings(deadline=None, max_examples=30)
def test_a_line_is_on_the_line_and_a_square_is_not(offset: float, slope: float) -> None:
    sizes_S = np.array([1.0, 2, 4, 8, 16])
    assert share_off_line(sizes_S, offset + slope * sizes_S) < 1e-6
    assert share_off_line(sizes_S, slope * sizes_S**2) > 0.1


@given(num_steps=st.integers(1, 300), batch=st.integers(1, 40), seed=st.integers(0, 100))
@settings(deadline=None, max_examples=30)
def test_lengths_lie_between_a_tenth_and_all(num_steps: int, batch: int, seed: int) -> None:
    lengths_B = drawn_lengths(StepShape(num_steps=num_steps, batch=batch, input_size=1, hidden_size=1), seed=seed)
    assert lengths_B.shape == (batch,)
    assert int(lengths_B.max()) == num_steps
    assert int(lengths_B.min()) >= max(1, round(num_steps / 10))


def test_a_request_survives_json() -> None:
    request = Request(kind="memory", net="LSTM", way="nn.LSTM", shape=SHAPE, threads=1)
    text = fresh_process.json.dumps(fresh_process.dataclasses.asdict(request))
    assert Request.read(text) == request


def test_memory_of_a_step_grows_with_its_length() -> None:
    if not fresh_process.STATUS.exists():
        pytest.skip(f"there is no {fresh_process.STATUS}")
    shape = StepShape(num_steps=4000, batch=16, input_size=2, hidden_size=32)
    found = measure_here(Request(kind="memory", net="LSTM", way="nn.LSTM", shape=shape, threads=1))
    assert found["extra_bytes"] > 4 * shape.num_steps * shape.batch * shape.hidden_size


def test_the_first_step_is_told_with_its_parts() -> None:
    found = measure_here(Request(kind="compile", net="GRU", shape=SHAPE, threads=1))
    assert set(found) == {"forward_seconds", "backward_seconds", "analysis_seconds", "compile_seconds"}
    assert found["analysis_seconds"] > 0


def test_a_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(command: list[str], **kwargs: Any) -> Any:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="long\nMemoryError: no room")

    monkeypatch.setattr(fresh_process.subprocess, "run", failing)
    with pytest.raises(StrettoError, match="process for memory failed: MemoryError: no room"):
        measure(Request(kind="memory", net="LSTM", shape=SHAPE, threads=1))


def test_memory_is_refused_where_it_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.kernel_memory.STATUS", tmp_path / "none")
    with pytest.raises(StrettoError, match="--only"):
        memory_rows(threads=1, quick=True, tell=lambda _: None)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_fresh_processes_measure_memory_and_compiling() -> None:
    lines: list[str] = []
    torchs, ours, states = memory_rows(threads=1, quick=True, tell=lines.append)
    assert torchs.over_torch == 1
    assert all(row.extra_bytes > 4 * row.num_steps * row.batch * row.hidden_size for row in (torchs, ours, states))
    assert states.extra_bytes < ours.extra_bytes
    cold, cached = compile_rows(threads=1, quick=True, tell=lines.append)
    assert (cold.cached, cached.cached) == (False, True)
    assert all(row.wait_seconds == row.forward_seconds + row.backward_seconds for row in (cold, cached))
    assert all(row.analysis_seconds > 0 and row.compile_seconds > 0 for row in (cold, cached))
    assert len(lines) == 5
