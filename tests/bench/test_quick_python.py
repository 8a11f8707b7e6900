"""Python processes that fork from a server: they run, end and are killed as ordinary ones are."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.faults import ranks_below
from bench.quick_python import QuickPython

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")

SAY = """
import os, sys
print(os.environ["SAID"], os.getcwd(), *sys.argv[1:], sys.stdin.read().strip())
print("to stderr", file=sys.stderr)
raise SystemExit(int(sys.argv[1]))
"""
WAIT = "import time\nopen('started', 'w').close()\ntime.sleep(600)\n"
START = (
    "import os, subprocess, sys\n"
    "subprocess.run([sys.executable, '-u', '-m', 'wait'], env={**os.environ, 'RANK': '3'}, check=False)\n"
)


@pytest.fixture(scope="module")
def python() -> Iterator[QuickPython]:
    with QuickPython() as server:
        yield server


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {"say": SAY, "wait": WAIT, "start": START, "fail": "1 / 0\n"}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(python: QuickPython, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([str(python.program), *words], text=True)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_it_has_the_environment_the_folder_the_files_and_the_exit_code(
    python: QuickPython, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAID", "hello")
    command = [str(python.program), "-m", "say", "7", "a b"]
    done = subprocess.run(command, input="from stdin\n", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, f"hello {modules} 7 a b from stdin\n", "to stderr\n")


@pytest.mark.usefixtures("modules")
def test_an_error_has_its_traceback(python: QuickPython) -> None:
    done = subprocess.run([str(python.program), "-m", "fail"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("whose", ["program", "process"])
def test_a_signal_ends_both(python: QuickPython, modules: Path, number: signal.Signals, whose: str) -> None:
    program = start(python, "-m", "wait")
    wait_for(modules / "started")
    process = python.processes()[program.pid]
    os.kill(program.pid if whose == "program" else process, number)
    assert program.wait() == -number
    while program.pid in python.processes():
        time.sleep(0.01)
    assert not Path(f"/proc/{process}").exists()


def test_what_it_starts_starts_in_the_same_way_and_is_found_as_a_rank(python: QuickPython, modules: Path) -> None:
    program = start(python, "-m", "start")
    wait_for(modules / "started")
    ((process, rank),) = ranks_below(program.pid, behind=python.processes())
    assert rank == 3
    assert process in python.processes().values()
    os.kill(process, signal.SIGKILL)
    assert program.wait() == 0
