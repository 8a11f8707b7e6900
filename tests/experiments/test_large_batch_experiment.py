"""The large-batch experiment in tiny: its runs and their files, what is made of them, and what it refuses."""

import csv
import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.harness import Report
from experiments import large_batch, large_batch_pool
from experiments.__main__ import main
from experiments.large_batch import (
    FACTORS,
    RULES,
    LargeBatchResult,
    LargeBatchSettings,
    Row,
    best_of,
    find_holdings,
    make_row,
    open_application,
    reproduce_large_batch,
    show,
)
from experiments.large_batch_apps import METRICS, WARMUP_CAP, Application, ApplicationName, applications, open_data
from experiments.large_batch_pool import IN_PROGRESS, RESULTS, WorkerPool
from experiments.large_batch_runs import LearningCurve, Run, RunResult, RunRule, execute
from stretto.errors import StrettoError
from stretto.files import locked
from stretto.training import Trainer

SEEDS = 2
DIGITS = applications("quick")["digits"]
RUN_RULES: tuple[RunRule, ...] = ("none", "linear", "sqrt", "legw", "lamb")


def _settings(out: Path, **changes: Any) -> LargeBatchSettings:
    return LargeBatchSettings(**({"quick": True, "out": out, "applications": ("digits",), "seeds": SEEDS} | changes))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("large-batch")


@pytest.fixture(scope="module")
def made(quick_compiler: None, out: Path) -> LargeBatchResult:
    return reproduce_large_batch(_settings(out))


