"""Runs of the experiment with large batches side by side: the same results, stopped and ended as one."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.large_batch import UNDER_WAY, reproduce_large_batch
from experiments.large_batch_cells import FOLDER, Cell
from experiments.large_batch_courses import course_of
from experiments.large_batch_hands import Errand, Hands
from experiments.large_batch_settings import LargeBatchSettings
from stretto.errors import StrettoError

PATIENCE = 150.0
TWO_RUNS = ["--applications", "digits", "--multiples", "1", "--rules", "none", "--seeds", "2"]


def _settings(out: Path, **changes: Any) -> LargeBatchSettings:
    return LargeBatchSettings(**({"quick": True, "out": out, "applications": ("digits",), "seeds": 2} | changes))


def test_side_by_side_everything_is_as_one_by_one(tmp_path: Path) -> None:
    results = {}
    for jobs in (1, 2):
        told: list[str] = []
        settings = _settings(tmp_path / str(jobs), rules=("sqrt", "oracle"), jobs=jobs)
        results[jobs] = reproduce_large_batch(settings, tell=told.append)
        assert sum(", seed " in line for line in told) == len(results[jobs].cells)
        assert results[jobs].reused == 0
    for one, two in zip(*(result.rows for result in results.values()), strict=True):
        assert _timeless(one) == _timeless(two)
    by_key = [{cell.key: _timeless(cell) for cell in result.cells} for result in results.values()]
    assert by_key[0] == by_key[1]
    assert not list((tmp_path / "2" / UNDER_WAY).iterdir())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are looked for in /proc")
def test_what_is_asked_to_stop_stops_all_and_goes_on_later(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stretto", "reproduce", "large-batch", *TWO_RUNS, "--jobs", "2"]
    command += ["--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + PATIENCE
    while len(list((tmp_path / UNDER_WAY).glob("*/checkpoints/*"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.terminate()
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, said
    assert "the same command goes on from here" in said
    assert len(children) >= 2
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)
    assert not list((tmp_path / FOLDER).glob("*.json"))
    again = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(list((tmp_path / FOLDER).glob("*.json"))) == 2


def test_a_process_that_ends_is_told(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    course = course_of("digits", settings)
    cell = Cell(application=course.application, multiple=1, rule="baseline", seed=0)
    errand = Errand(cell=cell, key="some", folder=tmp_path / "some")
    with Hands(settings, count=1, threads=1) as hands:
        (process,) = hands._processes
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with pytest.raises(StrettoError, match=r"digits x1 baseline, seed 0 ended with exit code -9\. Run the same"):
            list(hands.run([errand]))


def test_what_cannot_be_run_is_told_as_by_one_process(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    course = course_of("digits", settings)
    application = dataclasses.replace(course.application, settings={**course.application.settings, "device": "nowhere"})
    cell = Cell(application=application, multiple=1, rule="baseline", seed=0)
    with Hands(settings, count=1, threads=1) as hands, pytest.raises(StrettoError) as caught:
        list(hands.run([Errand(cell=cell, key="some", folder=tmp_path / "some")]))
    assert caught.value.problem
    assert caught.value.fix


def _timeless(item: Any) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(item).items() if "seconds" not in name}
