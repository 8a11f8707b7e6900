"""`stretto sweep`: every combination once, continued where it was left, compared on a page."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from small_data import write_signs

Run = Callable[..., Any]
SWEEP = """
task = "classify"
out = "first"
seeds = [0, 1]
[settings]
data = "signs.npz"
epochs = 2
hidden-size = 4
backend = "torch"
[grid]
learning-rate = [0.01, 0.003]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write_signs(Path("signs.npz"), count=24)
    Path("sweep.toml").write_text(SWEEP, encoding="utf-8")


def test_runs_are_listed_and_nothing_is_trained(run: Run) -> None:
    ended = run("sweep", "sweep.toml", "--dry-run")
    assert (ended.code, ended.err) == (0, "")
    assert [line.split("  ")[-1] for line in ended.out.splitlines()] == [
        "learning_rate 0.01, seed 0",
        "learning_rate 0.01, seed 1",
        "learning_rate 0.003, seed 0",
        "learning_rate 0.003, seed 1",
    ]
    assert not list(Path("first").glob("*/events.jsonl"))


@pytest.mark.slow
def test_one_run_of_an_array_and_then_the_rest(run: Run) -> None:
    Path("sweep.toml").write_text(SWEEP.replace("[0.01, 0.003]", "[0.01]"), encoding="utf-8")
    ended = run("sweep", "sweep.toml", "--index", "1")
    assert (ended.code, ended.err) == (0, "")
    assert [path.parent.name for path in Path("first").glob("*/result.json")] == ["1"]
    assert "<td>waiting</td>" in Path("first/index.html").read_text(encoding="utf-8")
    before = Path("first/1/result.json").stat().st_mtime_ns
    # One that was ended before it recorded anything starts from the beginning.
    Path("first/0").mkdir()
    ended = run("sweep", "sweep.toml", "--jobs", "2")
    assert (ended.code, ended.err) == (0, "")
    assert "2 runs, 1 finished before" in ended.out
    assert Path("first/1/result.json").stat().st_mtime_ns == before
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path("first").glob("*/result.json"))]
    chosen = [(result["settings"]["learning_rate"], result["settings"]["seed"]) for result in results]
    assert chosen == [(0.01, 0), (0.01, 1)]
    assert {result["settings"]["threads"] for result in results} == {1}
    page = Path("first/index.html").read_text(encoding="utf-8")
    assert "2 runs, 2 finished" in page
    assert "standard deviation" in page
    assert "<td>waiting</td>" not in page


def test_what_is_added_to_a_sweep_leaves_the_numbers_of_its_runs(run: Run) -> None:
    def numbers() -> dict[str, str]:
        lines = run("sweep", "sweep.toml", "--dry-run").out.splitlines()
        return {name: number for number, name in (line.split(maxsplit=1) for line in lines)}

    before = numbers()
    files = {path.name: path.read_text(encoding="utf-8") for path in Path("first").glob("*.toml")}
    assert sorted(files) == ["0.toml", "1.toml", "2.toml", "3.toml"]
    # Others come first, and in another order; there are more than ten.
    rates = "[" + ", ".join(f"0.{digit}" for digit in range(1, 6)) + ", 0.003, 0.01]"
    text = SWEEP.replace("[0.01, 0.003]", rates).replace("seeds = [0, 1]", "seeds = [1, 2, 0]")
    Path("sweep.toml").write_text(text.replace("epochs = 2\nhidden-size = 4", "hidden-size = 4\nepochs = 2"))
    after = numbers()
    assert len(after) == len(set(after.values())) == 21
    assert {name: after[name] for name in before} == before
    assert all(Path("first", name).read_text(encoding="utf-8") == text for name, text in files.items())
    # Other settings are other runs.
    Path("sweep.toml").write_text(SWEEP.replace("epochs = 2", "epochs = 3"), encoding="utf-8")
    assert not set(numbers().values()) & set(after.values())


def test_failed_runs_are_named(run: Run) -> None:
    arrays = np.load("signs.npz")
    np.savez("bare.npz", x=arrays["x"], offsets=arrays["offsets"])
    Path("sweep.toml").write_text(
        'task = "classify"\n[settings]\nepochs = 1\n[grid]\ndata = ["bare.npz"]\n', encoding="utf-8"
    )
    ended = run("sweep", "sweep.toml")
    assert ended.code == 2
    assert "1 of 1 runs failed (run 0: error: " in ended.err
    assert "bare has no labels" in ended.err
    assert "bare has no labels" in Path("runs/sweep-sweep/0.log").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_signal_stops_all_runs_and_the_same_command_continues(run: Run) -> None:
    text = SWEEP.replace("epochs = 2", "epochs = 60").replace("learning-rate = [0.01, 0.003]", "")
    Path("sweep.toml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "stretto", "sweep", "sweep.toml", "--jobs", "1"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    record = Path("first/0/events.jsonl")
    while not (record.exists() and '"event": "epoch"' in record.read_text(encoding="utf-8")):
        assert child.poll() is None
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGTERM)
    out, err = child.communicate()
    assert (child.returncode, err) == (130, "")
    assert "The same command continues" in out
    assert run("sweep", "sweep.toml").code == 0
    assert len(list(Path("first").glob("*/result.json"))) == 2


def test_indices_beyond_the_runs_and_missing_files(run: Run) -> None:
    assert "beyond the last of 4 runs" in run("sweep", "sweep.toml", "--index", "4").err
    assert run("sweep", "nothing.toml").code == 2
