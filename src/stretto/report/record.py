"""The events of one run, sorted into what its page shows.

Shape legend: S updates that were recorded.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.training import read_events

Event = Mapping[str, Any]
Numbers = npt.NDArray[np.float64]


class UpdateRecord:
    """Every recorded update, as columns; NaN where nothing was recorded."""

    def __init__(self, events: Sequence[Event]) -> None:
        found = [event for event in events if event["event"] == "update"]
        self.update_S = column(found, "update")
        self.loss_S = column(found, "loss")
        self.rows_S = column(found, "rows")
        self.length_S = column(found, "length")  # time steps that the batch was padded to
        self.real_S = column(found, "steps_real")  # time steps without padding
        self.padded_S = column(found, "padded_steps")  # rows times padded length
        self.seconds_S = column(found, "seconds")  # since the start
        self.took_S = _time_updates(events)  # seconds since the update before, where nothing but training lay between
        self.residual_S = column(found, "residual")

    def __len__(self) -> int:
        return len(self.update_S)


class RunRecord:
    """What a run folder has recorded so far; soon after its start that is little, and there may be no events."""

    def __init__(self, run: Path) -> None:
        self.events = read_events(run)
        # A finished run may be resumed for more epochs: only an end after the last resumption counts.
        last_resumed = max((at for at, event in enumerate(self.events) if event["event"] == "resumed"), default=-1)
        ends = {event["event"]: event for event in self.events[last_resumed + 1 :]}
        # A run that is still going on, or was killed, is unfinished.
        self.state = next((state for state in ("finished", "interrupted") if state in ends), "unfinished")
        self.started = self.last("started")
        self.finished: Event = ends.get("finished", {})
        self.updates = UpdateRecord(self.events)
        self.epochs = self.all("epoch")
        self.metric = str(self.epochs[-1]["metric"]) if self.epochs else ""
        self.edges = [int(edge) for edge in self.started.get("edges") or []]

    def all(self, kind: str) -> list[Event]:
        """The events of one kind, in order."""
        return [event for event in self.events if event["event"] == kind]

    def last(self, kind: str) -> Event:
        """The last event of one kind; empty when there is none."""
        return next(reversed(self.all(kind)), {})


def column(events: Sequence[Event], name: str) -> Numbers:
    """One entry of every event; NaN where there is none."""
    values = [event.get(name) for event in events]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _time_updates(events: Sequence[Event]) -> Numbers:
    """Seconds of each update whose predecessor in the record is the update before it, in the same epoch."""
    took = [
        float(now["seconds"]) - float(before["seconds"])
        if before["event"] == "update" and before["update"] + 1 == now["update"] and before["epoch"] == now["epoch"]
        else np.nan
        for before, now in itertools.pairwise([{"event": "none"}, *events])
        if now["event"] == "update"
    ]
    return np.array(took, dtype=np.float64)
