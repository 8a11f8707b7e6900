"""A task of the user's own as a word of the command line: by its place, or by the entry point of a package."""

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stretto
from small_data import write_signs
from stretto.errors import StrettoError
from stretto.tasks import Classify, find_task

Run = Callable[..., Any]
TASK = """
import dataclasses
from stretto.tasks import Classify
from stretto.tasks.classify import ClassifyConfig

@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(ClassifyConfig):
    temperature: float = 1.0

class Sharper(Classify):
    \"\"\"Which sign it is, sharper.\"\"\"
    name = "sharper"
    Config = Settings

    def loss(self, output, batch):
        return super().loss(output / self.config.temperature, batch)
"""
SMALL = ("--data", "signs.npz", "--epochs", "1", "--hidden-size", "4", "--backend", "torch")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write_signs(Path("signs.npz"), count=36)
    Path("own_task.py").write_text(TASK, encoding="utf-8")


def test_it_trains_with_its_own_flags_and_is_loaded_again(run: Run) -> None:
    ended = run("train", "own_task.py:Sharper", *SMALL, "--temperature", "0.5")
    assert (ended.code, ended.err) == (0, "")
    folder = Path("runs/sharper-001")
    assert json.loads((folder / "result.json").read_text(encoding="utf-8"))["settings"]["temperature"] == 0.5
    assert run("evaluate", str(folder), "signs.npz", "--task", "own_task.py:Sharper").code == 0
    ended = run("evaluate", str(folder), "signs.npz")
    assert ended.code == 2
    assert "not one of Stretto's" in ended.err
    ended = run("train", "own_task.py:Sharper", *SMALL, "--temperature", "hot")
    assert ended.code == 2
    assert "Traceback" not in ended.err


def test_the_class_is_given_to_train_in_python() -> None:
    class Renamed(Classify):
        name = "renamed"

    settings: dict[str, Any] = {"epochs": 1, "hidden_size": 4, "backend": "torch"}
    result = stretto.train(Renamed, data="signs.npz", out="own", **settings)
    assert stretto.train("classify", data="signs.npz", out="plain", **settings).metrics == result.metrics
    with pytest.raises(StrettoError, match="is not a run of the task 'classify'"):
        stretto.train("classify", data="signs.npz", out="own", resume=True, **settings)


def test_a_sweep_runs_it_too(run: Run) -> None:
    Path("sweep.toml").write_text('task = "own_task.py:Sharper"\n[grid]\ntemperature = [1.0, 2.0]\n', encoding="utf-8")
    ended = run("sweep", "sweep.toml", "--dry-run")
    assert (ended.code, ended.err) == (0, "")
    assert "temperature 2.0" in ended.out


def test_tasks_of_installed_packages_are_words(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {
        "sharper": "own_task:Sharper",
        "blunt": "own_task:Sharper",
        "gone": "own_task_of_old:Task",
        "classify": "own_task:Sharper",
    }
    found = [importlib.metadata.EntryPoint(name, value, "stretto.tasks") for name, value in places.items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found if group == "stretto.tasks" else [])
    monkeypatch.syspath_prepend(Path.cwd())
    assert "of an installed package: own_task:Sharper" in run("train", "--help").out
    assert run("train", "sharper", *SMALL, "--temperature", "2").code == 0
    assert run("evaluate", "runs/sharper-001", "signs.npz").code == 0
    # Stretto's own names stay its own.
    assert find_task("classify") is Classify
    assert "is not a task named 'blunt'" in run("train", "blunt", *SMALL).err
    assert "could not be loaded from own_task_of_old:Task: ModuleNotFoundError" in run("train", "gone", *SMALL).err
