"""The time benchmark in small: its rows, its gates, its files. No time is ever judged.

Shape legend: T steps, B sequences, F features of the input, S steps of all sequences, P real ones of a batch.
"""

import copy
import dataclasses
import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch

from bench import time_ranks
from bench.time_cases import Plan, _at_first, forgetting, slowed
from bench.time_chaotic import BETWEEN, chaotic, lyapunov
from bench.time_contest import SERIAL, TORCH, Goal, Subject, in_turns, pass_exact
from bench.time_page import write_time_figure, write_time_page
from bench.time_solvers import CASES, ON_DATA, TimeBench, TimeBenchSettings, run_time_bench
from bench.time_tables import TITLES, bench_tables, machine_line
from bench.time_training import Epoch, Training, TrainingRun
from bench.trained_nets import Nets, Recording, Recordings, memory_length, open_recordings
from bench.training_step import StepShape, drawn_batch
from stretto import extras
from stretto.cells import GRU
from stretto.cli.main import main
from stretto.data import RegimeSettings, SequenceSet, make_regimes, write_npz
from stretto.errors import StrettoError
from stretto.solvers import AbstractSolver, Chain, Serial, Shooting, Solved
from stretto.solvers.solver import Walked


@pytest.fixture(scope="module")
def without_jax() -> Iterator[None]:
    real = importlib.import_module

    def import_module(name: str, package: str | None = None) -> ModuleType:
        if name.partition(".")[0] == "jax":
            raise ImportError(f"No module named {name!r}")
        return real(name, package)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extras.importlib, "import_module", import_module)
        yield


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "made.npz"
    write_npz(path, make_regimes(RegimeSettings(num_train=8, median_length=60, mean_stay=20)))
    return path


@pytest.fixture(scope="module")
def quick(recorded: Path, quick_compiler: None, without_jax: None) -> TimeBench:
    return run_time_bench(TimeBenchSettings(quick=True, data=recorded, threads=1))


def test_every_case_gives_its_rows(quick: TimeBench) -> None:
    found: dict[str, list[str]] = {}
    for row in quick.rows:
        found.setdefault(row.case, []).append(row.way.split(",")[0])
    peers = [TORCH, SERIAL]
    other = [*peers, "Newton", "Newton", "multigrid to 1e-6", "multigrid as published"]
    assert found == {
        "carried": [*peers, "carried", "gradients too"],
        # Two nets each: forgets soon and late; at initial weights and trained.
        "forgets": [*peers, "exact chunks"] * 2,
        "chaotic": [SERIAL, "exact chunks", "multigrid to 1e-6", "Newton", "exact chunks"],
        "auto": [SERIAL, "auto"],
        "recordings": [*peers, "auto"],
        "others": other * 2,
    }
    assert len(quick.ranks) == 1
    assert quick.training is not None
    assert len(quick.training.runs) == 3
    assert quick.many is not None
    assert [row.ranks for row in quick.many.predictions] == [2, 4, 8]
    assert quick.threads == 1
    assert quick.judged == []


def test_ratios_and_errors_fit_together(quick: TimeBench) -> None:
    for row in quick.rows:
        least = {other.way: other for other in quick.rows if (other.case, other.net) == (row.case, row.net)}
        assert row.over_serial == pytest.approx(least[SERIAL].seconds / row.seconds)
        if TORCH in least:
            assert row.over_torch == pytest.approx(least[TORCH].seconds / row.seconds)
        else:
            assert row.over_torch is None
        assert 0 < row.timing.least <= row.seconds
        told = (row.case == "carried" and row.way not in (SERIAL, TORCH)) or row.way == "multigrid as published"
        # What is exact was let through the gate; what is not is off, and says so.
        assert (row.output_error > 1e-4 and (row.residual or 0.0) > 1e-4) if told else row.output_error <= 1e-5
        assert told or row.gradient_error <= 1e-4
        assert (row.residual is None) == (row.way in (SERIAL, TORCH))


def test_carried_gradients_are_nearer_than_cut_ones(quick: TimeBench) -> None:
    cut, carried = (row for row in quick.rows if row.case == "carried" and row.way not in (SERIAL, TORCH))
    assert carried.gradient_error < cut.gradient_error


