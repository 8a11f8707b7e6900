"""`stretto watch`: the page follows the record, is served to this machine's browser alone, and ends with the run."""

import _thread
import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from run_events import Event, epoch, started, update

from stretto.cli.main import main
from stretto.files import is_locked, locked

PATIENCE = 300.0
"""Seconds after which a test fails; nothing is decided by them on a machine of any speed."""


def record(folder: Path, *events: Event) -> None:
    with (folder / "events.jsonl").open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(event) + "\n" for event in events)


class Watching:
    """`stretto watch` in a thread, and requests to it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.codes: list[int] = []
        self.thread = threading.Thread(target=lambda: self.codes.append(main(["watch", str(folder), "--port", "0"])))
        self.thread.start()
        self.said = ""
        waited = threading.Event()
        for _ in range(int(PATIENCE / 0.05)):
            self.said += capsys.readouterr().out
            if "Ctrl-C" in self.said or not self.thread.is_alive():
                break
            waited.wait(0.05)
        address = self.said.split("http://")[1].split()[0]
        where, _, key = address.partition("/")
        self.port, self.key = int(where.rpartition(":")[2]), f"/{key}"

    def get(self, path: str = "", **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request("GET", self.key + path, headers=headers)
        return connection.getresponse()

    def ended(self) -> int:
        self.thread.join(PATIENCE)
        return self.codes[0]


@contextmanager
def watching(folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[Watching, ExitStack]]:
    """A run that is being trained, until its stack is closed."""
    with ExitStack() as training:
        training.enter_context(locked(folder))
        watch = Watching(folder, capsys)
        yield watch, training
    assert watch.ended() == 0


def test_the_page_follows_the_run_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with watching(tmp_path, capsys) as (watch, training):
        shell = watch.get().read().decode()
        assert "connect-src 'self'" in shell
        assert "Plotly" in shell
        waiting = watch.get("page")
        assert "Nothing is recorded yet" in waiting.read().decode()
        record(tmp_path, started(), update(1))
        first = watch.get(f"page?seen={waiting.headers['X-Version']}")
        assert first.status == 200
        text = first.read().decode()
        assert "Training: epoch 1 of 2, update 1" in text
        assert len(text) < 200_000  # the plotting library came with the shell
        unchanged = watch.get(f"page?seen={first.headers['X-Version']}")
        assert (unchanged.status, unchanged.read()) == (204, b"")
        record(
            tmp_path, update(2), epoch(1), {"event": "finished", "time": 1.0, "metrics": {"cer": 0.2}, "seconds": 9.0}
        )
        training.close()
        last = watch.get(f"page?seen={first.headers['X-Version']}")
        assert last.headers["X-Ended"] == "1"
        assert "Finished" in last.read().decode()
    assert "The run is finished." in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()


def test_nobody_else_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, started())
    with watching(tmp_path, capsys) as (watch, _):
        assert watch.get("page", Host="other.example").status == 404
        watch.key = "/"
        assert watch.get().status == 404
        assert watch.get("report.html").status == 404
        with pytest.raises(OSError), socket.create_connection(("127.0.0.2", watch.port), timeout=PATIENCE):
            pass


def test_ctrl_c_ends_it_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, started())
    handled = threading.Event()

    def interrupt(*_: Any) -> tuple[str, bool]:
        if not handled.is_set():
            handled.set()
            _thread.interrupt_main()
        return "", False

    # A shell has its jobs in the background ignore Ctrl-C.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with locked(tmp_path), pytest.MonkeyPatch.context() as patch:
            patch.setattr("stretto.cli.watch.Watched.look", interrupt)
            assert main(["watch", str(tmp_path), "--port", "0"]) == 0
            assert is_locked(tmp_path)
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert "the run goes on" in capsys.readouterr().out


def test_a_run_that_is_not_trained_is_reported_and_not_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, started(), update(1), {"event": "finished", "time": 1.0, "metrics": {}, "seconds": 9.0})
    assert main(["watch", str(tmp_path)]) == 0
    assert "finished" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()
    killed = tmp_path / "killed"
    killed.mkdir()
    record(killed, started(), update(1))
    (killed / ".lock").touch()
    assert main(["watch", str(killed)]) == 0
    assert "not finished, and no process trains it" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["nowhere"], ["."]])
def test_what_is_no_run_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *words]) == 2
    assert "stretto train" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_busy_port_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, started())
    with locked(tmp_path), socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["watch", str(tmp_path), "--port", str(port)]) == 2
    assert f"port {port}" in (said := capsys.readouterr().err)
    assert "--port 0" in said


def test_a_record_of_another_form_ends_it_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, {"event": "epoch"})
    with locked(tmp_path):
        watch = Watching(tmp_path, capsys)
        assert watch.get("page").status == 500
        assert watch.ended() == 2
    assert "another form" in capsys.readouterr().err


def test_a_lock_is_seen_and_not_disturbed(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert is_locked(tmp_path)
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    assert not list(tmp_path.iterdir())
