"""The experiment with large batches in tiny: its runs, their files, and what it refuses."""

import csv
import dataclasses
import io
import json
import shutil
import signal
import xml.etree.ElementTree as ET
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from experiments import large_batch, large_batch_courses, large_batch_running
from experiments.large_batch import FACTORS, LargeBatchResult, reproduce_large_batch
from experiments.large_batch_applications import FULL, MINIATURE, QUICK, WARMUP_CAP, Application
from experiments.large_batch_cells import Cell, CellResult, CellRule
from experiments.large_batch_courses import course_of
from experiments.large_batch_data import open_data
from experiments.large_batch_page import write_large_batch_page
from experiments.large_batch_rows import Row, best_of
from experiments.large_batch_running import run_cell
from experiments.large_batch_settings import APPLICATION_NAMES, LargeBatchSettings
from experiments.large_batch_table import large_batch_table
from stretto.cli.main import main
from stretto.data import SequenceSet
from stretto.errors import StrettoError
from stretto.files import locked
from stretto.training import Interrupted

SEEDS = 2
WITH_RULES: tuple[CellRule, ...] = ("none", "linear", "sqrt", "legw", "lamb")


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


class _Counted:
    """Runs, and remembers what; stops as if asked to after some."""

    def __init__(self, *, most: int | None = None) -> None:
        self.cells: list[Cell] = []
        self._most = most

    def __call__(self, cell: Cell, data: SequenceSet, *, key: str, folder: Path) -> CellResult:
        if len(self.cells) == self._most:
            raise Interrupted(Path("gone"), step=3)
        self.cells.append(cell)
        return run_cell(cell, data, key=key, folder=folder)


def _timeless(row: Row | CellResult) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(row).items() if "seconds" not in name}


def test_every_rule_is_run_at_every_batch_and_the_baseline_once(made: LargeBatchResult) -> None:
    assert [(row.rule, row.multiple) for row in made.rows] == [
        ("baseline", 1),
        ("lamb", 1),
        *((rule, 4) for rule in (*WITH_RULES, "oracle")),
    ]
    assert {row.runs for row in made.rows} == {SEEDS}
    assert not any(row.diverged for row in made.rows)


def test_a_larger_batch_has_fewer_updates_and_as_many_epochs(made: LargeBatchResult) -> None:
    assert {row.epochs for row in made.rows} == {QUICK["digits"].epochs}
    by_multiple = {row.multiple: row.updates for row in made.rows}
    assert by_multiple[1] == 4 * by_multiple[4]


def test_rates_and_warm_up_follow_the_rules(made: LargeBatchResult) -> None:
    base = QUICK["digits"]
    rates = {row.rule: row.learning_rate for row in made.rows if row.multiple == 4}
    expected = {"none": 1, "linear": 4, "sqrt": 2, "legw": 2}
    for rule, times in expected.items():
        assert rates[rule] == pytest.approx(times * base.learning_rate)  # type: ignore[index]
    assert rates["lamb"] == pytest.approx(2 * base.lamb_rate)
    warm_ups = {row.rule: row.warmup_epochs for row in made.rows if row.multiple == 4}
    longest = WARMUP_CAP * base.epochs
    assert warm_ups["sqrt"] == pytest.approx(base.warmup_epochs)
    for rule in ("legw", "lamb"):
        assert warm_ups[rule] == pytest.approx(min(4 * base.warmup_epochs, longest))  # type: ignore[index]


def test_the_same_seed_begins_with_the_same_weights(made: LargeBatchResult) -> None:
    by_seed = [{cell.weights for cell in made.cells if cell.seed == seed} for seed in range(SEEDS)]
    assert [len(found) for found in by_seed] == [1] * SEEDS
    assert by_seed[0] != by_seed[1]


