"""The benchmark of whole trainings: the gate, the parity of both sides, and the arithmetic. No time is ever judged.

Shape legend: S words of a text, N sequences.
"""

import ast
import dataclasses
import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import plain, training
from bench.machine import machine_with
from bench.training import TASK_NAMES, TaskRow, TrainingBench, TrainingBenchSettings, run_training_bench
from bench.training_contest import AbstractSide, Contest, Course, Margin, Reached, Turn, in_turn
from bench.training_data import open_data, some_of
from bench.training_gate import Start, first_batch, pass_start, take_weights
from bench.training_page import write_training_page
from bench.training_pairs import Rival, rival_of
from bench.training_sides import StrettoSide
from bench.training_tables import bench_tables, mean_text
from stretto.cli.main import main
from stretto.data import SequenceSet
from stretto.errors import StrettoError
from stretto.tasks import CONFIGS, task_named
from stretto.training import AbstractTask, checked, fresh_state, with_preset

HIGHER = Margin(amount=0.002, higher_is_better=True)
LOWER = Margin(amount=0.01, relative=True)
ANY = Margin(amount=math.inf)
EPOCHS = 3
SMALL: dict[str, dict[str, Any]] = {
    "digits": {"hidden_size": 8, "row_size": 16, "clip_norm": 0.1},
    "digit-images": {"hidden_size": 16, "clip_norm": 0.1},
    "language-model": {
        "preset": "ptb-small",
        "hidden_size": 8,
        "embedding_size": 8,
        "batch_size": 4,
        "window": 5,
        "flat_epochs": 1,
        "base_batch_size": 4,
    },
    "translate": {"hidden_size": 16, "dropout": 0.0, "learning_rate": 0.02, "clip_norm": 0.1},
    "handwriting": {"hidden_size": 8, "dropout": 0.0, "learning_rate": 0.02, "clip_norm": 0.1},
}


def _text() -> SequenceSet:
    """Sequences whose streams of 4 are whole windows of 5: nothing is left over on either side."""
    lengths_N = [4 * 5 * 6 + 1, 4 * 5 * 2 + 1, 4 * 5 + 1]
    words_S = (np.arange(sum(lengths_N)) ** 2 % 11).astype(np.uint16)
    return SequenceSet.from_flat(
        words_S,
        offsets=np.cumsum([0, *lengths_N]),
        split_N=np.array([0, 1, 2]),
        vocabulary=tuple(f"w{number}" for number in range(11)),
        name="drawn words",
    )


def _data(name: str) -> SequenceSet:
    if name == "language-model":
        return _text()
    data = open_data(name, None).data
    short = data.subset(np.flatnonzero(data.lengths_N <= np.quantile(data.lengths_N, 0.2)))
    for part in ("train", "valid"):
        count = int((short.split_N == (part == "valid")).sum())
        short = some_of(short, part=part, fraction=24 / count, seed=1)
    return short


def _task(name: str, data: SequenceSet, **changed: Any) -> AbstractTask[Any]:
    """Small, and where it takes sequences, all of them in one batch: their order makes no difference."""
    whole = {} if name == "language-model" else {"batch_size": len(data.part("train")), "num_buckets": 1}
    values = with_preset(CONFIGS[name], {"epochs": EPOCHS, **whole, **SMALL[name], **changed})
    return task_named(name)(checked(CONFIGS[name], values, source="the test"), data)


@dataclasses.dataclass(frozen=True)
class _Both:
    task: AbstractTask[Any]
    stretto: StrettoSide
    rival: Rival

    def losses(self) -> tuple[float, float]:
        batch = first_batch(self.task)
        self.stretto.model.eval()
        self.rival.script.model.eval()
        with torch.no_grad(), fresh_state(self.stretto.model):
            ours = self.task.loss(self.stretto.model(batch), batch)
            return float(self.rival.loss_of(batch)), float(ours.total) / ours.count


@pytest.fixture
def both(request: pytest.FixtureRequest, tmp_path: Path, quick_compiler: None) -> _Both:
    name = request.param
    data = _data(name)
    task = _task(name, data)
    return _Both(task, StrettoSide(task, run=tmp_path / "run"), rival_of(task, data))


@pytest.mark.parametrize("both", TASK_NAMES, indirect=True)
def test_both_sides_begin_alike_and_train_alike(both: _Both) -> None:
    start = pass_start(both.task, both.stretto, both.rival, margin=TrainingBenchSettings().margin(both.task.metric))
    assert start.error <= 1e-4
    assert start.stretto_value == pytest.approx(start.plain_value, rel=1e-3)
    # The same batches, so that all but rounding must be the same: rates, clipping, decay, the optimiser.
    for _ in range(EPOCHS):
        both.rival.script.epoch()
        turn = both.stretto.turn()
    theirs, ours = both.losses()
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert abs(theirs - start.plain_loss) > 0.01 * start.plain_loss
    assert turn.value == pytest.approx(both.rival.script.quality(), rel=0.05, abs=0.05)
    assert turn.batch_size == both.rival.batch_size


