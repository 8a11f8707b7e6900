"""The benchmark of training: both sides are the same model, and time to quality is what it says."""

import ast
import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_reports import column, measure

from bench import plain, training
from bench.baselines import Baseline, baseline_of
from bench.task_data import open_data, take_share
from bench.training import (
    TASK_NAMES,
    AutoContender,
    Comparison,
    EpochTiming,
    LearningCurve,
    Margin,
    StrettoContender,
    TrainingSettings,
    check_same_start,
    copy_weights,
    first_batch,
    train_in_turn,
)
from stretto.data import SequenceSet
from stretto.errors import StrettoError
from stretto.nn import fresh_state
from stretto.tasks import find_task
from stretto.training import AbstractTask, validate, with_preset

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
    """Sequences whose streams of 4 are whole windows of 5: nothing remains on either side."""
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
    data, _ = open_data(name, None)
    short = data.subset(np.flatnonzero(data.lengths_N <= np.quantile(data.lengths_N, 0.2)))
    for part in ("train", "valid"):
        count = int((short.split_N == (part == "valid")).sum())
        short = take_share(short, part=part, share=24 / count, seed=1)  # type: ignore[arg-type]
    return short


def _task(name: str, data: SequenceSet, **changed: Any) -> AbstractTask[Any]:
    """Small, and where it takes sequences, all of them in one batch: their order makes no difference."""
    whole = {} if name == "language-model" else {"batch_size": len(data.part("train")), "num_buckets": 1}
    values = with_preset(find_task(name).Config, {"epochs": EPOCHS, **whole, **SMALL[name], **changed})
    return find_task(name)(validate(find_task(name).Config, values, source="the test"), data)


@dataclasses.dataclass(frozen=True)
class _Both:
    task: AbstractTask[Any]
    stretto: StrettoContender
    baseline: Baseline

    def losses(self) -> tuple[float, float]:
        batch = first_batch(self.task)
        self.stretto.model.eval()
        self.baseline.script.model.eval()
        with torch.no_grad(), fresh_state(self.stretto.model):
            ours = self.task.loss(self.stretto.model(batch), batch)
            return float(self.baseline.loss(batch)), float(ours.total) / ours.count


@pytest.fixture
def both(request: pytest.FixtureRequest, tmp_path: Path, quick_compiler: None) -> _Both:
    data = _data(request.param)
    task = _task(request.param, data)
    return _Both(task, StrettoContender(task, run=tmp_path / "run"), baseline_of(task, data))


@pytest.mark.parametrize("both", TASK_NAMES, indirect=True)
def test_both_sides_begin_alike_and_train_alike(both: _Both) -> None:
    margin = TrainingSettings().margin(both.task.metric)
    plain_loss, _, error, plain_value, stretto_value = check_same_start(
        both.task, both.stretto, both.baseline, margin=margin
    )
    assert error <= 1e-4
    assert stretto_value == pytest.approx(plain_value, rel=1e-3)
    # The same batches, so that all but rounding must be the same: rates, clipping, decay, the optimiser.
    for _ in range(EPOCHS):
        both.baseline.script.epoch()
        timing = both.stretto.train_epoch()
    theirs, ours = both.losses()
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert abs(theirs - plain_loss) > 0.01 * plain_loss
    assert timing.value == pytest.approx(both.baseline.script.quality(), rel=0.05, abs=0.05)
    assert timing.batch_size == both.baseline.batch_size


@pytest.mark.parametrize("both", ["digits"], indirect=True)
@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        (("", lambda *call: call[2] + torch.arange(10.0)), "loss of stretto differs from the plain script"),
        (("transform", lambda *call: call[2].detach() + 0.0 * call[2]), "gradient of stretto differs"),
    ],
    ids=["loss", "gradient"],
)
def test_a_plain_script_that_computes_something_else_is_refused(both: _Both, hook: Any, problem: str) -> None:
    both.baseline.script.model.get_submodule(hook[0]).register_forward_hook(hook[1])
    with pytest.raises(StrettoError, match=problem):
        check_same_start(both.task, both.stretto, both.baseline, margin=ANY)


@pytest.mark.parametrize("both", ["digits"], indirect=True)
def test_another_measure_of_quality_or_another_net_is_refused(both: _Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both.baseline.script, "quality", lambda: 0.75)
    with pytest.raises(StrettoError, match=r"the plain script measures accuracy 0.75 and stretto"):
        check_same_start(both.task, both.stretto, both.baseline, margin=HIGHER)
    larger = _task("digits", _data("digits"), hidden_size=12).build_model()
    with pytest.raises(StrettoError, match="the plain script has another net than Stretto"):
        copy_weights(larger, both.baseline.script)


def test_plain_scripts_import_nothing_of_stretto() -> None:
    assert plain.__file__ is not None
    files = sorted(Path(plain.__file__).parent.glob("*.py"))
    assert len(files) == 6
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.partition(".")[0] in ("stretto", "bench") for name in names), file.name


def _curve(values: Iterable[float], *, seconds: float = 1.0) -> LearningCurve:
    return LearningCurve(epochs=tuple(EpochTiming(seconds=seconds, value=value, batch_size=4) for value in values))


