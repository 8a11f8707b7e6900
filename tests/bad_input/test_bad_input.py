"""Hundreds of command lines and calls that cannot be used: each ends as `cases.*.toml` says, and harms nothing."""

import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from bad_files import write_files

import stretto
import stretto.data
import stretto.large_batch
from stretto import cells
from stretto.cli.main import main
from stretto.training import read_toml

HERE = Path(__file__).parent
COMMANDS = read_toml(HERE / "cases.commands.toml")
CALLS = read_toml(HERE / "cases.calls.toml")
MAX_SECONDS = 600
"""What takes this long hangs. It never decides otherwise, on however busy a machine."""


class Case(NamedTuple):
    line: str
    words: str
    exit: int


def _commands() -> list[Any]:
    return [
        pytest.param(
            Case(line, words, group.get("exit", 2)),
            marks=[pytest.mark.slow] if group.get("slow") else [],
            id=f"{line[:60]}-{number}",
        )
        for group in COMMANDS["commands"]
        for number, (line, words) in enumerate(group["cases"])
    ]


def _calls() -> list[Any]:
    return [
        pytest.param(call, words, group.get("error", "StrettoError"), id=f"{call[:60]}-{number}")
        for group in CALLS["calls"]
        for number, (call, words) in enumerate(group["cases"])
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("bad")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("COLUMNS", "200")
        # Modules of this folder are compiled nowhere, so that nothing appears in it.
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        write_files(place)
        yield place


@pytest.fixture
def unharmed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, in which every file must be afterwards as it was before."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = _contents(folder)
    yield folder
    assert _contents(folder) == before


def _contents(folder: Path) -> dict[str, tuple[int, ...]]:
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        size_and_time = () if path.is_dir() and not path.is_symlink() else (status.st_size, status.st_mtime_ns)
        found[str(path.relative_to(folder))] = (status.st_ino, status.st_mode, *size_and_time)
    return found


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"not finished after {MAX_SECONDS} seconds")

    earlier = signal.signal(signal.SIGALRM, stop)
    signal.alarm(MAX_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, earlier)


def _words(line: str) -> list[str]:
    """`\\x00` stands for a character that no file of text should have."""
    return [word.replace("\\x00", "\0") for word in shlex.split(line)]


def _flat(text: str) -> str:
    """Without the frames that help is printed in, and without line ends."""
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("case", _commands())
def test_a_command_line(case: Case, unharmed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code: object
    try:
        code = main(_words(case.line))
    except SystemExit as stop:
        code = stop.code
    printed = capfd.readouterr()
    assert code == case.exit, printed.err
    assert "Traceback" not in printed.err + printed.out
    assert _flat(case.words) in _flat(printed.err)


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS["processes"]["lines"])
def test_a_process(line: str, unharmed: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stretto", *_words(line)],
        capture_output=True,
        text=True,
        timeout=MAX_SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()


def test_the_suite_is_as_large_as_it_should_be() -> None:
    lines = [param.values[0].line for param in _commands()]
    calls = [param.values[0] for param in _calls()]
    assert len(set(lines)) >= 400
    assert len(set(calls)) >= 200
    assert set(COMMANDS["processes"]["lines"]) <= set(lines)


def _load_changed(sampler: stretto.BucketSampler, **changes: Any) -> None:
    sampler.load_state_dict({**sampler.state_dict(), **changes})


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the calls may use."""
    own: dict[str, Any] = {"stretto": stretto, "cells": cells, "data": stretto.data, "torch": torch, "np": np}
    recipe = stretto.LargeBatch(base_batch_size=8, base_lr=0.1, batch_size=8, epochs=3)
    own |= {"large_batch": stretto.large_batch, "recipe": recipe}
    own |= {name: getattr(stretto, name) for name in stretto.__all__}
    own |= {name: getattr(cells, name) for name in cells.__all__}
    return own | {"Path": Path, "load_changed": _load_changed}


@pytest.mark.parametrize(("call", "words", "error"), _calls())
def test_a_call(call: str, words: str, error: str, unharmed: Path, names: dict[str, Any]) -> None:
    run: Callable[[], Any] = lambda: eval(call, dict(names))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if error == "OK":
            run()
            return
        with pytest.raises(Exception) as info:
            run()
    assert type(info.value).__name__ == error, info.value
    assert _flat(words) in _flat(str(info.value))


def test_nothing_was_unpickled(folder: Path) -> None:
    assert not (folder / "trapped").exists()
    assert (folder / "signs.npz").is_file()
