"""The experiment with large batches: five applications, ever larger batches, and rules that adapt what was tuned once.

After You et al., "Large-batch training for LSTM and beyond" (SC19), who let the batch of four applications grow up to
64-fold with LEGW and say that nothing is lost and nothing tuned. Here it is compared with other rules and with a rate
that is tuned anew; all epochs are run at every batch, so that updates fall as the batch grows. What fails is a row like
any other.
"""

import contextlib
import csv
import dataclasses
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, final

import torch

from bench.machine import Machine, machine_with
from experiments.large_batch_applications import Application
from experiments.large_batch_cells import Cell, CellResult, CellRule, CellStore
from experiments.large_batch_courses import ApplicationTold, Course, LeftOut, course_of
from experiments.large_batch_hands import Errand, Hands
from experiments.large_batch_progress import Progress
from experiments.large_batch_rows import Holding, Row, best_of, holdings, row_of
from experiments.large_batch_running import run_cell
from experiments.large_batch_settings import LargeBatchSettings
from stretto.errors import StrettoError
from stretto.extras import optional
from stretto.files import locked, write_text_atomically
from stretto.training import Interrupted

UNDER_WAY: Final = "under-way"
"""The folder, below that of the experiment, of a run that is not finished."""
STOPPED: Final = "stopped; runs are kept, those under way as far as they came, and the same command goes on from here"
FACTORS: Final = (0.5, 1.0, 2.0, 4.0)
"""What the rate of sqrt is multiplied with, in search of the best; 1 is sqrt itself."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LargeBatchResult:
    """The experiment.

    Attributes:
        applications: As they were run.
        rows: Means over seeds: application by application, the baseline first.
        holdings: How far each rule holds.
        cells: All runs, those that searched for a rate among them.
        left_out: Batches that were not run.
        reused: Runs that were taken as they were.
        threads: torch's.
        machine: Where it ran.
        settings: As used.
    """

    applications: tuple[ApplicationTold, ...]
    rows: tuple[Row, ...]
    holdings: tuple[Holding, ...]
    cells: tuple[CellResult, ...]
    left_out: tuple[LeftOut, ...]
    reused: int
    threads: int
    machine: Machine
    settings: dict[str, Any]

    def of(self, application: str) -> tuple[Row, ...]:
        """The rows of one application."""
        return tuple(row for row in self.rows if row.application == application)

    def to_json(self) -> str:
        """The content of `large-batch.json`."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False) + "\n"

    def to_csv(self) -> str:
        """The content of `large-batch.csv`: all runs."""
        stream = io.StringIO()
        table = csv.writer(stream, lineterminator="\n")
        names = [field.name for field in dataclasses.fields(CellResult) if field.name != "curve"]
        table.writerow(names)
        for cell in self.cells:
            table.writerow([getattr(cell, name) for name in names])
        return stream.getvalue()


def reproduce_large_batch(
    settings: LargeBatchSettings, *, tell: Callable[[str], None] | None = None
) -> LargeBatchResult:
    """Run the experiment, or what is left of it, and write `large-batch.json` and `large-batch.csv`.

    Args:
        settings: What to run.
        tell: If given, called with a line after every run, and with what is to be known before and between.

    Raises:
        StrettoError: If settings or data do not fit, or another process writes to the same folder.
        KeyboardInterrupt: It was asked to stop; finished runs are kept, and the one under way as far as it came.
    """
    settings.refuse_contradictions()
    tell = tell or (lambda _: None)
    if "lamb" in settings.rules:
        # Rather now than after hours.
        optional("pytorch_optimizer")
    with locked(settings.out), _threads(settings):
        courses = [course_of(name, settings) for name in dict.fromkeys(settings.applications)]
        for course in courses:
            for item in course.left_out:
                tell(f"{item.application} x{item.multiple} is left out: {item.why}")
        experiment = _Experiment(settings, courses, tell=tell)
        rows = experiment.run()
        result = LargeBatchResult(
            applications=tuple(course.told() for course in courses),
            rows=tuple(rows),
            holdings=holdings(rows),
            cells=tuple(experiment.results),
            left_out=tuple(item for course in courses for item in course.left_out),
            reused=experiment.reused,
            threads=torch.get_num_threads(),
            machine=machine_with(()),
            settings={
                key: str(value) if isinstance(value, Path) else value
                for key, value in dataclasses.asdict(settings).items()
            },
        )
        write_text_atomically(settings.out / "large-batch.json", result.to_json())
        write_text_atomically(settings.out / "large-batch.csv", result.to_csv())
    return result


