"""The command line: help, messages with exit code 2 and no traceback, plain output, signals, and small real runs.

Shape legend: S steps of all sequences, N sequences.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from small_data import write_signs
from stretto.cli.main import VERBS
from stretto.data import open_sequences, write_npz
from stretto.tasks import TASKS
from stretto.training import EVENTS_FILE, read_events

SMALL = "--epochs 2 --batch-size 6 --hidden-size 4 --num-buckets 2".split()
HELP = [*([verb] for verb in VERBS), *(["train", task] for task in TASKS)]


Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    earlier = torch.get_num_threads()
    torch.set_num_threads(1)
    # A verb may set variables for its own process; here that is the process of all tests.
    with mock.patch.dict(os.environ):
        yield
    torch.set_num_threads(earlier)


@pytest.fixture
def signs() -> Path:
    return write_signs(Path("signs.npz"), count=36)


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "stretto", *words]


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_every_verb_has_help(run: Run, words: list[str]) -> None:
    ended = run(*words, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert f"usage: stretto {words[0]}" in ended.out


def test_the_command_alone_shows_the_verbs(run: Run) -> None:
    assert run("--help").code == 0
    assert all(verb in run("--help").out for verb in VERBS)
    assert run().code == 2


def test_the_version(run: Run) -> None:
    assert run("--version") == (0, f"stretto {version('stretto')}\n", "")
    done = subprocess.run(_command("--version"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"stretto {version('stretto')}\n")


def test_a_run_prints_plain_lines_and_leaves_its_result(run: Run, signs: Path) -> None:
    ended = run("train", "classify", "--data", str(signs), "--out", "out", *SMALL)
    assert (ended.code, ended.err) == (0, "")
    assert "\x1b" not in ended.out
    lines = ended.out.splitlines()
    assert lines[0].startswith("classify: signs, 24 train, 6 valid, 6 test sequences")
    assert [line.split()[1] for line in lines if line.startswith("epoch ")] == ["1", "2"]
    assert lines[-2:] == [f"run     {Path('out')}", f"report  {Path('out/report.html')}"]
    result = json.loads(Path("out/result.json").read_text(encoding="utf-8"))
    assert {"metrics", "epochs", "seconds", "padding", "settings"} <= result.keys()
    assert f"{result['metrics']['accuracy']:.2%}" in ended.out
    assert run("report", "out", "--out", "page.html").code == 0
    assert "signs" in Path("page.html").read_text(encoding="utf-8")
    assert "Traceback" not in run("train", "classify", "--data", str(signs), "--out", "out").err


def test_flags_win_over_the_file_and_the_file_over_defaults(run: Run, signs: Path) -> None:
    Path("run.toml").write_text(
        f'data = "{signs}"\nepochs = 3\nbatch-size = 6\nhidden-size = 5\nseed = 4\n', encoding="utf-8"
    )
    assert run("train", "classify", "--config", "run.toml", "--epochs", "1", "--out", "out").code == 0
    settings = json.loads(Path("out/result.json").read_text(encoding="utf-8"))["settings"]
    chosen = {name: settings[name] for name in ("epochs", "batch_size", "hidden_size", "seed", "num_layers")}
    assert chosen == {"epochs": 1, "batch_size": 6, "hidden_size": 5, "seed": 4, "num_layers": 1}
    assert run("train", "classify", "--config=run.toml", "--epochs=2", "--out=more").code == 0
    assert len([event for event in read_events(Path("more")) if event["event"] == "epoch"]) == 2


@pytest.mark.slow
def test_pen_digits_are_learnt_quickly(run: Run, shared_data: Path) -> None:
    data = open_sequences(shared_data / "pendigits_orig")
    mixed = np.random.default_rng(0).permutation(len(data))
    chosen = [mixed[data.split_N[mixed] == part][:count] for part, count in ((0, 1200), (1, 100), (2, 200))]
    write_npz(Path("digits.npz"), data.subset(np.concatenate(chosen)))
    words = "train classify --data digits.npz --out out --epochs 6 --hidden-size 32 --learning-rate 0.01".split()
    assert run(*words).code == 0
    assert json.loads(Path("out/result.json").read_text(encoding="utf-8"))["metrics"]["accuracy"] > 0.5


def test_data_are_inspected_and_the_machine_described(run: Run, signs: Path) -> None:
    ended = run("inspect", str(signs), "--html", "page.html")
    assert (ended.code, ended.err) == (0, "")
    assert "signs" in ended.out
    assert "<html" in Path("page.html").read_text(encoding="utf-8")
    assert version("torch") in run("doctor").out


def _interrupt(kind: signal.Signals, data: Path) -> list[str]:
    """Send a signal to a training process; the command that it prints to continue with."""
    words = ["train", "classify", "--data", str(data), "--out", "my run", *SMALL, "--threads", "1"]
    words[words.index("--epochs") + 1] = "40"
    child = subprocess.Popen(_command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    record = Path("my run", EVENTS_FILE)
    while not (record.exists() and '"event": "epoch"' in record.read_text(encoding="utf-8")):
        assert child.poll() is None
        time.sleep(0.02)
    os.kill(child.pid, kind)
    out, err = child.communicate()
    assert (child.returncode, err) == (130, "")
    stopped = read_events(Path("my run"))[-1]
    assert stopped["event"] == "interrupted"
    assert f"Stopped at update {stopped['update']}; everything is saved." in out
    return shlex.split(out.splitlines()[-1])


@pytest.mark.parametrize("kind", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_after_a_signal_the_printed_command_continues(run: Run, signs: Path, kind: signal.Signals) -> None:
    again = _interrupt(kind, signs)
    assert again == ["stretto", "train", "classify", "--out", "my run", "--resume"]
    ended = run(*again[1:])
    assert (ended.code, ended.err) == (0, "")
    assert "resumed at update" in ended.out
    assert json.loads(Path("my run/result.json").read_text(encoding="utf-8"))["epochs"] == 40


def test_a_flag_that_conflicts_with_the_run_is_refused(run: Run, signs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("stretto.training.trainer.Trainer._finish", stop)
        assert run("train", "classify", "--data", str(signs), "--out", "out", *SMALL).code == 130
    for words, problem in ((["--epochs", "12"], "epochs=12 (was 2)"), (["--batch-size", "7"], "batch_size=7 (was 6)")):
        ended = run("train", "classify", "--out", "out", "--resume", *words)
        assert ended.code == 2
        assert problem in ended.err
    assert run("train", "classify", "--out", "out", "--resume", "--epochs", "2").code == 0