def test_two_ranks_are_exact_and_walk_as_was_counted(quick: TimeBench) -> None:
    (run,) = quick.ranks
    assert max(run.output_error, run.gradient_error) <= 1e-5
    assert {name: timing.rounds for name, timing in run.timings.items()} == dict.fromkeys(
        ("whole", "relay", "quarter", "block alone", "blocks at once"), 2
    )
    assert run.ratio == pytest.approx(run.timings["whole"].least / run.timings["relay"].least)
    assert run.ahead.a_step > 0
    assert run.back.a_step > 0
    assert run.messages.sum_bytes == 4 * sum(p.numel() for p in GRU(2, 8).parameters())
    assert quick.many is not None
    (found,) = quick.many.checks
    assert found.same_rounds
    two = quick.many.predictions[0]
    # By the last digits of a state, two walks may meet one piece sooner.
    assert two.work == pytest.approx(run.work, abs=run.piece / (run.num_steps // 2) + 1e-9)


def test_training_is_told_epoch_by_epoch(quick: TimeBench) -> None:
    training = quick.training
    assert training is not None
    serial, *carried = training.runs
    assert serial.way == SERIAL
    assert training.aim == pytest.approx(serial.epochs[-1].accuracy - 0.005)
    assert serial.over_serial == 1.0
    assert serial.epochs[0].residual == 0.0
    assert all(run.epochs[0].residual > 0.0 for run in carried)
    assert all(1 <= len(run.epochs) <= 2 for run in training.runs)
    for run in training.runs:
        reached = any(epoch.accuracy >= training.aim for epoch in run.epochs)
        assert (run.reached is not None) == reached == (run.over_serial is not None)


def test_files(quick: TimeBench, tmp_path: Path) -> None:
    write_time_page(quick, tmp_path / "time.html")
    page = (tmp_path / "time.html").read_text()
    made = bench_tables(quick)
    assert len(made) == len(TITLES) + 5
    for table in made:
        assert table.title.replace('"', "&quot;") in page
        assert all(len(row) == len(table.headings) for row in table.rows)
    assert all(f"plot-{name}" in page for name in ("speed-ups", "works", "accuracies"))
    assert "A smoke test" in page
    assert quick.many is not None
    write_time_figure(quick.many, tmp_path / "time.svg")
    assert "ranks" in "".join(ET.parse(tmp_path / "time.svg").getroot().itertext())
    assert json.loads(quick.to_json())["quick"] is True
    assert "smoke test" in machine_line(quick)


def test_without_data_what_needs_them_is_left_out(
    tmp_path: Path, quick_compiler: None, without_jax: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["bench", "time", "--quick", "--cases", "forgets,ranks", "auto", "--threads", "1", "--out", str(out)]
    assert main([*words, "--json", str(tmp_path / "time.json")]) == 0
    said = capsys.readouterr().out
    assert "left out: auto, ranks: these are about trained nets" in said
    assert "left out: JAX scan" in said
    found = json.loads((tmp_path / "time.json").read_text())
    assert {row["case"] for row in found["rows"]} == {"forgets"}
    assert (found["ranks"], found["training"], found["many"]) == ([], None, None)
    assert sorted(path.name for path in out.iterdir()) == ["time.html", "time.json"]
    assert set(ON_DATA) < set(CASES)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--rounds", "0"], "rounds"),
        (["--data", "nowhere.npz"], "nowhere.npz"),
    ],
)
def test_what_is_refused(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "time", "--quick", *words]) == 2
    assert problem in capsys.readouterr().err


def test_cases_that_are_not_there_are_refused() -> None:
    with pytest.raises(StrettoError, match="there is no case 'dance'"):
        TimeBenchSettings(cases=("forgets", "carried,dance"))
    assert TimeBenchSettings(cases=("forgets", "carried,auto")).chosen == ("forgets", "carried", "auto")


def test_data_without_labels_of_steps_are_refused(tmp_path: Path) -> None:
    write_npz(tmp_path / "bare.npz", SequenceSet.from_flat(np.zeros((30, 1), np.float32), offsets=np.arange(0, 31, 3)))
    with pytest.raises(StrettoError, match="no labels of steps"):
        open_recordings(tmp_path / "bare.npz")


