"""The record of a run: one JSON object a line, from which console, report and resume read."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TextIO, final

from stretto.errors import StrettoError
from stretto.storage import disk_errors

Event = dict[str, Any]
Subscriber = Callable[[Event], None]

EVENTS_FILE: Final = "events.jsonl"


@final
class EventLog:
    """Appends events to a file, created with the first of them, and hands each to its subscribers.

    Args:
        path: The file; its earlier lines are kept.
        subscribers: Called with every event, after it is on disk.
    """

    def __init__(self, path: Path, *, subscribers: Sequence[Subscriber] = ()) -> None:
        self._path = path
        self._subscribers = tuple(subscribers)
        self._stream: TextIO | None = None

    def emit(self, kind: str, **values: Any) -> None:
        """Record one event."""
        event: Event = {"event": kind, "time": time.time(), **values}
        line = json.dumps(event, allow_nan=False) + "\n"
        with disk_errors(self._path, doing="write to"):
            self._stream = self._stream or self._open()
            self._stream.write(line)
            self._stream.flush()
        for subscriber in self._subscribers:
            subscriber(event)

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()

    def _open(self) -> TextIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.read_bytes() if self._path.exists() else b""
        stream = self._path.open("a", encoding="utf-8")
        if written and not written.endswith(b"\n"):
            # A crash tore the last line; what follows must not be glued to it.
            stream.write("\n")
        return stream


def read_events(path: Path) -> list[Event]:
    """The events of a run as they count in the end.

    A line torn by a crash is passed over. When a run was resumed at step s, what it had recorded of later steps is
    superseded by what came after the resumption, and left out.

    Args:
        path: `events.jsonl`, or the run folder that holds it.
    """
    file = path / EVENTS_FILE if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StrettoError(
            f"{str(path)!r} holds no record of a run ({error})",
            fix=f"Name a folder that `stretto train` has written; it contains {EVENTS_FILE}.",
        ) from error
    events: list[Event] = []
    for line in lines:
        event = _parsed(line)
        if event is None:
            continue
        if event["event"] == "resumed":
            events = [e for e in events if e["event"] != "interrupted" and e.get("step", 0) <= event["step"]]
        events.append(event)
    return events


def _parsed(line: str) -> Event | None:
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
