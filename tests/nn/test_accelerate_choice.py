"""Who runs an accelerated layer: decided once for each kind of batch and machine, and torch itself where it has to.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import stretto
from stretto.errors import StrettoError
from stretto.kernels import measure
from stretto.nn import choice

F, H = 8, 4
B, T = 3, 5


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


@pytest.fixture
def x_TBF() -> torch.Tensor:
    return torch.randn(T, B, F, dtype=torch.float64)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without measurements, a process that knows of none, and no other work; compiled kernels stay."""
    (tmp_path / "choices").mkdir(mode=0o700)
    monkeypatch.setattr(choice, "_quiet_run", lambda run, **_: (run(), True))
    monkeypatch.setattr(choice, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(choice, "_known", {})
    return tmp_path / "choices"


def _backend(layer: nn.Module) -> str:
    (explained,) = stretto.explain(layer).layers
    return explained.backend


def _measured(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def test_a_kind_of_batch_is_measured_once_for_all_lengths_and_layers(x_TBF: torch.Tensor, fresh_cache: Path) -> None:
    first, second = (stretto.accelerate(nn.GRU(F, H).double()) for _ in range(2))
    first(x_TBF)
    (measured,) = _measured(fresh_cache)
    assert measured.keys() == {"generated", "torch"}
    assert all(fixed >= 0 and per_step >= 0 and fixed + per_step > 0 for fixed, per_step in measured.values())
    second(x_TBF.repeat(40, 1, 1))
    first(x_TBF + 1)
    assert _measured(fresh_cache) == [measured]


def test_other_kinds_of_batches_are_measured_by_themselves(x_TBF: torch.Tensor, fresh_cache: Path) -> None:
    layer = stretto.accelerate(nn.GRU(F, H).double())
    wanted = stretto.restore(copy.deepcopy(layer))
    packed = pack_padded_sequence(x_TBF, torch.tensor([5, 3, 1]))
    for number, batch in enumerate([x_TBF, x_TBF.repeat(1, 4, 1), packed], start=1):
        found, expected = layer(batch)[1], wanted(batch)[1]
        assert (found - expected).abs().max() <= 1e-10
        assert len(_measured(fresh_cache)) == number
    with torch.no_grad():
        layer(x_TBF)
    assert len(_measured(fresh_cache)) == 4
    layer.float()(x_TBF.float())
    assert len(_measured(fresh_cache)) == 5


@pytest.mark.parametrize("faster", ["cpp", "torch"])
def test_a_stored_measurement_decides(
    faster: str, x_TBF: torch.Tensor, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stretto.accelerate(nn.GRU(F, H).double())(x_TBF)
    (path,) = fresh_cache.iterdir()
    quick, slow = [1e-6, 1e-6], [1.0, 1.0]
    lines = {"generated": quick, "torch": slow} if faster == "cpp" else {"generated": slow, "torch": quick}
    path.write_text(json.dumps(lines))
    monkeypatch.setattr(choice, "_known", {})
    layer = stretto.accelerate(nn.GRU(F, H).double())
    layer(x_TBF)
    assert _backend(layer) == faster


def test_the_faster_one_may_change_with_the_length(
    x_TBF: torch.Tensor, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stretto.accelerate(nn.GRU(F, H).double())(x_TBF)
    (path,) = fresh_cache.iterdir()
    # Equal at 30 steps, and a tie goes to torch.
    path.write_text(json.dumps({"generated": [30.0, 1.0], "torch": [0.0, 2.0]}))
    monkeypatch.setattr(choice, "_known", {})
    for steps, faster in [(29, "torch"), (30, "torch"), (33, "cpp")]:
        layer = stretto.accelerate(nn.GRU(F, H).double())
        layer(torch.zeros(steps, B, F, dtype=torch.float64))
        assert _backend(layer) == faster


LARGE_ROWS = 2048
"""Rows of x_TBF that are more than `LARGE` bytes of gates."""


@pytest.mark.parametrize(("short_speedup", "decides"), [(1.0, "large"), (0.2, "short"), (4.0, "short")])
def test_large_batches_are_measured_as_they_are_where_short_runs_do_not_decide(
    short_speedup: float, decides: str, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def time(kind: choice.Kind, runs: dict[str, Any]) -> tuple[dict[str, choice.Line], bool]:
        asked.append(kind.large_steps)
        speedup = 2.0 if kind.large_steps else short_speedup
        return {"generated": choice.Line(0.0, 1.0), "torch": choice.Line(0.0, speedup)}, True

    monkeypatch.setattr(choice, "_time", time)
    layer = stretto.accelerate(nn.GRU(F, H).double())
    large_TBF = torch.zeros(45, LARGE_ROWS, F, dtype=torch.float64)
    with torch.no_grad():
        layer(large_TBF[:2])
        assert asked == [0], "a small batch is measured by short runs alone"
        layer(large_TBF)
        layer(large_TBF[:-1])
    assert asked == ([0, 32] if decides == "large" else [0])
    assert _backend(layer) == ("torch" if short_speedup < 1 else "cpp")
    assert len(_measured(fresh_cache)) == len(asked)


@final
class Machine:
    """Processes on a machine with a clock of its own, and measurements that are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch, self.now, self.measured = monkeypatch, 1e9, 0
        self.times, self.is_quiet = (1.0, 2.0), False
        monkeypatch.setattr(choice, "_now", lambda: self.now)
        monkeypatch.setattr(choice, "_time", self._time)

    def _time(self, *_: Any) -> tuple[dict[str, choice.Line], bool]:
        self.measured += 1
        ours, torchs = self.times
        return {"generated": choice.Line(0.0, ours), "torch": choice.Line(0.0, torchs)}, self.is_quiet

    def new_process(self, x_TBF: torch.Tensor, *, times: tuple[float, float] = (1.0, 2.0)) -> str:
        """Who runs a layer in a process that knows what the store has, and measures these times if it has to."""
        self.monkeypatch.setattr(choice, "_known", {})
        self.monkeypatch.setattr(choice, "_disturbed", set())
        self.times = times
        layer = stretto.accelerate(nn.GRU(F, H).double())
        layer(x_TBF)
        return _backend(layer)


def test_disturbed_measurements_are_bounded(
    x_TBF: torch.Tensor, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    for number in range(1, 4):
        machine.new_process(x_TBF)
        assert machine.measured == number
    waited = []
    for _ in range(12):
        start = machine.now
        machine.new_process(x_TBF)
        (stored,) = _measured(fresh_cache)
        before = machine.measured
        machine.now = stored["again"] - 1.0
        machine.new_process(x_TBF)
        assert machine.measured == before
        machine.now = stored["again"]
        machine.new_process(x_TBF)
        assert machine.measured == before + 1
        waited.append(machine.now - start)
    assert waited[:4] == [3600.0, 7200.0, 14400.0, 28800.0]
    assert waited == sorted(waited)
    assert waited[-1] == choice.LONGEST_PAUSE
    machine.is_quiet = True
    machine.now += choice.LONGEST_PAUSE
    machine.new_process(x_TBF)
    (stored,) = _measured(fresh_cache)
    assert stored.keys() == {"generated", "torch"}
    machine.now *= 10
    before = machine.measured
    machine.new_process(x_TBF)
    assert machine.measured == before, "an undisturbed measurement is kept for good"


def test_the_best_of_disturbed_measurements_decides_in_every_process(
    x_TBF: torch.Tensor, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    assert machine.new_process(x_TBF, times=(9.0, 5.0)) == "torch"
    assert machine.new_process(x_TBF, times=(2.0, 7.0)) == "cpp"
    assert machine.new_process(x_TBF, times=(8.0, 4.0)) == "cpp"
    for times in ((8.0, 1.0), (1.0, 8.0)):
        assert machine.new_process(x_TBF, times=times) == "cpp", "what is stored decides, and nothing is measured"
    assert machine.measured == 3
    (stored,) = _measured(fresh_cache)
    assert choice.Line(*stored["generated"]).at(choice.LONG) == pytest.approx(2.0 * choice.LONG)
    assert choice.Line(*stored["torch"]).at(choice.LONG) == pytest.approx(4.0 * choice.LONG)
    machine.now += choice.FIRST_PAUSE
    machine.is_quiet = True
    assert machine.new_process(x_TBF, times=(3.0, 1.0)) == "torch", "an undisturbed measurement replaces them"


def test_a_clock_that_is_set_back_does_not_stop_measurements(
    x_TBF: torch.Tensor, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    for _ in range(3):
        machine.new_process(x_TBF)
    machine.now -= 10 * choice.LONGEST_PAUSE
    machine.new_process(x_TBF)
    assert machine.measured == 4
    machine.new_process(x_TBF)
    assert machine.measured == 4
    assert len(_measured(fresh_cache)) == 1


def test_packed_batches_are_measured_as_ragged_as_they_are(x_TBF: torch.Tensor, fresh_cache: Path) -> None:
    layer = stretto.accelerate(nn.GRU(F, H).double())
    wanted = stretto.restore(copy.deepcopy(layer))
    x_TBF = x_TBF.repeat(4, 1, 1)
    number_of_kinds = [([20, 20, 20], 1), ([20, 12, 2], 2), ([20, 14, 1], 2), ([20, 19, 18], 3), ([16, 16, 16], 3)]
    for lengths, kinds in number_of_kinds:
        packed = pack_padded_sequence(x_TBF[: lengths[0]], torch.tensor(lengths))
        found, expected = layer(packed)[1], wanted(packed)[1]
        assert (found - expected).abs().max() <= 1e-10
        assert len(_measured(fresh_cache)) == kinds, lengths


def _kind(*, num_rows: int, fill: float = 0.0) -> choice.Kind:
    sizes = {"input_size": 1, "hidden_size": 1, "proj_size": 0, "num_layers": 1, "num_rows": num_rows, "threads": 1}
    options = {"bidirectional": False, "bias": True, "training": False, "input_gradient": False}
    return choice.Kind(mode="GRU", dtype=torch.float64, fill=fill, **sizes, **options)


@given(num_rows=st.integers(1, 40), fill=st.sampled_from([1.0, *choice.FILLS]))
def test_the_measured_batch_is_as_ragged_as_its_kind(num_rows: int, fill: float) -> None:
    kind = _kind(fill=fill, num_rows=num_rows)
    _, lengths_B = pad_packed_sequence(choice._input(kind, choice.LONG))
    assert lengths_B.max() == choice.LONG
    # A sum over places instead of an integral is off by one place at most, and whole steps by one step.
    assert abs(lengths_B.double().mean() / choice.LONG - fill) <= 1.0 / num_rows + 1.0 / choice.LONG


def test_the_gradient_of_the_input_makes_another_kind(x_TBF: torch.Tensor, fresh_cache: Path) -> None:
    layer = stretto.accelerate(nn.GRU(F, H).double())
    layer(x_TBF)
    layer(x_TBF.requires_grad_())
    assert len(_measured(fresh_cache)) == 2
    with torch.no_grad():
        layer(x_TBF)
        layer(x_TBF.detach())
    assert len(_measured(fresh_cache)) == 3


def test_batches_left_to_torch_are_counted_and_right(
    x_TBF: torch.Tensor, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {"generated": choice.Line(1.0, 1.0), "torch": choice.Line(0.1, 0.1)}
    monkeypatch.setattr(choice, "_time", lambda *_: (lines, True))
    layer = stretto.accelerate(nn.GRU(F, H).double())
    plain = stretto.restore(copy.deepcopy(layer))
    for number in range(1, 6):
        for batch in (x_TBF + number, x_TBF[:1] + number):
            assert torch.equal(layer(batch)[0], plain(batch)[0])
        (explained,) = stretto.explain(layer).layers
        assert (explained.backend, explained.calls) == ("torch", 2 * number)
    lines |= {"generated": choice.Line(0.01, 0.01)}
    monkeypatch.setattr(choice, "_known", {})
    for path in fresh_cache.iterdir():
        path.unlink()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        layer(x_TBF)
    finally:
        torch.set_num_threads(threads)
    (explained,) = stretto.explain(layer).layers
    assert (explained.calls, explained.speedup) == (11, pytest.approx(10))


def test_a_disturbed_measurement_is_told_without_its_number(
    x_TBF: torch.Tensor, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {"generated": choice.Line(1e-6, 1e-6), "torch": choice.Line(1.0, 1.0)}
    monkeypatch.setattr(choice, "_time", lambda *_: (lines, False))
    monkeypatch.setattr(choice, "_disturbed", set())
    layer = stretto.accelerate(nn.GRU(F, H).double())
    layer(x_TBF)
    (explained,) = stretto.explain(layer).layers
    assert explained.disturbed
    assert "other work had the cores" in str(explained)
    assert "times" not in str(explained)
    for _ in range(3):
        monkeypatch.setattr(choice, "_known", {})
        monkeypatch.setattr(choice, "_disturbed", set())
        layer(x_TBF)
        (explained,) = stretto.explain(layer).layers
        assert explained.disturbed, "another process, which reads what this one has stored, says so too"
    assert len(_measured(fresh_cache)) == 1


@given(short=st.floats(1e-6, 1.0), long=st.floats(1e-6, 1.0), steps=st.sampled_from([32, 128, 512, 2048]))
def test_a_line_goes_through_the_long_run_and_is_never_flat(short: float, long: float, steps: int) -> None:
    line = choice._line(short, long, steps)
    assert line.at(steps) == pytest.approx(long)
    assert line.fixed >= -1e-15
    assert line.per_step > 0


@pytest.mark.parametrize(("per_step", "steps"), [(1.0, 32), (0.1, 128), (0.02, 512), (0.001, 2048), (0.0, 2048)])
def test_a_long_run_is_long_enough_to_tell_steps_from_the_call(
    per_step: float, steps: int, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = _kind(num_rows=1)
    assert choice._long_run(lambda count: (5.0 + per_step * count, True), kind) == steps
    monkeypatch.setattr(choice, "MAX_WORK", 32 * kind.work)
    assert choice._long_run(lambda count: (5.0 + per_step * count, True), kind) == 32, "nor is it too much work"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"generated": [1]}',
        '{"generated": ["x", 1], "torch": [1, 1]}',
        '{"generated": [1, 1], "torch": [1, 1], "disturbed": "x"}',
    ],
)
def test_a_damaged_measurement_is_taken_again(
    text: str, x_TBF: torch.Tensor, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = stretto.accelerate(nn.GRU(F, H).double())
    layer(x_TBF)
    (path,) = fresh_cache.iterdir()
    path.write_text(text)
    monkeypatch.setattr(choice, "_known", {})
    layer(x_TBF)
    assert _measured(fresh_cache)[0].keys() == {"generated", "torch"}


def test_a_cache_that_cannot_be_used_does_not_stop_a_layer(
    x_TBF: torch.Tensor, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Path:
        raise StrettoError("the cache folder belongs to another user", fix="")

    monkeypatch.setattr(choice, "cache_folder", refuse)
    layer = stretto.accelerate(nn.GRU(F, H).double())
    wanted = stretto.restore(copy.deepcopy(layer))(x_TBF)[0]
    assert (layer(x_TBF)[0] - wanted).abs().max() <= 1e-10
    assert not list(fresh_cache.iterdir())


@pytest.mark.usefixtures("fresh_cache")
def test_measuring_leaves_no_trace(x_TBF: torch.Tensor) -> None:
    layer = stretto.accelerate(nn.GRU(F, H, num_layers=2, dropout=0.5).double())
    seen: list[str] = []
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    for parameter in layer.parameters():
        parameter.register_hook(lambda _: seen.append("gradient"))
    x_TBF.requires_grad_()
    saved: list[int] = []
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(1) or t, lambda t: t):  # type: ignore[func-returns-value]
        layer(x_TBF)
    cold, after = len(saved), torch.get_rng_state()
    assert seen == ["forward"]
    assert x_TBF.grad is None
    assert all(parameter.grad is None for parameter in layer.parameters())
    saved.clear()
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(1) or t, lambda t: t):  # type: ignore[func-returns-value]
        layer(x_TBF)
    assert torch.equal(torch.get_rng_state(), after)
    assert len(saved) == cold


def test_the_choice_can_be_made_anew(x_TBF: torch.Tensor) -> None:
    layer = stretto.accelerate(nn.GRU(F, H).double(), backend="torch")
    wanted = layer(x_TBF)[0]
    assert _backend(layer) == "torch"
    stretto.accelerate(layer, backend="cpp")
    assert (layer(x_TBF)[0] - wanted).abs().max() <= 1e-10
    assert _backend(layer) == "cpp"


WRONG: dict[str, Callable[[nn.RNNBase], Any]] = {
    "features": lambda layer: layer(torch.zeros(T, B, F + 1)),
    "dimensions": lambda layer: layer(torch.zeros(T, B, F, 1)),
    "precision": lambda layer: layer(torch.zeros(T, B, F, dtype=torch.float64)),
    "state for another batch": lambda layer: layer(torch.zeros(T, B, F), torch.zeros(1, B + 1, H)),
    "state of a single sequence": lambda layer: layer(torch.zeros(T, B, F), torch.zeros(1, H)),
    "state for a single sequence": lambda layer: layer(torch.zeros(T, F), torch.zeros(1, B, H)),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_refused_in_the_words_of_torch(what: str) -> None:
    layer = nn.GRU(F, H)
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        WRONG[what](layer)
    stretto.accelerate(layer, backend="cpp")
    with pytest.raises(theirs.type) as ours:
        WRONG[what](layer)
    assert str(ours.value) == str(theirs.value)


def test_what_is_no_module_is_refused() -> None:
    for call in (stretto.accelerate, stretto.restore, stretto.explain):
        with pytest.raises(StrettoError, match="list is not a module"):
            call([nn.GRU(F, H)])  # type: ignore[operator]


def test_an_unknown_backend_is_refused_and_nothing_is_changed(x_TBF: torch.Tensor) -> None:
    layer = nn.GRU(F, H).double()
    with pytest.raises(StrettoError, match="'fast'"):
        stretto.accelerate(layer, backend="fast")  # type: ignore[arg-type]
    layer(x_TBF)
    assert stretto.explain(layer).layers[0].reason == "not accelerated"


@pytest.mark.parametrize("kind", ["LSTM", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("GRU", "RNN"))])
def test_a_first_training_step_does_not_import_the_compiler_of_torch(kind: str) -> None:
    code = f"""
import sys, torch, stretto
y, _ = stretto.accelerate(torch.nn.{kind}(8, 4))(torch.randn(5, 3, 8))
y.sum().backward()
print(sorted({{"sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("case", [(False, 0.8, "cpp"), (False, 0.5, "torch"), (True, 0.8, "torch")])
def test_where_other_work_leaves_a_doubt_generated_code_runs(
    case: tuple[bool, float, str], x_TBF: torch.Tensor, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    machine.is_quiet, speedup, backend = case
    assert machine.new_process(x_TBF, times=(1.0, speedup)) == backend


def test_rounds_that_there_was_no_time_for_are_a_disturbance(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, clock = nn.GRU(1, 1), [0.0]
    pauses = iter([0.0] * 100)

    def one_run(run: choice.Run, *_: Any, **__: Any) -> float:
        clock[0] += 0.001 + next(pauses)
        return 0.001

    monkeypatch.setattr(choice, "_one_run", one_run)
    monkeypatch.setattr(choice, "_quiet_run", lambda run, **_: (run(), True))
    monkeypatch.setattr(choice.time, "perf_counter", lambda: clock[0])
    runs = {"generated": lambda *_: layer, "torch": lambda *_: layer}
    assert choice._time(_kind(num_rows=1), runs)[1]
    pauses = iter([0.0] * 20 + [1.0] * 100)
    assert not choice._time(_kind(num_rows=1), runs)[1]


@final
class BusyMachine:
    """Clocks of a machine on which other work always has a core: each run takes a second more than its own time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, interrupts: bool = True) -> None:
        self.wall, self.on_core, self.interruptions, self.interrupts = 0.0, 0.0, 0, interrupts
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(measure.time, "thread_time", lambda: self.on_core)
        monkeypatch.setattr(measure, "_times_interrupted", lambda: self.interruptions)

    def run(self, seconds: float) -> float:
        self.wall += seconds + 1.0
        self.on_core += seconds
        self.interruptions += self.interrupts
        return seconds + 1.0


def test_of_disturbed_runs_the_time_on_a_core_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = BusyMachine(monkeypatch)
    assert measure.quiet_run(lambda: machine.run(0.25), end=100.0, on_cpu=True) == (0.25, False)
    assert measure.quiet_run(lambda: machine.run(0.25), end=100.0) == (1.25, False), "a GPU's time is not a thread's"
    quiet = BusyMachine(monkeypatch, interrupts=False)
    assert measure.quiet_run(lambda: quiet.run(0.25), end=100.0, on_cpu=True) == (1.25, True)


@given(
    st.lists(st.tuples(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0), st.sampled_from([32, 2048])), min_size=2, max_size=2)
)
def test_the_best_of_two_lines_is_above_neither(points: list[tuple[float, float, int]]) -> None:
    one, other = (choice._line(*point) for point in points)
    best = choice._shortest(one, other)
    assert best.per_step > 0
    for steps in (choice.SHORT, choice.MAX_LONG):
        assert best.at(steps) <= min(one.at(steps), other.at(steps)) * (1 + 1e-9)