class Wrong(AbstractSolver):
    """Is off by a thousandth, in outputs or in gradients alone."""

    def __init__(self, *, outputs: bool) -> None:
        self._outputs = outputs

    def solve(self, chain: Chain) -> Solved:
        solved = Serial().solve(chain)
        y_PF = solved.walked.y_PF
        wrong_PF = 1.001 * y_PF if self._outputs else y_PF.detach() + 1.001 * (y_PF - y_PF.detach())
        return Solved(walked=Walked(y_PF=wrong_PF, states=solved.walked.states), solution=solved.solution)


@pytest.mark.parametrize("outputs", [True, False])
def test_who_is_not_exact_is_not_timed(outputs: bool, quick_compiler: None) -> None:
    subject = _at_first("made", 40, 5)
    wanted = subject.serial().results()
    pass_exact(subject.solved("right", Shooting(num_chunks=2)), wanted=wanted, where="here")
    with pytest.raises(StrettoError, match="output of wrong" if outputs else "gradient of .* of wrong"):
        pass_exact(subject.solved("wrong", Wrong(outputs=outputs)), wanted=wanted, where="here")


def test_ranks_that_are_not_exact_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, recorded: Path, quick: TimeBench
) -> None:
    answer = {"output_error": 1e-7, "gradient_error": 1e-3}
    monkeypatch.setattr(time_ranks, "_answer", lambda *_, **__: answer)
    nets = Nets(open_recordings(recorded), updates=1, tell=lambda _: None)
    with pytest.raises(StrettoError, match="gradient of two ranks differs"):
        time_ranks.run_ranks(dataclasses.replace(_plan(), nets=nets), nets)


def _plan() -> Plan:
    return Plan(rounds=1, chunks=None, nets=None, with_jax=False, quick=True, tell=lambda _: None)


def test_turns() -> None:
    said: list[str] = []
    found = in_turns({name: lambda name=name: said.append(name) for name in (TORCH, "a", "b")}, rounds=5)
    assert said == [TORCH, "a", "b", "a", "b", TORCH, "a", "b", "a", "b", "a", "b"]
    assert {name: timing.rounds for name, timing in found.items()} == {TORCH: 2, "a": 5, "b": 5}


def _leaky(decay: float) -> GRU:
    """A GRU whose state decays by the same share at every step, whatever the input."""
    cell = GRU(1, 4)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.zero_()
        # The second gate is the update gate, and two biases add up.
        cell.bias_ih[4:8] = math.log(decay / (1 - decay))
        # The new value is 1/2 or so, and not where walks begin.
        cell.bias_ih[8:] = 0.5
    return cell


@pytest.mark.parametrize("decay", [0.5, 0.9])
def test_memory_is_as_long_as_it_takes_to_forget(decay: float, quick_compiler: None) -> None:
    found = memory_length(_leaky(decay), torch.zeros(4 * 200, 1), tolerance=1e-4, places=4, stride=1)
    # All walks end at tanh(1/2), and begin there or at zero.
    assert found == pytest.approx(math.log(1e-4 / math.tanh(0.5)) / math.log(decay), abs=1.5)
    assert memory_length(_leaky(1 - 1e-9), torch.zeros(80, 1), tolerance=1e-4, places=4) in (20.0, math.inf)


def test_nets_that_forget_soon_and_late_are_found(quick_compiler: None) -> None:
    x_TBF = drawn_batch(StepShape(num_steps=8 * 64, batch=1, input_size=6, hidden_size=5)).x_TBF
    torch.manual_seed(0)
    remembers = GRU(6, 5)
    with torch.no_grad():
        remembers.weight_hh.mul_(3.0)
    soon = forgetting(remembers, x_TBF)
    late = slowed(soon, x_TBF)
    assert soon.memory <= late.memory <= 64
    assert memory_length(late.cell, x_TBF[:, 0], tolerance=1e-6, places=8, stride=16) == late.memory
    with torch.no_grad():
        late.cell.bias_ih[5:10] += 0.1
    assert memory_length(late.cell, x_TBF[:, 0], tolerance=1e-6, places=8, stride=16) > 64


def test_chaotic_nets_fall_back_and_say_so(quick: TimeBench) -> None:
    rows = [row for row in quick.rows if row.case == "chaotic" and row.way != SERIAL]
    assert all(row.fell_back and row.told for row in rows)
    assert all("Lyapunov exponent +" in row.net for row in rows)