@final
class _Experiment:
    """Runs what is not there yet."""

    def __init__(self, settings: LargeBatchSettings, courses: list[Course], *, tell: Callable[[str], None]) -> None:
        self._settings, self._courses, self._tell = settings, courses, tell
        self._store = CellStore(settings.out)
        self._seeds = range(settings.num_seeds)
        self._rules = [rule for rule in dict.fromkeys(settings.rules) if rule != "oracle"]
        self._searches = "oracle" in settings.rules
        self._known: dict[str, CellResult] = {}
        self._looked_up: set[str] = set()
        self._progress = Progress(side_by_side=settings.num_jobs)

    @property
    def results(self) -> list[CellResult]:
        """All runs so far."""
        return list(self._known.values())

    @property
    def reused(self) -> int:
        """Runs that were there before."""
        return len(self._known) - self._progress.done

    def run(self) -> list[Row]:
        """All rows."""
        for course in self._courses:
            self._plan(course)
        if self.reused:
            self._tell(f"{self.reused} runs are finished already and taken as they are")
        self._tell(self._progress.outlook(self._settings.out))
        if self._settings.num_jobs > 1 and self._progress.left:
            self._run_side_by_side()
        return [row for course in self._courses for row in self._rows(course)]

    def _run_side_by_side(self) -> None:
        """All runs that are left, so that rows find them."""
        with Hands(self._settings, count=self._settings.num_jobs, threads=torch.get_num_threads()) as hands:
            # Whose rates the others of the oracle have shows when the first are done.
            for cells in (self._certain, self._others):
                errands, of = list[Errand](), dict[str, Course]()
                for course in self._courses:
                    for cell in cells(course):
                        key = cell.key(course.data_digest)
                        if key not in of and self._find(cell, key) is None:
                            of[key] = course
                            errands.append(Errand(cell=cell, key=key, folder=self._folder(key)))
                try:
                    for errand, result in hands.run(errands):
                        self._note(of[errand.key], errand.cell, result)
                except KeyboardInterrupt:
                    self._tell(STOPPED)
                    raise

    def _others(self, course: Course) -> Iterator[Cell]:
        """The runs of the oracle with the seeds but the first, when all of the first are done."""
        application = course.application
        for multiple in course.multiples[1:] if self._searches else ():
            tried = [self._result(course, cell) for cell in _grid(application, multiple, seed=self._seeds[0])]
            factor = best_of(tried, application.name).factor
            for seed in self._seeds[1:]:
                yield _searched(application, multiple, factor=factor, seed=seed)

    def _plan(self, course: Course) -> None:
        """Find what is finished, and note what may have to be run."""
        keys = {cell.key(course.data_digest): cell for cell in self._certain(course)}
        left = [cell.multiple for key, cell in keys.items() if self._find(cell, key) is None]
        if self._searches:
            left += [multiple for multiple in course.multiples[1:] for _ in range(self._perhaps(course, multiple))]
        self._progress.plan(course.application, left)

    def _perhaps(self, course: Course, multiple: int) -> int:
        """Runs of the oracle with the seeds but the first; which they are shows when the first is done."""
        application = course.application
        grid = {cell.key(course.data_digest): cell for cell in _grid(application, multiple, seed=self._seeds[0])}
        tried = [found for key, cell in grid.items() if (found := self._find(cell, key)) is not None]
        if len(tried) < len(grid):
            return len(self._seeds) - 1
        best = best_of(tried, application.name).factor
        others = [_searched(application, multiple, factor=best, seed=seed) for seed in self._seeds[1:]]
        return sum(self._find(cell, cell.key(course.data_digest)) is None for cell in others)

    def _certain(self, course: Course) -> Iterator[Cell]:
        """All runs that do not depend on what comes of others."""
        for multiple in course.multiples:
            rules: list[CellRule] = list(self._rules)
            if multiple == 1:
                rules = ["baseline", "lamb"] if "lamb" in rules else ["baseline"]
            for rule in rules:
                for seed in self._seeds:
                    yield Cell(application=course.application, multiple=multiple, rule=rule, seed=seed)
            if self._searches and multiple > 1:
                yield from _grid(course.application, multiple, seed=self._seeds[0])

    def _rows(self, course: Course) -> Iterator[Row]:
        baseline = row_of("baseline", self._over_seeds(course, 1, "baseline"), baseline=None)
        yield baseline
        if "lamb" in self._rules:
            yield row_of("lamb", self._over_seeds(course, 1, "lamb"), baseline=baseline)
        for multiple in course.multiples[1:]:
            for rule in self._rules:
                yield row_of(rule, self._over_seeds(course, multiple, rule), baseline=baseline)
            if self._searches:
                yield self._oracle(course, multiple, baseline)

    def _over_seeds(self, course: Course, multiple: int, rule: CellRule) -> list[CellResult]:
        cells = [Cell(application=course.application, multiple=multiple, rule=rule, seed=seed) for seed in self._seeds]
        return [self._result(course, cell) for cell in cells]

    def _oracle(self, course: Course, multiple: int, baseline: Row) -> Row:
        """The rate that is best on the validation part with the first seed; then the other seeds with it."""
        application = course.application
        tried = [self._result(course, cell) for cell in _grid(application, multiple, seed=self._seeds[0])]
        best = best_of(tried, application.name)
        others = [
            self._result(course, _searched(application, multiple, factor=best.factor, seed=seed))
            for seed in self._seeds[1:]
        ]
        # What else was planned of this batch turned out to be the same as others.
        self._progress.drop(application, multiple)
        return row_of("oracle", [best, *others], baseline=baseline, cost=[*tried, *others])

    def _find(self, cell: Cell, key: str) -> CellResult | None:
        """The result, if the run is finished."""
        if key not in self._looked_up and not self._settings.fresh:
            self._looked_up.add(key)
            try:
                found = self._store.find(cell, key)
            except StrettoError as error:
                self._tell(str(error))
                found = None
            if found is not None:
                self._known[key] = found
        return self._known.get(key)

    def _result(self, course: Course, cell: Cell) -> CellResult:
        key = cell.key(course.data_digest)
        found = self._find(cell, key)
        if found is not None:
            return found
        try:
            result = run_cell(cell, course.data, key=key, folder=self._folder(key))
        except Interrupted:
            self._tell(STOPPED)
            raise KeyboardInterrupt from None
        self._note(course, cell, result)
        return result

    def _folder(self, key: str) -> Path:
        """For a run while it is under way."""
        folder = self._settings.out / UNDER_WAY / key
        if self._settings.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        return folder

    def _note(self, course: Course, cell: Cell, result: CellResult) -> None:
        self._store.keep(cell, result, facts={"settings": cell.config().recorded(), "data": course.data.name})
        self._known[result.key] = result
        self._tell(self._progress.line(cell, result))


def _searched(application: Application, multiple: int, *, factor: float, seed: int) -> Cell:
    return Cell(application=application, multiple=multiple, rule="sqrt", factor=factor, seed=seed)


def _grid(application: Application, multiple: int, *, seed: int) -> list[Cell]:
    return [_searched(application, multiple, factor=factor, seed=seed) for factor in FACTORS]


@contextlib.contextmanager
def _threads(settings: LargeBatchSettings) -> Iterator[None]:
    earlier = torch.get_num_threads()
    torch.set_num_threads(settings.threads or (earlier if settings.full else 1))
    try:
        yield
    finally:
        torch.set_num_threads(earlier)
