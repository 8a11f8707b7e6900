"""What is run of each application in the experiment with large batches: its data, and the batches that they allow."""

import dataclasses
from typing import Any, Final, final

from experiments.large_batch_applications import FULL, MINIATURE, QUICK, Application
from experiments.large_batch_cells import Cell
from experiments.large_batch_data import open_data
from experiments.large_batch_measures import MEASURES
from experiments.large_batch_settings import ApplicationName, LargeBatchSettings
from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.tasks import task_named

FEWEST_UPDATES: Final = 4
"""Of an epoch; with fewer, a batch is left out."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A batch that was not run, and why."""

    application: str
    multiple: int
    why: str


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What is run of one application.

    Attributes:
        application: Which, with its sizes.
        data: To train and measure on.
        data_digest: Of them.
        multiples: Batches that are run, from the baseline's on.
        left_out: Those that are not.
    """

    application: Application
    data: SequenceSet
    data_digest: str
    multiples: tuple[int, ...]
    left_out: tuple[LeftOut, ...]

    def told(self) -> "ApplicationTold":
        """For readers of the result."""
        return ApplicationTold(
            name=self.application.name,
            metric=MEASURES[self.application.name].metric,
            data=self.data.name,
            num_train=len(self.data.part("train")),
            num_test=len(self.data.part("test")),
            notes=self.data.notes,
            multiples=self.multiples,
            settings=self.application.told(),
        )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationTold:
    """An application as it was run.

    Attributes:
        name: Of its task.
        metric: Its quality.
        data: Their name.
        num_train: Training sequences.
        num_test: Test sequences.
        notes: What readers of the data should know.
        multiples: Batches that were run.
        settings: Of the baseline.
    """

    name: ApplicationName
    metric: str
    data: str
    num_train: int
    num_test: int
    notes: tuple[str, ...]
    multiples: tuple[int, ...]
    settings: dict[str, Any]


def course_of(name: ApplicationName, settings: LargeBatchSettings) -> Course:
    """Open the data of an application and find the batches that they allow.

    Raises:
        StrettoError: The data are missing, or too few for the baseline.
    """
    application = (QUICK if settings.quick else FULL if settings.full else MINIATURE)[name]
    data = open_data(application, settings.data)
    wanted = sorted({1, *(application.multiples if settings.multiples is None else settings.multiples)})
    reasons = _reasons(application, data, wanted)
    if reasons[1]:
        raise StrettoError(
            f"{data.name} has too little for the baseline of {name}: {reasons[1]}",
            fix="Give more data, or leave the application out with --applications.",
        )
    return Course(
        application=application,
        data=data,
        data_digest=data.digest(),
        multiples=tuple(multiple for multiple in wanted if not reasons[multiple]),
        left_out=tuple(LeftOut(application=name, multiple=k, why=why) for k, why in reasons.items() if why),
    )


def _reasons(application: Application, data: SequenceSet, multiples: list[int]) -> dict[int, str]:
    """For each batch why it cannot be run; empty if it can."""
    base = Cell(application=application, multiple=1, rule="baseline", seed=0)
    feed = task_named(application.name)(base.config(), data).feed(world=World())
    most, reasons = feed.num_sequences, {}
    for multiple in multiples:
        size = multiple * application.batch_size
        if size > most:
            reasons[multiple] = f"a batch of {size:,} is more than there is to train on, {most:,}"
            continue
        feed.resize(size)
        few = len(feed) < FEWEST_UPDATES
        reasons[multiple] = (
            f"a batch of {size:,} leaves {len(feed)} updates an epoch, fewer than {FEWEST_UPDATES}" if few else ""
        )
    return reasons
