"""`stretto predict` and `stretto evaluate`: files and tables.

Shape legend: N sequences.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stretto

pytestmark = pytest.mark.usefixtures("quick_compiler")

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, the same without labels, a run and its metrics."""
    folder = tmp_path_factory.mktemp("trained")
    rng = np.random.default_rng(0)
    labels_N, lengths_N = np.arange(30) % 3, rng.integers(2, 12, 30)
    arrays: dict[str, Any] = {
        "x": (rng.normal(size=(lengths_N.sum(), 2)) + np.repeat(labels_N, lengths_N)[:, None]).astype(np.float32),
        "offsets": np.cumsum([0, *lengths_N]),
        "split": np.repeat([0, 1, 2], [20, 5, 5]),
    }
    np.savez(folder / "bare.npz", **arrays)
    np.savez(folder / "signs.npz", **arrays, y=labels_N, class_names=np.array(["[b]up[/b]", "\x1bdown", "still"]))
    settings: dict[str, Any] = {"epochs": 1, "hidden_size": 4, "threads": 1, "backend": "torch"}
    stretto.train("classify", data=folder / "signs.npz", out=folder / "run", **settings)
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def test_predictions_as_a_table_and_as_files(run: Run, here: Path) -> None:
    shown = run("predict", "run", "bare.npz")
    assert (shown.code, shown.err) == (0, "")
    assert "\x1b" not in shown.out
    assert len(shown.out.splitlines()) >= 30
    assert run("predict", "run", "signs.npz", "--out", str(here / "rows.jsonl")).code == 0
    rows = [json.loads(line) for line in (here / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["sequence"] for row in rows] == list(range(30))
    assert run("predict", "run", "bare.npz", "--out", str(here / "rows.csv")).code == 0
    with (here / "rows.csv").open(encoding="utf-8", newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [row["class"] for row in table] == [row["class"] for row in rows]
    assert float(table[4]["probabilities.still"]) == pytest.approx(rows[4]["probabilities"]["still"])
    assert rows == [{"sequence": n, **row} for n, row in enumerate(stretto.load("run").predict("signs.npz"))]


def test_an_evaluation_is_that_of_training(run: Run, here: Path) -> None:
    ended = run("evaluate", "run", "signs.npz", "--json", str(here / "metrics.json"))
    assert (ended.code, ended.err) == (0, "")
    result = json.loads(Path("run/result.json").read_text(encoding="utf-8"))
    found = json.loads((here / "metrics.json").read_text(encoding="utf-8"))
    assert (found["metrics"], found["sequences"], found["weights"]) == (result["metrics"], 5, "last")
    assert f"{result['metrics']['accuracy']:.2%}" in ended.out
    assert "30 sequences" in run("evaluate", "run", "signs.npz", "--split", "all").out