@pytest.mark.parametrize("both", ["digits"], indirect=True)
def test_the_gate_finds_a_net_that_computes_something_else(both: _Both) -> None:
    both.rival.script.model.register_forward_hook(lambda *call: call[2] + torch.arange(10.0))
    with pytest.raises(
        StrettoError, match=r"the loss of stretto differs from that of the plain script by .* at digits"
    ):
        pass_start(both.task, both.stretto, both.rival, margin=ANY)


@pytest.mark.parametrize("both", ["digits"], indirect=True)
def test_the_gate_finds_a_gradient_that_is_cut_off(both: _Both) -> None:
    transform = both.rival.script.model.get_submodule("transform")
    transform.register_forward_hook(lambda *call: call[2].detach() + 0.0 * call[2])
    with pytest.raises(StrettoError, match="the gradient of stretto differs"):
        pass_start(both.task, both.stretto, both.rival, margin=ANY)


@pytest.mark.parametrize("both", ["digits"], indirect=True)
def test_the_gate_finds_another_measure_of_quality(both: _Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both.rival.script, "quality", lambda: 0.75)
    with pytest.raises(StrettoError, match=r"the plain script measures accuracy 0.75 and stretto"):
        pass_start(both.task, both.stretto, both.rival, margin=HIGHER)


def test_the_gate_finds_a_net_of_another_size(tmp_path: Path) -> None:
    data = _data("digits")
    script = rival_of(_task("digits", data), data).script
    larger = task_named("digits")(_task("digits", data, hidden_size=12).config, data).build_model()
    with pytest.raises(StrettoError, match="the plain script has another net than Stretto"):
        take_weights(script, larger)


def test_plain_scripts_have_nothing_of_stretto() -> None:
    assert plain.__file__ is not None
    files = sorted(Path(plain.__file__).parent.glob("*.py"))
    assert len(files) == len(TASK_NAMES) + 1
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.partition(".")[0] == "stretto" for name in names), file.name


def _course(values: Iterable[float], *, seconds: float = 1.0) -> Course:
    return Course(turns=tuple(Turn(seconds=seconds, value=value, batch_size=4) for value in values))


def test_time_to_target_is_that_of_the_first_epoch_that_gets_there() -> None:
    plain_side = _course([0.90, 0.949, 0.96, 0.95], seconds=2.0)
    ours = _course([0.91, 0.94, 0.9485, 0.97], seconds=0.5)
    contest = Contest.of(plain_side, ours, HIGHER)
    assert contest.target == 0.95
    assert contest.limit == pytest.approx(0.948)
    assert contest.plain_reached == Reached(epochs=2, seconds=4.0)
    assert contest.stretto_reached == Reached(epochs=3, seconds=1.5)
    assert contest.ratio == pytest.approx(4.0 / 1.5)
    assert contest.epoch_ratio == pytest.approx(4.0)
    # What went into choosing the batch counts for the time, and not for the pace of epochs.
    probing = Course(turns=(dataclasses.replace(ours.turns[0], seconds=3.5, probed=3.0), *ours.turns[1:]))
    later = Contest.of(plain_side, probing, HIGHER)
    assert later.ratio == pytest.approx(4.0 / 4.5)
    assert later.epoch_ratio == pytest.approx(4.0)


def test_not_reached_is_told_and_counts_with_all_its_time() -> None:
    contest = Contest.of(_course([200.0, 100.0], seconds=3.0), _course([300.0, 150.0, 101.5]), LOWER)
    assert contest.stretto_reached is None
    assert not contest.is_reached
    assert contest.plain_reached == Reached(epochs=2, seconds=6.0)
    assert contest.ratio == pytest.approx(6.0 / 3.0)


@given(
    values=st.lists(st.floats(0, 10, allow_nan=False), min_size=1, max_size=8),
    seconds=st.lists(st.floats(0.01, 10), min_size=8, max_size=8),
    target=st.floats(0, 10),
    amount=st.floats(0, 2),
    higher=st.booleans(),
)
def test_reached_is_what_it_says(
    values: list[float], seconds: list[float], target: float, amount: float, higher: bool
) -> None:
    course = Course(turns=tuple(Turn(seconds=s, value=v, batch_size=1) for s, v in zip(seconds, values, strict=False)))
    found = course.reached(target, Margin(amount=amount, higher_is_better=higher))
    sums = list(itertools.accumulate(seconds))
    there = [value >= target - amount if higher else value <= target + amount for value in values]
    if any(there):
        first = there.index(True)
        assert found == Reached(epochs=first + 1, seconds=pytest.approx(sums[first]))
    else:
        assert found is None


