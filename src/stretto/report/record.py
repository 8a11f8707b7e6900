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
    """Every recorded update, as columns; NaN where nothing was recorded.

    Attributes:
        update_S: The update's number.
        loss_S: Training loss.
        rows_S: Sequences of the batch.
        length_S: Time steps that the batch was padded to.
        real_S: Real time steps of the batch.
        slots_S: Rows times padded length.
        seconds_S: Since the start.
        took_S: Seconds since the update before, where nothing but training lay between.
        residual_S: What a solver left where chunks of time meet.
    """

    update_S: Numbers
    loss_S: Numbers
    rows_S: Numbers
    length_S: Numbers
    real_S: Numbers
    slots_S: Numbers
    seconds_S: Numbers
    took_S: Numbers
    residual_S: Numbers

    def __len__(self) -> int:
        return len(self.update_S)

    @property
    def padding_per_update(self) -> Numbers:
        """The share of each batch's slots that is padding."""
        return 1.0 - self.real_S / self.slots_S

    @property
    def padding(self) -> float:
        """The share of the slots of all batches together that is padding."""
        return 1.0 - float(self.real_S.sum()) / float(self.slots_S.sum())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run has recorded so far; a run that has only begun has little.

    Attributes:
        state: Whether it finished, was interrupted, or neither (still running, or killed).
        started: The event that began it; empty when there is none.
        updates: Updates.
        epochs: Finished epochs, as recorded.
        samples: Test sequences with what the net made of them.
        finished: The event that ended it; empty when there is none.
        interrupted_at: The update at which it was interrupted, unless it has been resumed since.
        resumed_at: The updates at which it was resumed.
        checkpoints: Checkpoints, as recorded.
        warnings: Their messages.
        ranks: What each of several ranks did in each epoch; empty for one rank.
        probed: The measured throughput at several batch sizes; empty where the batch size was given.
        decisions: Decisions on the batch size, as recorded.
    """

    state: State
    started: Event
    updates: UpdateRecord
    epochs: Sequence[Event]
    samples: Sequence[Event]
    finished: Event
    interrupted_at: int | None
    resumed_at: Sequence[int]
    checkpoints: Sequence[Event]
    warnings: Sequence[str]
    ranks: Sequence[Event] = ()
    probed: Event = dataclasses.field(default_factory=dict)
    decisions: Sequence[Event] = ()

    @classmethod
    def read(cls, run: Path) -> "RunRecord":
        """Read the record of a run folder."""
        events = read_events(run)
        # A finished run may be resumed for more epochs: only an end after the last resumption counts.
        last_resumed = max((at for at, event in enumerate(events) if event["event"] == "resumed"), default=-1)
        ends = {event["event"]: event for event in events[last_resumed + 1 :]}
        interrupted = ends.get("interrupted")
        state: State = "finished" if "finished" in ends else "interrupted" if interrupted else "unfinished"
        return cls(
            state=state,
            started=_last(events, "started"),
            updates=_updates(events),
            epochs=_kind(events, "epoch"),
            samples=_last(events, "samples").get("items") or [],
            finished=ends.get("finished", {}),
            interrupted_at=int(interrupted["update"]) if interrupted and state == "interrupted" else None,
            resumed_at=[int(event["update"]) for event in _kind(events, "resumed")],
            checkpoints=_kind(events, "checkpoint"),
            warnings=[str(event["message"]) for event in _kind(events, "warning")],
            ranks=_kind(events, "ranks"),
            probed=_last(events, "probe"),
            decisions=_kind(events, "batch"),
        )

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
        update_S=_column(found, "update"),
        loss_S=_column(found, "loss"),
        rows_S=_column(found, "rows"),
        length_S=_column(found, "length"),
        real_S=_column(found, "steps_real"),
        slots_S=_column(found, "slots"),
        seconds_S=_column(found, "seconds"),
        took_S=_took(events),
        residual_S=_column(found, "residual"),
    )


def _column(updates: Sequence[Event], name: str) -> Numbers:
    values = [update.get(name) for update in updates]
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
