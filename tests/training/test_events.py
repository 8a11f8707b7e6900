"""The record of a run: made late, never glued to a torn line, and read as it counts in the end."""

import json
from pathlib import Path
from typing import Any

import pytest
from training_runs import full_disk

from stretto.errors import StrettoError
from stretto.training import EVENTS_FILE, Event, EventLog, read_events


def _write(path: Path, *events: Event) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")


def _kinds(path: Path) -> list[tuple[str, Any]]:
    return [(event["event"], event.get("update")) for event in read_events(path)]


def test_an_event_is_on_disk_before_subscribers_see_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / EVENTS_FILE
    seen: list[tuple[Event, list[Event]]] = []
    log = EventLog(path, subscribers=[lambda event: seen.append((event, read_events(path)))])
    log.emit("first", value=1.5)
    log.emit("second", words=["ä", "\u2028", "\n"])
    log.close()
    assert [event["event"] for event, _ in seen] == ["first", "second"]
    assert all(on_disk[-1] == event for event, on_disk in seen)
    assert read_events(tmp_path / "deep") == [event for event, _ in seen]


def test_the_file_is_made_with_the_first_event(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "run" / EVENTS_FILE)
    assert not (tmp_path / "run").exists()
    log.close()
    assert not (tmp_path / "run").exists()
    log.emit("started")
    assert (tmp_path / "run" / EVENTS_FILE).exists()
    log.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_does_not_have_is_refused_and_not_written(tmp_path: Path, value: float) -> None:
    seen: list[Event] = []
    log = EventLog(tmp_path / EVENTS_FILE, subscribers=[seen.append])
    log.emit("fine", loss=1.0)
    with pytest.raises(ValueError, match="JSON"):
        log.emit("update", loss=value)
    log.close()
    assert [event["event"] for event in read_events(tmp_path)] == ["fine"]
    assert len(seen) == 1


@pytest.mark.parametrize(
    "tail", [b'{"event": "update", "upd', b"\x00\x00\x00\x00", b'{"event": "update", \xff\xfe', b"\xc3"]
)
def test_a_line_that_a_crash_cut_short_is_skipped_and_not_appended_to(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / EVENTS_FILE
    _write(path, {"event": "started"}, {"event": "update", "update": 1})
    path.write_bytes(path.read_bytes() + tail)
    assert _kinds(path) == [("started", None), ("update", 1)]
    log = EventLog(path)
    log.emit("resumed", update=1)
    log.emit("update", update=2)
    log.close()
    assert _kinds(path) == [("started", None), ("update", 1), ("resumed", 1), ("update", 2)]


def test_what_came_after_the_update_of_a_resumption_is_superseded(tmp_path: Path) -> None:
    _write(
        tmp_path / EVENTS_FILE,
        {"event": "started"},
        {"event": "update", "update": 1},
        {"event": "update", "update": 2},
        {"event": "checkpoint", "update": 2},
        {"event": "update", "update": 3},
        {"event": "epoch", "update": 3},
        {"event": "interrupted", "update": 3},
        {"event": "warning", "message": "torn"},
        {"event": "resumed", "update": 2},
        {"event": "update", "update": 3},
        {"event": "interrupted", "update": 3},
        {"event": "resumed", "update": 1},
        {"event": "update", "update": 2},
        {"event": "interrupted", "update": 2},
    )
    kept = [("started", None), ("update", 1), ("warning", None), ("resumed", 1), ("update", 2), ("interrupted", 2)]
    assert _kinds(tmp_path) == kept


@pytest.mark.parametrize(
    "content", [None, b"a,b\n1,2\n", b'{"loss": 1}\n[1]\n3\n', b"\x80\x02}q\x00.", b"PK\x03\x04\xff"]
)
@pytest.mark.parametrize("is_folder", [True, False])
def test_what_holds_no_record_is_named(tmp_path: Path, content: bytes | None, is_folder: bool) -> None:
    file = tmp_path / EVENTS_FILE
    if content is not None:
        file.write_bytes(content)
    given = tmp_path if is_folder else file
    with pytest.raises(StrettoError, match="holds no record of a run") as info:
        read_events(given)
    assert repr(str(given)) in str(info.value)
    assert EVENTS_FILE in info.value.fix
    file.write_bytes(b"")
    assert read_events(given) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log = EventLog(tmp_path / "file" / EVENTS_FILE)
    with pytest.raises(StrettoError, match="could not write to") as info:
        log.emit("started")
    assert str(tmp_path / "file") in str(info.value)


def test_a_full_disk_is_reported_once_and_the_record_stays_readable(tmp_path: Path) -> None:
    log = EventLog(tmp_path / EVENTS_FILE)
    log.emit("update", update=1)
    with full_disk(400):
        with pytest.raises(StrettoError, match="could not write to"):
            log.emit("update", update=2, filler="x" * 900)
        log.close()
    assert _kinds(tmp_path) == [("update", 1)]