def _jacobian(cell: GRU, x_F: torch.Tensor, state_BH: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.autograd.functional.jacobian(  # type: ignore[no-untyped-call]
        lambda state_H: cell(x_F[None], state_H[None])[1][0], state_BH[0]
    )
    return found


def test_exponents_are_those_of_jacobians() -> None:
    """Beside products of the step's Jacobians, for nets that forget and nets that do not."""
    torch.manual_seed(0)
    x_TF = torch.randn(256, 2)
    for scale in (0.5, 3.0, 12.0):
        cell = GRU(2, 6)
        with torch.no_grad():
            cell.weight_hh.mul_(scale)
        twin = copy.deepcopy(cell).double()
        state_BH, moved_H, grown = twin.initial_state(1), torch.ones(6, dtype=torch.float64), 0.0
        for step, x_F in enumerate(x_TF.double()):
            moved_H = _jacobian(twin, x_F, state_BH) @ moved_H
            grown += math.log(float(moved_H.norm())) if step >= BETWEEN else 0.0
            moved_H = moved_H / moved_H.norm()
            state_BH = twin(x_F[None], state_BH)[1].detach()
        assert lyapunov(cell, x_TF) == pytest.approx(grown / (len(x_TF) - BETWEEN), abs=2e-3)


def test_a_chaotic_net_is_found_or_said_to_be_missing() -> None:
    torch.manual_seed(0)
    net = chaotic(GRU(2, 8), torch.randn(300, 2))
    assert net.exponent > 0
    assert net.scale > 1
    with pytest.raises(StrettoError, match="make a net of 1 units chaotic"):
        chaotic(GRU(2, 1), torch.zeros(64, 2))


def test_recordings_joined_and_alike() -> None:
    def made(length: int) -> Recording:
        return Recording(x_TF=torch.full((length, 2), float(length)), labels_T=torch.ones(length, dtype=torch.int64))

    data = Recordings(name="made", train=tuple(map(made, (9, 3, 5, 7))), test=(made(4),), num_classes=2)
    joined_TF = data.joined(60)
    assert joined_TF.shape == (60, 2)
    assert joined_TF[:14, 0].tolist() == [4.0] * 4 + [9.0] * 9 + [3.0]
    assert torch.equal(joined_TF[28:56], joined_TF[:28])
    assert [len(recording) for recording in data.alike(2)] == [5, 7]
    assert len(data.alike(9)) == 4


def test_real_recordings(shared_data: Path) -> None:
    data = open_recordings(shared_data / "hapt" / "hapt.npz")
    assert (len(data.train), len(data.test), data.num_features, data.num_classes) == (37, 19, 6, 13)
    every_SF = torch.cat([recording.x_TF for recording in data.train])
    assert every_SF.mean(dim=0).abs().max() < 1e-3
    assert (every_SF.std(dim=0) - 1).abs().max() < 1e-3
    assert all(len(recording.labels_T) == len(recording) for recording in (*data.train, *data.test))


def _trained(*reached: float | None) -> Training:
    runs = tuple(
        TrainingRun(
            way=f"way {number}",
            epochs=(Epoch(seconds=1.0, accuracy=0.5, residual=0.0),),
            reached=seconds,
            over_torch=None if seconds is None else 100 / seconds,
            over_serial=None if seconds is None else 2 / seconds,
            goal=Goal(over_torch=60, over_serial=1.6),
        )
        for number, seconds in enumerate(reached)
    )
    return Training(runs=runs, aim=0.5, recordings=1, num_steps=9, hidden_size=8, torch_epoch=50.0, torch_steps=9)


def test_the_better_of_carried_ways_counts() -> None:
    assert _trained(2.0, None, 1.0).best.way == "way 2"
    assert _trained(2.0, None, 1.0).judged == [True, True]
    assert _trained(2.0, 1.5, 1.8).judged == [True, False]
    assert _trained(2.0, None, None).judged == [False, False]


def test_a_subject_knows_its_sizes() -> None:
    subject = _at_first("made", 12, 5)
    assert isinstance(subject, Subject)
    assert subject.where == "made, T=12, B=1, F=6, H=5"