@pytest.fixture
def copied(made: LargeBatchResult, out: Path, tmp_path: Path) -> Path:
    """The finished runs in a folder that may be changed."""
    return Path(shutil.copytree(out, tmp_path / "copy"))


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that are trained, in order."""
    runs: list[Run] = []

    def record(run: Run, *args: Any, **kwargs: Any) -> RunResult:
        runs.append(run)
        return execute(run, *args, **kwargs)

    monkeypatch.setattr(large_batch_pool, "execute", record)
    return runs


def _timeless(record: Row | RunResult) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(record).items() if "seconds" not in name}


def _same(rows: Sequence[Row], others: Sequence[Row]) -> bool:
    return list(map(_timeless, rows)) == list(map(_timeless, others))


def test_every_rule_is_run_at_every_batch_and_the_baseline_once(made: LargeBatchResult) -> None:
    large = [(rule, 4) for rule in (*RUN_RULES, "oracle")]
    assert [(row.rule, row.multiple) for row in made.rows] == [("baseline", 1), ("lamb", 1), *large]
    assert {(row.runs, row.diverged, row.epochs) for row in made.rows} == {(SEEDS, 0, DIGITS.epochs)}
    updates = {row.multiple: row.updates for row in made.rows}
    assert updates[1] == 4 * updates[4]
    rates = {row.rule: row.learning_rate for row in made.rows if row.multiple == 4}
    expected = {"none": 1, "linear": 4, "sqrt": 2, "legw": 2, "lamb": 2 * DIGITS.lamb_rate / DIGITS.learning_rate}
    for rule, factor in expected.items():
        assert rates[rule] == pytest.approx(factor * DIGITS.learning_rate)  # type: ignore[index]
    weights = [{run.weights for run in made.runs if run.seed == seed} for seed in range(SEEDS)]
    assert [len(found) for found in weights] == [1] * SEEDS
    assert weights[0] != weights[1]


def test_all_runs_of_the_oracle_are_counted(made: LargeBatchResult) -> None:
    oracle = next(row for row in made.rows if row.rule == "oracle")
    tried = [run for run in made.runs if run.multiple == 4 and run.rule == "sqrt" and run.seed == 0]
    assert sorted(run.factor for run in tried) == sorted(FACTORS)
    best = best_of(sorted(tried, key=lambda run: run.factor))
    assert best.valid == max(run.valid for run in tried if run.valid is not None)
    assert oracle.learning_rate in [run.learning_rate for run in tried if run.valid == best.valid]
    assert oracle.cost_runs == len(FACTORS) + SEEDS - 1
    assert oracle.cost_updates == oracle.cost_runs * oracle.updates
    rule = next(row for row in made.rows if row.rule == "sqrt")
    assert (rule.cost_runs, rule.cost_updates) == (SEEDS, SEEDS * rule.updates)


def test_the_command_reuses_finished_runs_and_writes_its_files(
    made: LargeBatchResult, copied: Path, executed: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--applications", "digits", "--seeds", str(SEEDS), "--out", str(copied)]
    assert main(["large-batch", *words]) == 0
    assert executed == []
    assert f"{len(made.runs)} of {len(made.runs)} runs were finished before and reused" in capsys.readouterr().out
    stored = json.loads((copied / "large-batch.json").read_text())["result"]
    assert stored["reused"] == len(made.runs) == len(list((copied / RESULTS).iterdir()))
    assert [row["rule"] for row in stored["rows"]] == [row.rule for row in made.rows]
    table = list(csv.DictReader((copied / "large-batch.csv").open()))
    assert {row["key"] for row in table} == {run.key for run in made.runs}
    assert (copied / "large-batch.svg").exists()
    assert "What tuning the rate costs" in (copied / "large-batch.html").read_text()


def test_fresh_repeats_all_runs_with_the_same_results(
    made: LargeBatchResult, copied: Path, executed: list[Run]
) -> None:
    again = reproduce_large_batch(_settings(copied, rules=("legw",), fresh=True))
    assert len(executed) == len(again.runs) == 2 * SEEDS
    assert again.reused == 0
    assert _same(again.rows, [row for row in made.rows if row.rule in ("baseline", "legw")])


@pytest.mark.parametrize("damage", ["torn", "empty", "another run", "no value"])
def test_a_damaged_result_is_reported_and_its_run_repeated(
    made: LargeBatchResult, copied: Path, executed: list[Run], damage: str
) -> None:
    path = next((copied / RESULTS).glob("digits-x4-legw-seed1-*.json"))
    text = path.read_text()
    other = next((copied / RESULTS).glob("digits-x4-legw-seed0-*.json")).read_text()
    without = json.dumps(json.loads(text) | {"test": None})
    path.write_text({"torn": text[:80], "empty": "", "another run": other, "no value": without}[damage])
    lines: list[str] = []
    again = reproduce_large_batch(_settings(copied), progress=lines.append)
    assert [str(run) for run in executed] == ["digits x4 legw, seed 1"]
    assert [line for line in lines if "is damaged" in line and path.name in line]
    assert _same(again.rows, made.rows)
    assert json.loads(path.read_text())["seed"] == 1


def test_runs_with_other_settings_are_not_reused(
    made: LargeBatchResult, copied: Path, executed: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dataclasses.replace(DIGITS, lamb_rate=0.02)
    monkeypatch.setattr(large_batch, "applications", lambda _: {"digits": other})
    reproduce_large_batch(_settings(copied, rules=("none", "lamb")))
    assert [run.rule for run in executed] == ["lamb"] * 2 * SEEDS


def test_a_stopped_experiment_keeps_finished_runs_and_a_stopped_run_continues_exactly(
    made: LargeBatchResult, tmp_path: Path, executed: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    emitted, emit = list[int](), LearningCurve.emit

    def stop_after_the_first_epoch_of_the_third_run(self: LearningCurve, kind: str, **values: Any) -> None:
        emit(self, kind, **values)
        if kind == "epoch":
            emitted.append(values["epoch"])
            if len(emitted) == 2 * DIGITS.epochs + 1:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(LearningCurve, "emit", stop_after_the_first_epoch_of_the_third_run)
    lines: list[str] = []
    settings = _settings(tmp_path, rules=("legw",))
    with pytest.raises(KeyboardInterrupt):
        reproduce_large_batch(settings, progress=lines.append)
    assert "the same command continues" in lines[-1]
    assert len(list((tmp_path / IN_PROGRESS).iterdir())) == 1
    again = reproduce_large_batch(settings)
    assert [str(run) for run in executed] == [
        *("digits x1 baseline, seed 0", "digits x1 baseline, seed 1"),
        *("digits x4 legw, seed 0", "digits x4 legw, seed 0", "digits x4 legw, seed 1"),
    ]
    assert emitted == [1, 2] * 4
    assert again.reused == 2
    assert _same(again.rows, [row for row in made.rows if row.rule in ("baseline", "legw")])
    stopped = next(run for run in again.runs if (run.multiple, run.seed) == (4, 0))
    assert _timeless(stopped) == _timeless(next(run for run in made.runs if run.key == stopped.key))
    assert not list((tmp_path / IN_PROGRESS).iterdir())


def test_a_run_that_diverges_is_a_row(quick_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = applications("quick")["language-model"]
    wild = dataclasses.replace(words, learning_rate=1e38, settings={**words.settings, "clip_norm": 1e6})
    monkeypatch.setattr(large_batch, "applications", lambda _: {"language-model": wild})
    lines: list[str] = []
    chosen = _settings(tmp_path, applications=("language-model",), rules=("none",), seeds=1)
    result = reproduce_large_batch(chosen, progress=lines.append)
    row, run = result.rows[-1], result.runs[-1]
    assert (row.rule, row.multiple, row.diverged, row.test, row.is_within) == ("none", 4, 1, None, None)
    assert run.diverged
    assert "is nan" in run.why or "is inf" in run.why
    assert run.updates < run.updates_per_epoch * wild.epochs
    assert any("diverged after" in line for line in lines)
    report = Report("large-batch", title="")
    show(result, report)
    assert report.tables[0].rows[0][-1] == "diverged"
    assert reproduce_large_batch(chosen).reused == 2


def test_other_errors_are_not_taken_for_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise StrettoError("the disk is full", fix="Make room.")

    monkeypatch.setattr(Trainer, "run", fail)
    with pytest.raises(StrettoError, match="the disk is full"):
        reproduce_large_batch(_settings(tmp_path))
    assert not (tmp_path / RESULTS).exists()


def test_several_processes_give_the_same_results(made: LargeBatchResult, tmp_path: Path) -> None:
    lines: list[str] = []
    settings = _settings(tmp_path, rules=("sqrt", "oracle"), jobs=2)
    result = reproduce_large_batch(settings, progress=lines.append)
    assert sum(", seed " in line for line in lines) == len(result.runs)
    assert result.reused == 0
    assert _same(result.rows, [row for row in made.rows if row.rule in ("baseline", "sqrt", "oracle")])
    assert not list((tmp_path / IN_PROGRESS).iterdir())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are looked for in /proc")
def test_ctrl_c_stops_all_processes_and_the_same_command_continues(tmp_path: Path) -> None:
    words = "large-batch --applications digits --multiples 1 --rules none --seeds 2 --jobs 2 --out".split()
    command = [sys.executable, "-m", "experiments", *words, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while len(list((tmp_path / IN_PROGRESS).glob("*/checkpoints/*"))) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGINT)
    # It ends when nobody is left who holds the other end of the pipe, and the processes do.
    printed, _ = process.communicate()
    assert process.returncode == 130, printed
    assert "the same command continues" in printed
    assert len(children) >= 2
    assert not list((tmp_path / RESULTS).glob("*.json"))
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(list((tmp_path / RESULTS).glob("*.json"))) == 2


def test_a_process_that_is_killed_and_a_run_that_cannot_be_made_are_reported(tmp_path: Path) -> None:
    run = Run(data_digest="", application=DIGITS, multiple=1, rule="baseline", seed=0)
    with WorkerPool(None, num_processes=1, threads=1) as pool:
        (process,) = pool._processes
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with pytest.raises(StrettoError, match=r"digits x1 baseline, seed 0 ended with exit code -9\. Run the same"):
            list(pool.map([(run, tmp_path / "some")]))
    empty = dataclasses.replace(DIGITS, settings={**DIGITS.settings, "hidden_size": 0})
    run = dataclasses.replace(run, application=empty)
    with WorkerPool(None, num_processes=1, threads=1) as pool, pytest.raises(StrettoError, match="hidden_size"):
        list(pool.map([(run, tmp_path / "some")]))


@given(
    st.sampled_from(get_args(ApplicationName)),
    st.sampled_from(["quick", "miniature", "full"]),
    st.sampled_from([*RUN_RULES, "baseline"]),
)
def test_all_settings_are_valid(name: Any, scale: Any, rule: Any) -> None:
    application: Application = applications(scale)[name]
    for multiple in application.multiples:
        config = Run(data_digest="", application=application, multiple=multiple, rule=rule, seed=0).config()
        assert config.batch_size == multiple * application.batch_size
        assert config.base_batch_size == application.batch_size
        assert config.epochs == application.epochs
        assert config.optimizer == ("lamb" if rule == "lamb" else application.optimizer)
    assert application.warmup_epochs < WARMUP_CAP * application.epochs
    assert set(METRICS) == set(applications(scale))
    assert set(RULES) == {*RUN_RULES, "oracle"}


def test_keys_identify_runs() -> None:
    base = Run(data_digest="", application=DIGITS, multiple=4, rule="sqrt", seed=0)
    changes: list[dict[str, Any]] = [{}, {"seed": 1}, {"multiple": 1}, {"rule": "legw"}, {"factor": 2.0}]
    changes += [{"application": dataclasses.replace(DIGITS, epochs=3)}]
    changes += [{"application": applications("quick")["digit-images"]}]
    changes += [{"data_digest": "other data"}]
    keys = [dataclasses.replace(base, **change).key for change in changes]
    assert len(set(keys)) == len(keys)
    assert base.key == dataclasses.replace(base).key


def test_batches_that_the_data_do_not_allow_are_left_out(tmp_path: Path) -> None:
    digits = open_application("digits", _settings(tmp_path, multiples=(4, 8, 10_000)))
    assert digits.multiples == (1, 4)
    assert digits.left_out == {
        8: "a batch of 64 leaves 3 updates per epoch, fewer than 4",
        10_000: "a batch of 80,000 is more than there is to train on, 192",
    }
    assert list(open_application("language-model", _settings(tmp_path, multiples=(1, 2, 64))).left_out) == [64]


def test_data_are_taken_from_the_folder_if_they_are_there(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "mnist").mkdir()
    images = {f"x_{part}": rng.integers(0, 255, (count, 6, 5)) for part, count in (("train", 90), ("test", 30))}
    labels = {"y_train": np.arange(90) % 10, "y_test": np.arange(30) % 10}
    arrays = {name: values.astype(np.uint8) for name, values in (images | labels).items()}
    np.savez(tmp_path / "mnist" / "mnist.npz", **arrays)  # type: ignore[arg-type]
    application = dataclasses.replace(DIGITS, num_train=20, num_held_out=5)
    data = open_data(application, tmp_path)
    assert [len(data.part(part)) for part in ("train", "valid", "test")] == [20, 5, 5]
    assert data.features_SF.shape == (30 * 6, 5)
    whole = open_data(dataclasses.replace(application, num_train=None), tmp_path)
    for index, number in enumerate(data.numbers_N.tolist()):
        np.testing.assert_array_equal(data[index].features_TF.numpy(), whole[number].features_TF.numpy())
        assert data[index].target == whole[number].target
    short = open_data(dataclasses.replace(application, num_steps=50), tmp_path)
    assert [len(short.part(part)) for part in ("train", "valid", "test")] == [50 // 6, 5, 5]
    assert open_data(applications("quick")["language-model"], tmp_path).vocabulary


def test_rare_words_become_one() -> None:
    application = dataclasses.replace(applications("quick")["language-model"], num_words=None)
    data, few = (open_data(dataclasses.replace(application, num_words=count), None) for count in (None, 30))
    assert len(few.vocabulary) == 30
    words, kept = ([given.vocabulary[n] for n in given.features_SF[:, 0].tolist()] for given in (data, few))
    train = data.part("train").num_steps
    counts = {word: words[:train].count(word) for word in set(words)}
    rarest = min(counts[word] for word in few.vocabulary if word != "<unk>")
    for word, found in zip(words, kept, strict=True):
        assert found in (word, "<unk>")
        assert found == word or counts[word] <= rarest


def test_two_experiments_do_not_share_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(StrettoError, match="another run is writing"):
        reproduce_large_batch(_settings(tmp_path))


# What is made of results.


def _result(
    multiple: int, rule: RunRule, test: float | None, *, application: str = "digits", **changes: Any
) -> RunResult:
    values: dict[str, Any] = {
        "key": f"{multiple}{rule}",
        "application": application,
        "multiple": multiple,
        "rule": rule,
        "factor": 1.0,
        "seed": 0,
        "batch_size": 8 * multiple,
        "learning_rate": 0.1,
        "warmup_epochs": 0.1,
        "updates_per_epoch": 64 // multiple,
        "epochs": 2,
        "updates": 128 // multiple,
        "seconds": 1.0,
        "wall_seconds": 2.0,
        "diverged": test is None,
        "why": "" if test is not None else "the loss is nan",
        "valid": test,
        "test": test,
        "curve": (),
        "weights": "",
    }
    return RunResult(**(values | changes))


def _rows(values: dict[int, Sequence[float | None]], *, application: str = "digits") -> list[Row]:
    """The baseline, and legw at some batches; each with a value per seed."""
    baseline = make_row(
        "baseline", [_result(1, "baseline", value, application=application) for value in values[1]], baseline=None
    )
    others = [
        make_row("legw", [_result(k, "legw", value, application=application) for value in values[k]], baseline=baseline)
        for k in values
        if k > 1
    ]
    return [baseline, *others]


@given(base=st.floats(0.2, 0.9), points=st.floats(-20.0, 10.0), share=st.floats(-0.5, 2.0))
def test_a_point_of_accuracy_or_three_per_cent_of_a_perplexity_are_allowed(
    base: float, points: float, share: float
) -> None:
    if abs(points + 1.0) > 1e-6:
        assert _rows({1: [base], 4: [base + points / 100]})[1].is_within == (points > -1.0)
    assert _rows({1: [base], 4: [base - 0.01]})[1].is_within
    if abs(share - 0.03) > 1e-6:
        rows = _rows({1: [100 * base], 4: [100 * base * (1 + share)]}, application="language-model")
        assert rows[1].is_within == (share < 0.03)


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=5))
def test_means_and_deviations_are_those_of_a_sample(values: list[float]) -> None:
    row = _rows({1: values}, application="language-model")[0]
    assert row.test == pytest.approx(np.mean(values))
    assert row.test_deviation == pytest.approx(np.std(values, ddof=1) if len(values) > 1 else 0.0, abs=1e-6)
    huge = _rows({1: [1e304, 2e304, 10.0]}, application="language-model")[0]
    assert 1e303 < huge.test_deviation < math.inf


def test_where_a_rule_stops_holding_is_computed() -> None:
    def find(values: dict[int, Sequence[float | None]]) -> tuple[int, int | None, str]:
        (found,) = find_holdings(_rows(values))
        return found.holds_to, found.fails_at, found.says

    assert find({1: [0.95], 4: [0.95], 16: [0.96]}) == (16, None, "holds up to x16, the largest batch that was run")
    assert find({1: [0.95], 4: [0.945], 16: [0.9], 64: [0.95]}) == (
        4,
        16,
        "holds up to x4; at x16: accuracy % 90.0 against 95.0, 5.0 points worse, with 8 updates; within again at x64",
    )
    assert find({1: [0.95, 0.95], 4: [None, 0.95]})[2] == "does not hold at any batch; at x4: 1 of 2 runs diverged"
    assert "the baseline diverged" in find({1: [None], 4: [0.9]})[2]


def test_the_best_of_a_grid_is_found_among_runs_that_did_not_diverge() -> None:
    for application, best in (("digits", FACTORS[2]), ("handwriting", FACTORS[1])):
        values = zip((None, 0.5, 0.7, None), FACTORS, strict=True)
        grid = [_result(4, "sqrt", value, factor=factor, application=application) for value, factor in values]
        assert best_of(grid).factor == best
        assert best_of([grid[0], grid[3]]).factor == FACTORS[0]


def test_the_table_marks_what_is_as_good_and_the_figure_crosses_what_diverged(made: LargeBatchResult) -> None:
    rows = _rows({1: [0.96, 0.94], 4: [0.96, 0.93], 16: [0.9, 0.7], 64: [None, 0.9]})
    facts = made.applications["digits"] | {"multiples": (1, 4, 16, 64), "left_out": {256: "too few"}}
    runs = (_result(64, "legw", None),)
    result = dataclasses.replace(made, rows=tuple(rows), runs=runs, applications={"digits": facts})
    report = Report("large-batch", title="")
    show(result, report)
    (row,) = report.tables[0].rows
    assert row[2:] == ("legw", "* 95.0 ± 1.4", "* 94.5 ± 2.1", "80.0 ± 14.1", "1 of 2 diverged", None)
    assert report.figures[0][1].count("<path") == 2  # one in the legend, one at the batch that diverged
