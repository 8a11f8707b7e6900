"""The record of a run: one JSON object per line, from which console, report and resume read."""

import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TextIO, final

from stretto.distributed import DeferredErrors
from stretto.errors import StrettoError
from stretto.files import disk_errors

Event = dict[str, Any]
Subscriber = Callable[[Event], None]

EVENTS_FILE: Final = "events.jsonl"


class AbstractLog(ABC):
    """Where events go."""

    @abstractmethod
    def emit(self, kind: str, **values: Any) -> None:
        """Record one event."""

    def close(self) -> None:  # noqa: B027
        """Close what is open; nothing, unless a log overrides it."""


@final
class SilentLog(AbstractLog):
    """Records nothing: of several ranks, rank 0 records for all."""

    def emit(self, kind: str, **values: Any) -> None:
        """Drop an event."""


@final
class DeferredLog(AbstractLog):
    """Emits to another log, whose errors are kept until all ranks can raise them."""

    def __init__(self, log: AbstractLog, errors: DeferredErrors) -> None:
        self._log, self._errors = log, errors

    def emit(self, kind: str, **values: Any) -> None:
        """Record one event."""
        with self._errors.defer():
            self._log.emit(kind, **values)


@final
class EventLog(AbstractLog):
    """Appends events to a file, created with the first of them, and passes each, once on disk, to its subscribers."""

    def __init__(self, path: Path, *, subscribers: Sequence[Subscriber] = ()) -> None:
        self._path = path
        self._subscribers = list(subscribers)
        self._stream: TextIO | None = None

    def subscribe(self, subscriber: Subscriber) -> None:
        """Pass all events from now on to one more subscriber."""
        self._subscribers.append(subscriber)

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
            # Every event was flushed when it was emitted; a line still in the buffer failed then, and was reported.
            with contextlib.suppress(OSError):
                self._stream.close()
            self._stream = None

    def _open(self) -> TextIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.read_bytes() if self._path.exists() else b""
        stream = self._path.open("a", encoding="utf-8")
        if written and not written.endswith(b"\n"):
            # A crash cut the last line short; what follows must not be appended to it.
            stream.write("\n")
        return stream


def read_events(path: Path) -> list[Event]:
    """The events of a run as they count in the end.

    A line cut short by a crash is skipped. When a run was resumed at update u, its earlier events of later updates are
    superseded by those after the resumption, and left out. `path` is the file, or the run folder that holds it.
    """
    file = path / EVENTS_FILE if path.is_dir() else path
    try:
        if file.exists() and not file.is_file():
            raise _record_error(path, why="not a file")
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise _record_error(path, why=str(error)) from error
    parsed = [event for event in map(_parse, lines) if event is not None]
    if lines and not parsed:
        raise _record_error(path, why="no line of it is an event")
    events: list[Event] = []
    for event in parsed:
        if event["event"] == "resumed":
            last = event.get("update")
            if not isinstance(last, int):
                raise _record_error(path, why="a resumption without the number of an update")
            events = [e for e in events if e["event"] != "interrupted" and e.get("update", 0) <= last]
        events.append(event)
    return events


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _record_error(path: Path, *, why: str) -> StrettoError:
    return StrettoError(
        f"{str(path)!r} holds no record of a run ({why})",
        fix=f"Name a folder that `stretto train` has written; it contains {EVENTS_FILE}.",
    )
