"""Signals that ask training to stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM set `stop`, so that the step under way ends first; a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: object) -> None:  # noqa: ARG001
        if stop.is_set():
            signal.default_int_handler(number, None)
        stop.set()

    earlier = {kind: signal.signal(kind, ask) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for kind, handler in earlier.items():
            signal.signal(kind, handler)
