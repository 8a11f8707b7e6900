"""The tasks of `stretto bench tuner`, small enough to be trained many times, and their targets."""

import dataclasses
from pathlib import Path
from typing import Any, Final, Literal, final

from bench.training_data import open_data, some_of
from bench.tuner_run import Aim
from stretto.data import PARTS, Part, SequenceSet
from stretto.tasks import CONFIGS, task_named
from stretto.training import AbstractTask, checked

WITHOUT_END: Final = 1e6
"""Minutes between checkpoints within an epoch, so that there are none."""
BatchSize = int | Literal["auto"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A task as it is trained here: small enough to be run many times.

    Attributes:
        base_batch_size: The batch that the settings belong to.
        loss: Of the validation part, the target.
        epochs: At most; a larger batch needs more of them.
        sequences: Of training, at most.
        measured: Sequences of the validation part, at most.
        settings: Others of the task.
        measured_every: Updates of the base batch between measurements; larger batches are measured after as many
            sequences.
        is_embedded: Whether the target is one of the embedded data alone, which are then always taken.
        task: Its name, where that is not the case's own.
    """

    base_batch_size: int
    loss: float
    epochs: int
    sequences: int
    measured: int
    settings: dict[str, Any]
    measured_every: int = 20
    is_embedded: bool = False
    task: str = ""

    @property
    def aim(self) -> Aim:
        """When a run is done."""
        return Aim(loss=self.loss, every=self.measured_every * self.base_batch_size)

    @property
    def quick(self) -> "Case":
        """An epoch or some on little data, to a target that any run reaches."""
        return dataclasses.replace(
            self,
            base_batch_size=4,
            loss=1e3,
            epochs=4,
            sequences=160,
            measured=8,
            settings={**self.settings, "hidden_size": 8},
            measured_every=8,
        )


CASES: Final = {
    "digits": Case(
        base_batch_size=16,
        loss=0.3,
        epochs=24,
        sequences=4000,
        measured=400,
        settings={"hidden_size": 64, "row_size": 64, "optimizer": "adam", "learning_rate": 3e-3},
    ),
    "digits-momentum": Case(
        task="digits",
        base_batch_size=16,
        loss=0.3,
        epochs=24,
        sequences=4000,
        measured=400,
        settings={"hidden_size": 64, "row_size": 64, "optimizer": "momentum", "learning_rate": 0.03},
    ),
    "digit-images": Case(
        base_batch_size=16,
        loss=0.25,
        epochs=40,
        sequences=2600,
        measured=400,
        settings={"hidden_size": 64, "learning_rate": 0.04},
    ),
    "language-model": Case(
        base_batch_size=8,
        loss=3.2,
        epochs=24,
        sequences=5000,
        measured=100,
        settings={"hidden_size": 64, "learning_rate": 4e-3},
        is_embedded=True,
    ),
    "handwriting": Case(
        base_batch_size=4,
        loss=1.0,
        epochs=24,
        sequences=1200,
        measured=100,
        settings={"hidden_size": 48, "learning_rate": 0.02},
        is_embedded=True,
    ),
}
"""First rates are those that need the fewest updates at the first batch, with other seeds than the benchmark's; of
several that need as many, the middle one. The language-model has the default of the task, and would need half as many
updates with four times that rate."""
SCHEDULE: Final[dict[str, Any]] = {"schedule": "constant", "warmup_epochs": 0.05}
"""Rates rise once and stay: how soon a target is reached must not depend on the epochs that were planned."""


def cut_data(name: str, case: Case, *, folder: Path | None) -> tuple[SequenceSet, str]:
    """The part of the task's data that is used, and a word on data that were not there.

    Args:
        name: The case's.
        case: How much is used, and whether the embedded data are meant.
        folder: Holds data sets by name.
    """
    opened = open_data(case.task or name, None if case.is_embedded else folder)
    data = opened.data
    wanted: tuple[tuple[Part, int], ...] = (("train", case.sequences), ("valid", case.measured))
    for part, most in wanted:
        count = int((data.split_N == PARTS.index(part)).sum())
        if count > most:
            data = some_of(data, part=part, fraction=most / count, seed=0)
    return data, opened.note


def made_task(name: str, case: Case, data: SequenceSet, *, batch_size: BatchSize, seed: int) -> AbstractTask[Any]:
    """The task with a batch that is given, or to be chosen; rate and warm-up follow from the base batch."""
    values = {
        **case.settings,
        **SCHEDULE,
        "epochs": case.epochs,
        "batch_size": batch_size,
        "base_batch_size": case.base_batch_size,
        "seed": seed,
        "checkpoint_minutes": WITHOUT_END,
    }
    kind = case.task or name
    return task_named(kind)(checked(CONFIGS[kind], values, source="the benchmark"), data)
