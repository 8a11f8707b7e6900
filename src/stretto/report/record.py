"""The events of one run, sorted into what its page shows.

Shape legend: S updates that were recorded.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from stretto.training import read_events

Event = Mapping[str, Any]
Numbers = npt.NDArray[np.float64]
State = Literal["finished", "interrupted", "unfinished"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """Every recorded update, as columns; NaN where nothing was recorded."""

    update_S: Numbers
    loss_S: Numbers
    rows_S: Numbers
    length_S: Numbers  # time steps that the batch was padded to
    real_S: Numbers  # time steps without padding
    padded_S: Numbers  # rows times padded length
    seconds_S: Numbers  # since the start
    took_S: Numbers  # seconds since the update before, where nothing but training lay between
    residual_S: Numbers

    def __len__(self) -> int:
        return len(self.update_S)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run has recorded so far; a run that has only begun has little."""

    events: Sequence[Event]
    state: State  # a run that is still going on, or was killed, is unfinished
    started: Event  # empty when there is none, as the next
    finished: Event
    updates: UpdateRecord
    epochs: Sequence[Event]

    @classmethod
    def read(cls, run: Path) -> "RunRecord":
        """Read the record of a run folder."""
        events = read_events(run)
        # A finished run may be resumed for more epochs: only an end after the last resumption counts.
        last_resumed = max((at for at, event in enumerate(events) if event["event"] == "resumed"), default=-1)
        ends = {event["event"]: event for event in events[last_resumed + 1 :]}
        return cls(
            events=events,
            state="finished" if "finished" in ends else "interrupted" if "interrupted" in ends else "unfinished",
            started=_last(events, "started"),
            finished=ends.get("finished", {}),
            updates=_updates(events),
            epochs=_kind(events, "epoch"),
        )

    def all(self, kind: str) -> list[Event]:
        """The events of one kind, in order."""
        return _kind(self.events, kind)

    def last(self, kind: str) -> Event:
        """The last event of one kind; empty when there is none."""
        return _last(self.events, kind)

    @property
    def metric(self) -> str:
        """The name of the task's metric; empty while no epoch is finished."""
        return str(self.epochs[-1]["metric"]) if self.epochs else ""

    @property
    def edges(self) -> list[int]:
        """The bucket edges; empty when they were not recorded."""
        return [int(edge) for edge in self.started.get("edges") or []]


def _kind(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def _last(events: Sequence[Event], kind: str) -> Event:
    return next(reversed(_kind(events, kind)), {})


def _updates(events: Sequence[Event]) -> UpdateRecord:
    found = _kind(events, "update")
    return UpdateRecord(
        update_S=column(found, "update"),
        loss_S=column(found, "loss"),
        rows_S=column(found, "rows"),
        length_S=column(found, "length"),
        real_S=column(found, "steps_real"),
        padded_S=column(found, "padded_steps"),
        seconds_S=column(found, "seconds"),
        took_S=_took(events),
        residual_S=column(found, "residual"),
    )


def column(events: Sequence[Event], name: str) -> Numbers:
    """One entry of every event; NaN where there is none."""
    values = [event.get(name) for event in events]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _took(events: Sequence[Event]) -> Numbers:
    """Seconds of each update whose predecessor in the record is the update before it, in the same epoch."""
    took = [
        float(now["seconds"]) - float(before["seconds"])
        if before["event"] == "update" and before["update"] + 1 == now["update"] and before["epoch"] == now["epoch"]
        else np.nan
        for before, now in itertools.pairwise([{"event": "none"}, *events])
        if now["event"] == "update"
    ]
    return np.array(took, dtype=np.float64)