def test_all_runs_of_the_oracle_are_counted(made: LargeBatchResult) -> None:
    oracle = next(row for row in made.rows if row.rule == "oracle")
    tried = [cell for cell in made.cells if cell.multiple == 4 and cell.rule == "sqrt" and cell.seed == 0]
    assert sorted(cell.factor for cell in tried) == sorted(FACTORS)
    best = best_of(sorted(tried, key=lambda cell: cell.factor), "digits")
    assert max(cell.valid for cell in tried if cell.valid is not None) == best.valid
    assert oracle.cost_runs == len(FACTORS) + SEEDS - 1
    assert oracle.cost_updates == oracle.cost_runs * oracle.updates
    assert oracle.cost_seconds > sum(cell.seconds for cell in tried)
    assert oracle.learning_rate in [cell.learning_rate for cell in tried if cell.valid == best.valid]
    rule = next(row for row in made.rows if row.rule == "sqrt")
    assert (rule.cost_runs, rule.cost_updates) == (SEEDS, SEEDS * rule.updates)


def test_a_second_run_trains_nothing(made: LargeBatchResult, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, told = _Counted(), list[str]()
    monkeypatch.setattr(large_batch, "run_cell", runs)
    again = reproduce_large_batch(_settings(out), tell=told.append)
    assert runs.cells == []
    assert again.rows == made.rows
    assert sorted(again.cells, key=str) == sorted(made.cells, key=str)
    assert again.reused == len(made.cells) == len(list((out / "cells").iterdir()))
    assert told == [
        f"{len(made.cells)} runs are finished already and taken as they are",
        "there is nothing left to run",
    ]


def test_fresh_runs_all_again(made: LargeBatchResult, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _Counted()
    monkeypatch.setattr(large_batch, "run_cell", runs)
    again = reproduce_large_batch(_settings(copied, rules=("legw",), fresh=True))
    assert len(runs.cells) == len(again.cells) == 2 * SEEDS
    assert again.reused == 0
    wanted = [row for row in made.rows if row.rule in ("baseline", "legw")]
    # The same seed, the same result.
    assert list(map(_timeless, again.rows)) == list(map(_timeless, wanted))


@pytest.mark.parametrize("damage", ["torn", "empty", "another run", "no value"])
def test_a_damaged_file_is_told_and_run_again(
    made: LargeBatchResult, copied: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    path = next((copied / "cells").glob("digits-x4-legw-seed1-*.json"))
    text = path.read_text()
    other = next((copied / "cells").glob("digits-x4-legw-seed0-*.json")).read_text()
    without = json.dumps(json.loads(text) | {"test": None})
    path.write_text({"torn": text[:80], "empty": "", "another run": other, "no value": without}[damage])
    runs, told = _Counted(), list[str]()
    monkeypatch.setattr(large_batch, "run_cell", runs)
    again = reproduce_large_batch(_settings(copied), tell=told.append)
    assert [cell.title for cell in runs.cells] == ["digits x4 legw, seed 1"]
    assert [line for line in told if "is damaged" in line and path.name in line and "run again" in line]
    assert list(map(_timeless, again.rows)) == list(map(_timeless, made.rows))
    assert json.loads(path.read_text())["seed"] == 1


def test_runs_with_other_settings_are_not_taken(
    made: LargeBatchResult, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = _Counted()
    monkeypatch.setattr(large_batch, "run_cell", runs)
    other = dataclasses.replace(QUICK["digits"], lamb_rate=0.02)
    monkeypatch.setattr(large_batch_courses, "QUICK", MappingProxyType({"digits": other}))
    reproduce_large_batch(_settings(copied, rules=("none", "lamb")))
    assert {cell.rule for cell in runs.cells} == {"lamb"}
    assert len(runs.cells) == 2 * SEEDS


def test_what_is_finished_is_kept_when_it_is_stopped(
    made: LargeBatchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_batch, "run_cell", _Counted(most=3))
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        reproduce_large_batch(_settings(tmp_path, rules=("legw",)), tell=told.append)
    assert "the same command goes on" in told[-1]
    runs = _Counted()
    monkeypatch.setattr(large_batch, "run_cell", runs)
    again = reproduce_large_batch(_settings(tmp_path, rules=("legw",)))
    assert len(runs.cells) == 2 * SEEDS - 3
    wanted = [row for row in made.rows if row.rule in ("baseline", "legw")]
    assert list(map(_timeless, again.rows)) == list(map(_timeless, wanted))


def test_a_run_that_is_stopped_goes_on_where_it_was(
    made: LargeBatchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = course_of("digits", _settings(tmp_path))
    cell = Cell(application=course.application, multiple=1, rule="baseline", seed=0)
    key, folder = cell.key(course.data_digest), tmp_path / "under-way"
    emitted, emit = [], large_batch_running._Epochs.emit

    def asked_to_stop(self: Any, kind: str, **values: Any) -> None:
        emit(self, kind, **values)
        if kind == "epoch":
            emitted.append(values["epoch"])
            if values["epoch"] == 1:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(large_batch_running._Epochs, "emit", asked_to_stop)
    with pytest.raises(Interrupted):
        run_cell(cell, course.data, key=key, folder=folder)
    assert folder.is_dir()
    result = run_cell(cell, course.data, key=key, folder=folder)
    assert emitted == [1, 2]
    assert not folder.exists()
    assert _timeless(result) == _timeless(next(each for each in made.cells if each.key == key))


def test_a_run_that_diverges_is_a_row(quick_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wild = dataclasses.replace(
        QUICK["language-model"], learning_rate=1e38, settings={**QUICK["language-model"].settings, "clip_norm": 1e6}
    )
    monkeypatch.setattr(large_batch_courses, "QUICK", MappingProxyType({"language-model": wild}))
    told: list[str] = []
    chosen = _settings(tmp_path, applications=("language-model",), rules=("none",), seeds=1)
    result = reproduce_large_batch(chosen, tell=told.append)
    row = result.rows[-1]
    assert (row.rule, row.multiple, row.diverged, row.test, row.is_within) == ("none", 4, 1, None, None)
    cell = result.cells[-1]
    assert cell.diverged
    assert "is nan" in cell.why or "is inf" in cell.why
    assert cell.updates < cell.updates_per_epoch * wild.epochs
    assert any("diverged after" in line for line in told)
    stream = io.StringIO()
    Console(file=stream, width=110).print(large_batch_table(result))
    assert "diverged" in stream.getvalue()
    write_large_batch_page(result, tmp_path / "page.html")
    assert f"after {cell.updates:,} updates the loss or gradient is" in (tmp_path / "page.html").read_text()
    assert reproduce_large_batch(chosen).reused == 2


def test_other_faults_are_not_taken_for_divergence(
    made: LargeBatchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: object) -> None:
        raise StrettoError("the disk is full", fix="Make room.")

    monkeypatch.setattr("experiments.large_batch_running.Trainer.run", run)
    with pytest.raises(StrettoError, match="the disk is full"):
        reproduce_large_batch(_settings(tmp_path))
    assert not (tmp_path / "cells").exists()


def test_the_command_writes_its_files(made: LargeBatchResult, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--applications", "digits", "--seeds", str(SEEDS), "--out", str(copied)]
    assert main(["reproduce", "large-batch", *words]) == 0
    printed = capsys.readouterr().out
    assert f"{len(made.cells)} runs are finished already" in printed
    assert "legw, digits: " in printed
    assert "its numbers mean nothing" in printed
    stored = json.loads((copied / "large-batch.json").read_text())
    assert [row["rule"] for row in stored["rows"]] == [row.rule for row in made.rows]
    table = list(csv.DictReader((copied / "large-batch.csv").open()))
    assert len(table) == len(made.cells)
    assert {row["key"] for row in table} == {cell.key for cell in made.cells}
    ET.fromstring((copied / "large-batch.svg").read_text())
    page = (copied / "large-batch.html").read_text()
    assert "they are not compared with each other" in page
    assert "What a rate tuned anew costs" in page


@given(
    st.sampled_from(APPLICATION_NAMES),
    st.sampled_from([MINIATURE, FULL, QUICK]),
    st.sampled_from([*WITH_RULES, "baseline"]),
)
def test_all_settings_can_be_used(name: Any, table: Any, rule: Any) -> None:
    application: Application = table[name]
    for multiple in application.multiples:
        cell = Cell(application=application, multiple=multiple, rule=rule, seed=0)
        config = cell.config()
        assert config.batch_size == multiple * application.batch_size
        assert config.base_batch_size == application.batch_size
        assert config.epochs == application.epochs
        assert config.optimizer == ("lamb" if rule == "lamb" else application.optimizer)
    assert application.warmup_epochs < WARMUP_CAP * application.epochs
    json.dumps(application.told(), allow_nan=False)


def test_keys_tell_runs_apart() -> None:
    base = Cell(application=QUICK["digits"], multiple=4, rule="sqrt", seed=0)
    others = [
        dataclasses.replace(base, seed=1),
        dataclasses.replace(base, multiple=1),
        dataclasses.replace(base, rule="legw"),
        dataclasses.replace(base, factor=2.0),
        dataclasses.replace(base, application=dataclasses.replace(QUICK["digits"], epochs=3)),
        dataclasses.replace(base, application=QUICK["digit-images"]),
    ]
    keys = [cell.key("data") for cell in (base, *others)] + [base.key("other data")]
    assert len(set(keys)) == len(keys)
    assert base.key("data") == dataclasses.replace(base).key("data")


def test_batches_that_the_data_do_not_allow_are_left_out(tmp_path: Path) -> None:
    course = course_of("digits", _settings(tmp_path, multiples=(4, 8, 10_000)))
    assert course.multiples == (1, 4)
    assert [item.why for item in course.left_out] == [
        "a batch of 64 leaves 3 updates an epoch, fewer than 4",
        "a batch of 80,000 is more than there is to train on, 192",
    ]
    words = course_of("language-model", _settings(tmp_path, multiples=(1, 2, 64)))
    assert [item.multiple for item in words.left_out] == [64]


def test_data_are_taken_from_the_folder_where_they_are_there(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "mnist").mkdir()
    arrays = {"x_train": (90, 6, 5), "x_test": (30, 6, 5)}
    images = {name: rng.integers(0, 255, shape).astype(np.uint8) for name, shape in arrays.items()}
    labels = {"y_train": np.arange(90) % 10, "y_test": np.arange(30) % 10}
    np.savez(tmp_path / "mnist" / "mnist.npz", **images, **{name: y.astype(np.uint8) for name, y in labels.items()})
    application = dataclasses.replace(QUICK["digits"], num_train=20, num_held_out=5)
    data = open_data(application, tmp_path)
    assert [len(data.part(part)) for part in ("train", "valid", "test")] == [20, 5, 5]
    assert data.features_SF.shape == (30 * 6, 5)
    whole = open_data(dataclasses.replace(application, num_train=None), tmp_path)
    for index, number in enumerate(data.numbers_N.tolist()):
        np.testing.assert_array_equal(data[index].features_TF.numpy(), whole[number].features_TF.numpy())
        assert data[index].target == whole[number].target
    short = open_data(dataclasses.replace(application, num_steps=50), tmp_path)
    assert [len(short.part(part)) for part in ("train", "valid", "test")] == [50 // 6, 5, 5]
    embedded = open_data(QUICK["language-model"], tmp_path)
    assert embedded.vocabulary


def test_rare_words_become_one() -> None:
    application = dataclasses.replace(QUICK["language-model"], num_words=None)
    data = open_data(application, None)
    few = open_data(dataclasses.replace(application, num_words=30), None)
    assert len(few.vocabulary) == 30
    words, kept = ([given.vocabulary[n] for n in given.features_SF[:, 0].tolist()] for given in (data, few))
    train = data.part("train").num_steps
    counts = {word: words[:train].count(word) for word in set(words)}
    rarest = min(counts[word] for word in few.vocabulary if word != "<unk>")
    for word, found in zip(words, kept, strict=True):
        assert found in (word, "<unk>")
        if counts[word] > rarest:
            assert found == word


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--quick --full", "both --quick and --full were given"),
        ("--full --applications digits", "digits in full needs the data 'mnist', and no folder was given"),
        ("--full --applications language-model --data .", "language-model in full needs the data 'ptb'"),
        ("--data nowhere", "there is no folder 'nowhere'"),
        ("--multiples 0", "multiples"),
        ("--quick --rules", "there are no rules"),
    ],
)
def test_what_cannot_be_run_is_refused(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "large-batch", *words.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_two_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(StrettoError, match="another run is writing"):
        reproduce_large_batch(_settings(tmp_path))
