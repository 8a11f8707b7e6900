"""Runs for tests: trained, stopped or crashed at a chosen event, and compared bit for bit."""

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from stretto.training import (
    EVENTS_FILE,
    MODEL_FILE,
    AbstractTask,
    Event,
    EventLog,
    Interrupted,
    RunResult,
    Subscriber,
    Trainer,
    read_events,
)

CLOCKS = ("time", "seconds", "steps_per_second")


def train(run: Path, task: AbstractTask[Any], *, resume: bool = False, watch: Subscriber | None = None) -> RunResult:
    log = EventLog(run / EVENTS_FILE, subscribers=[watch] if watch else [])
    try:
        return Trainer(task, run=run, log=log, resume=resume).run()
    finally:
        log.close()


def at(update: int, kind: str, act: Callable[[], None]) -> Subscriber:
    """Calls `act` once, at the event of this kind and update."""
    acts = iter([act])

    def watch(event: Event) -> None:
        if event["event"] == kind and event["update"] == update:
            next(acts, lambda: None)()

    return watch


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def crash() -> None:
    raise RuntimeError("the power is gone")


def stop(
    run: Path, task: AbstractTask[Any], update: int, *, kind: str = "update", act: Any = interrupt, resume: bool = False
) -> int:
    """Train until a signal stops the run; the update after which it did."""
    with pytest.raises(Interrupted) as info:
        train(run, task, resume=resume, watch=at(update, kind, act))
    assert info.value.run == run
    last = read_events(run)[-1]
    assert (last["event"], last["update"]) == ("interrupted", info.value.update)
    return info.value.update


@contextlib.contextmanager
def full_disk(most: int) -> Iterator[None]:
    """Within it files cannot grow beyond so many bytes, which a program sees as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def events_of(run: Path, *kinds: str) -> list[Event]:
    """The events of these kinds, without the clock."""
    events = [event for event in read_events(run) if event["event"] in kinds]
    return [{key: value for key, value in event.items() if key not in CLOCKS} for event in events]


def weights(run: Path) -> dict[str, bytes]:
    """The bits of the trained weights."""
    return {name: weight.numpy().tobytes() for name, weight in safetensors.torch.load_file(run / MODEL_FILE).items()}


def outcome(run: Path, result: RunResult) -> dict[str, Any]:
    """All that must be the same in two runs."""
    return {
        "recorded": events_of(run, "update", "epoch", "samples"),
        "metrics": result.metrics,
        "padding": result.padding,
        "epochs": result.epochs,
        "weights": weights(run),
    }