def test_time_to_the_target_is_that_of_the_first_epoch_that_reaches_it() -> None:
    script, ours = _curve([0.90, 0.949, 0.96, 0.95], seconds=2.0), _curve([0.91, 0.94, 0.9485, 0.97], seconds=0.5)
    comparison = Comparison(plain=script, stretto=ours, margin=HIGHER)
    assert comparison.target == 0.95
    assert comparison.limit == pytest.approx(0.948)
    assert (comparison.plain_reached, comparison.stretto_reached) == ((2, 4.0), (3, 1.5))
    assert not HIGHER.reaches(math.nan, 0.95)
    assert not HIGHER.reaches(0.95, math.nan)
    assert comparison.ratio == pytest.approx(4.0 / 1.5)
    # Choosing the batch counts for the time to the target, not for the time per epoch.
    probing = LearningCurve(
        epochs=(dataclasses.replace(ours.epochs[0], seconds=3.5, probe_seconds=3.0), *ours.epochs[1:])
    )
    assert Comparison(plain=script, stretto=probing, margin=HIGHER).ratio == pytest.approx(4.0 / 4.5)
    assert probing.median == ours.median == 0.5


class _Scripted:
    """Gives the values in a list, and notes whose turn it was."""

    def __init__(self, name: str, values: Iterable[float | StrettoError], turns: list[str]) -> None:
        self._name, self._values, self._turns = name, iter(values), turns

    def train_epoch(self) -> EpochTiming:
        self._turns.append(self._name)
        value = next(self._values)
        if isinstance(value, StrettoError):
            raise value
        return EpochTiming(seconds=1.0, value=value, batch_size=2)


def _train(ours: Iterable[float | StrettoError]) -> tuple[Comparison, list[str]]:
    turns: list[str] = []
    script, stretto = _Scripted("plain", [4.0, 3.0, 2.0, 1.0], turns), _Scripted("stretto", ours, turns)
    return train_in_turn(script, stretto, epochs=4, margin=LOWER, progress=str), turns


def test_epochs_are_trained_in_turn_and_stretto_may_train_half_as_many_more() -> None:
    comparison, turns = _train([3.0, 1.0, 1.0, 1.0])
    assert turns == ["plain", "stretto"] * 4
    assert comparison.stretto_reached == (2, 2.0)
    comparison, turns = _train([9.0, 9.0, 9.0, 9.0, 1.0, 1.0])
    assert turns[8:] == ["stretto"]
    assert comparison.stretto_reached == (5, 5.0)
    comparison, turns = _train([9.0] * 6)
    assert turns[8:] == ["stretto"] * 2
    assert not comparison.is_reached
    assert comparison.ratio == pytest.approx(4.0 / 6.0)


def test_an_error_in_the_middle_is_reported_and_the_task_is_kept() -> None:
    comparison, turns = _train([9.0, StrettoError("the loss is nan", fix="Lower the rate.")])
    assert turns == ["plain", "stretto", "plain", "stretto", "plain", "plain"]
    assert "the loss is nan" in comparison.stretto.error
    assert not comparison.is_reached
    with pytest.raises(StrettoError, match="the data are not there"):
        _train([StrettoError("the data are not there", fix="Bring them.")])


def test_missing_data_and_tasks_named_twice_are_refused(tmp_path: Path) -> None:
    assert open_data("digits", tmp_path)[1]
    with pytest.raises(StrettoError, match="there is no folder"):
        open_data("digits", tmp_path / "nowhere")
    for tasks in ((), ("digits", "digits")):
        with pytest.raises(StrettoError, match="Name each once, of digits"):
            TrainingSettings(tasks=tasks)  # type: ignore[arg-type]


def test_a_whole_run_of_two_tasks(quick_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    text = {**SMALL["language-model"], "base_batch_size": 20, "batch_size": 20}
    monkeypatch.setattr(training, "TASK_SETTINGS", {"digits": SMALL["digits"], "language-model": text})
    report = measure("training", "--epochs", "1", "--seed", "1", "--tasks", "digits", "language-model")
    times, epochs, starts = report.tables
    assert column([times], "task") == ["digits", "language-model", "geometric mean"]
    ratios = column([times], "plain / stretto")
    assert ratios[2] == pytest.approx(math.sqrt(ratios[0] * ratios[1]))
    # The batch was chosen by measuring; that takes time, which counts.
    assert all(seconds > 0 for seconds in column([epochs], "probe s"))
    assert all(error <= 1e-4 for error in column([starts], "error"))
    assert len(report.figures) == 2


@pytest.mark.parametrize(
    ("side", "words"), [("auto", "digits: run muon"), ("recipe", "digits: muon at 0.16, 2 epochs")]
)
def test_another_recipe_trains_beside_the_plain_script(
    side: str, words: str, quick_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "TASK_SETTINGS", {"digits": SMALL["digits"]})
    report = measure("training", "--quick", "--tasks", "digits", "--side", side)
    _, epochs, _ = report.tables
    # As many as the recipe planned; the plain script waits for each of its turns.
    assert column([epochs], "stretto epochs") == column([epochs], "plain epochs") == [2]
    assert any(note.startswith(words) for note in report.notes)


def test_a_contender_that_is_closed_ends_its_thread(tmp_path: Path) -> None:
    task = _task("digits", _data("digits"), auto=True)
    for epochs in (0, 1):
        contender = AutoContender(task, run=tmp_path / str(epochs))
        for _ in range(epochs):
            assert contender.train_epoch().seconds > 0
        contender.close()
        assert not contender._thread.is_alive()