@given(value=st.floats(0.1, 100), amount=st.floats(0, 0.5), higher=st.booleans(), relative=st.booleans())
def test_a_value_reaches_itself_and_no_number_reaches_nothing(
    value: float, amount: float, higher: bool, relative: bool
) -> None:
    margin = Margin(amount=amount, higher_is_better=higher, relative=relative)
    assert margin.is_reached(value, value=value)
    assert not margin.is_reached(math.nan, value=value)
    assert not margin.is_reached(value, value=math.nan)


class _Played(AbstractSide):
    """Gives the values it was told to, and notes whose turn it was."""

    def __init__(self, name: str, values: Iterable[float | StrettoError], turns: list[str]) -> None:
        self._name, self._values, self._turns = name, iter(values), turns

    def turn(self) -> Turn:
        self._turns.append(self._name)
        value = next(self._values)
        if isinstance(value, StrettoError):
            raise value
        return Turn(seconds=1.0, value=value, batch_size=2)


def _played(ours: Iterable[float | StrettoError], *, epochs: int = 4) -> tuple[Contest, list[str]]:
    turns: list[str] = []
    sides = [_Played("plain", [4.0, 3.0, 2.0, 1.0][:epochs], turns), _Played("stretto", ours, turns)]
    contest = in_turn(sides[0], sides[1], epochs=epochs, margin=LOWER, tell=str)
    return contest, turns


def test_epochs_are_trained_in_turn_and_no_more_than_needed() -> None:
    contest, turns = _played([3.0, 1.0, 1.0, 1.0])
    assert turns == ["plain", "stretto"] * 4
    assert contest.stretto_reached == Reached(epochs=2, seconds=2.0)
    assert contest.ratio == 2.0


def test_stretto_may_train_half_as_many_epochs_more() -> None:
    contest, turns = _played([9.0, 9.0, 9.0, 9.0, 1.0, 1.0])
    assert turns[8:] == ["stretto"]
    assert contest.stretto_reached == Reached(epochs=5, seconds=5.0)
    contest, turns = _played([9.0] * 6)
    assert turns[8:] == ["stretto"] * 2
    assert contest.stretto_reached is None


def test_a_fault_in_the_middle_is_told_and_the_task_is_kept() -> None:
    contest, turns = _played([9.0, StrettoError("the loss is nan", fix="Lower the rate.")])
    assert turns == ["plain", "stretto", "plain", "stretto", "plain", "plain"]
    assert "the loss is nan" in contest.stretto.fault
    assert not contest.is_reached
    assert len(contest.plain.turns) == 4
    with pytest.raises(StrettoError, match="the data are not there"):
        _played([StrettoError("the data are not there", fix="Bring them.")])


def test_some_of_the_data() -> None:
    data = open_data("digits", None).data
    fewer = some_of(data, part="train", fraction=0.01, seed=3)
    assert len(fewer.part("train")) == round(0.01 * len(data.part("train")))
    assert len(fewer.part("valid")) == len(data.part("valid"))
    again = some_of(data, part="train", fraction=0.01, seed=3)
    np.testing.assert_array_equal(fewer.numbers_N, again.numbers_N)
    text = open_data("language-model", None).data
    begun = some_of(text, part="train", fraction=0.1, seed=3).part("train")
    np.testing.assert_array_equal(begun.numbers_N, text.part("train").numbers_N[: len(begun)])


def test_data_that_are_not_there(tmp_path: Path) -> None:
    opened = open_data("digits", tmp_path)
    assert len(opened.data)
    assert opened.is_embedded
    assert "has no mnist" in opened.note
    assert not open_data("handwriting", tmp_path).note
    with pytest.raises(StrettoError, match="there is no folder"):
        open_data("digits", tmp_path / "nowhere")


def test_tasks_that_are_named_twice_or_not_at_all() -> None:
    for tasks in ((), ("digits", "digits")):
        with pytest.raises(StrettoError, match="Name each once, of digits"):
            run_training_bench(TrainingBenchSettings(tasks=tasks), tell=print)  # type: ignore[arg-type]


def _bench(*contests: Contest) -> TrainingBench:
    start = Start(plain_loss=1.0, stretto_loss=1.0, error=1e-7, plain_value=0.1, stretto_value=0.1)
    rows = [
        TaskRow(
            task=name,
            data="made",
            sequences=10,
            metric="perplexity",
            epochs=2,
            start=start,
            contest=contest,
            decisions=("after epoch 1, grow to 8",),
        )
        for name, contest in zip(TASK_NAMES, contests, strict=False)
    ]
    mean = math.prod(row.contest.ratio for row in rows) ** (1 / len(rows))
    return TrainingBench(
        rows=tuple(rows), geometric_mean=mean, threads=1, machine=machine_with([]), settings={}, missing=(), seconds=1.0
    )


