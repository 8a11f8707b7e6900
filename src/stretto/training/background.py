"""Checkpoints written while training goes on."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import final


@final
class BackgroundWriter:
    """Runs one write at a time in a thread; its error, if any, comes up at the next call.

    What is written must not change any more: give it copies.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None

    def begin(self, write: Callable[[], Path]) -> None:
        """Begin a write; the one before must have been waited for, so that what it wrote is told first."""
        assert self._thread is None, "wait for the write before"

        def work() -> None:
            try:
                self._path = write()
            except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
                self._error = error

        self._thread = threading.Thread(target=work, name="checkpoint")
        self._thread.start()

    def poll(self) -> Path | None:
        """What was written, once, if the write is done."""
        return None if self._thread is None or self._thread.is_alive() else self.wait()

    def wait(self) -> Path | None:
        """Wait for the write under way; returns what it wrote, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, path = self._error, self._path
        self._error = self._path = None
        if error is not None:
            raise error
        return path