def test_what_was_not_reached_stays_in_the_table(tmp_path: Path) -> None:
    reached = Contest.of(_course([2.0, 1.0], seconds=4.0), _course([1.0, 1.0]), LOWER)
    not_reached = Contest.of(_course([2.0, 1.0]), _course([9.0, 9.0, 9.0]), LOWER)
    bench = _bench(reached, not_reached)
    assert bench.not_reached == (TASK_NAMES[1],)
    first = bench_tables(bench)[0]
    assert [row[0] for row in first.rows] == [*TASK_NAMES[:2], "geometric mean"]
    assert first.rows[1][-2:] == ("not reached", "< 0.67")
    assert first.rows[2][-1] == mean_text(bench) == "< 2.31"
    assert f"1 of 2 tasks reached the quality of the plain script; not reached: {TASK_NAMES[1]}" in first.caption
    assert mean_text(_bench(reached)) == "8.00"
    diverged = _bench(Contest.of(_course([2.0, math.nan]), _course([1.0, 1.0]), LOWER))
    assert diverged.not_reached == (TASK_NAMES[0],)
    assert json.loads(diverged.to_json())["rows"][0]["contest"]["target"] is None
    write_training_page(bench, tmp_path / "training.html")
    page = (tmp_path / "training.html").read_text(encoding="utf-8")
    assert all(text in page for text in ("not reached", "grow to 8", f"plot-quality-{TASK_NAMES[1]}", "&lt; 2.31 x"))


def test_a_whole_run_of_two_tasks(
    tmp_path: Path, quick_compiler: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        "digits": SMALL["digits"],
        "language-model": {**SMALL["language-model"], "base_batch_size": 20, "batch_size": 20},
    }
    monkeypatch.setattr(training, "ASKED", small)
    flags = ["--quick", "--epochs", "1", "--seed", "1", "--out", str(tmp_path), "--json", str(tmp_path / "also.json")]
    assert main(["bench", "training", "--tasks", "digits", "language-model", *flags]) == 0
    said = capsys.readouterr().out
    assert "language-model: epoch 1 of 1, plain" in said
    assert "geometric mean" in said
    found = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    assert found == json.loads((tmp_path / "also.json").read_text(encoding="utf-8"))
    assert [row["task"] for row in found["rows"]] == ["digits", "language-model"]
    for row in found["rows"]:
        contest = row["contest"]
        assert len(contest["plain"]["turns"]) == 1
        assert 1 <= len(contest["stretto"]["turns"]) <= 2
        assert contest["target"] == contest["plain"]["turns"][0]["value"]
        assert contest["plain_reached"]["epochs"] == 1
        assert all(turn["seconds"] > 0 for side in ("plain", "stretto") for turn in contest[side]["turns"])
        # The batch was to be chosen by measuring, and that takes time, which counts.
        assert 0 < contest["stretto"]["turns"][0]["probed"] < contest["stretto"]["turns"][0]["seconds"]
        assert row["start"]["error"] <= 1e-4
    ratios = [row["contest"]["ratio"] for row in found["rows"]]
    assert found["geometric_mean"] == pytest.approx(math.sqrt(math.prod(ratios)))
    assert "Quality over time" in (tmp_path / "training.html").read_text(encoding="utf-8")


def test_a_share_of_the_data_in_a_folder_is_taken_and_told(
    tmp_path: Path, quick_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ptb").mkdir()
    for part in ("train", "valid", "test"):
        lines = "the cat sat on a mat\na dog ran to the cat\n" * 40
        (tmp_path / "ptb" / f"tiny.{part}.txt").write_text(lines, encoding="utf-8")
    monkeypatch.setattr(training, "ASKED", SMALL)
    monkeypatch.setattr(training, "SHARES", {"language-model": 0.5})
    asked = TrainingBenchSettings(tasks=("language-model",), data=tmp_path, epochs=1, batch_size="own")
    half = run_training_bench(asked, tell=lambda _: None)
    assert half.rows[0].sequences == 40
    assert [note for note in half.missing if "trained on 50% of" in note and "--fraction 1" in note]
    whole = run_training_bench(dataclasses.replace(asked, fraction=1.0), tell=lambda _: None)
    assert whole.rows[0].sequences == 80
    assert not whole.missing


def test_real_data_are_found(shared_data: Path) -> None:
    for name in ("digits", "language-model", "translate"):
        opened = open_data(name, shared_data)
        assert not opened.note
        assert not opened.is_embedded
        assert len(opened.data.part("train")) > 10_000
