"""The large-batch experiment: five applications, ever larger batches, and rules that adapt what was tuned once.

After You et al., "Large-batch training for LSTM and beyond" (SC19), who let the batch of four applications grow up to
64-fold with LEGW and report that nothing is lost and nothing needs tuning. Here it is compared with other rules and
with a rate that is tuned for every batch. The number of epochs is the same at every batch, so updates fall as the batch
grows. What fails is a row like any other.
"""

import dataclasses
import math
import os
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, final, get_args

import torch
from pydantic import Field

from bench.figure import AMBER, BLUE, GREY, TEAL, Line, Panel, draw_figure
from bench.harness import Report, Settings, Table, torch_threads
from experiments.large_batch_apps import (
    METRICS,
    WARMUP_CAP,
    Application,
    ApplicationName,
    applications,
    open_data,
)
from experiments.large_batch_runs import Job, Run, RunResult, RunRule, WorkerPool, execute, load_result, save_result
from experiments.registry import experiment, to_csv, to_dict
from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.extras import optional
from stretto.files import locked
from stretto.large_batch import ScalingRule
from stretto.report import duration
from stretto.tasks import find_task
from stretto.training import Count, Interrupted

RuleName: TypeAlias = Literal[ScalingRule, "lamb", "oracle"]
RowRule: TypeAlias = Literal[RunRule, "oracle"]
RULES: Final[dict[RuleName, str]] = {
    "none": "the rate and the warm-up of the baseline",
    "linear": "the rate times k",
    "sqrt": "the rate times the square root of k",
    "legw": f"the same, and the warm-up times k in epochs, up to {WARMUP_CAP:.0%} of the run",
    "lamb": "LAMB instead of the baseline's optimiser, with a rate of its own for the baseline's batch, then as legw",
    "oracle": "the best rate of a small grid around that of sqrt, searched at every batch",
}
FACTORS: Final = (0.5, 1.0, 2.0, 4.0)
"""The oracle's grid: factors on the rate of sqrt. 1 is sqrt itself."""
NUM_SEEDS: Final = 3
MIN_UPDATES: Final = 4
"""Per epoch; a batch with fewer is left out."""
RESULTS: Final = "runs"
IN_PROGRESS: Final = "in-progress"
STOPPED: Final = "stopped; finished runs and checkpoints are kept, and the same command continues from here"
COLOURS: Final[dict[RowRule, str]] = {
    "baseline": "#22303f",
    "none": GREY,
    "linear": AMBER,
    "sqrt": TEAL,
    "legw": BLUE,
    "lamb": "#8f4f8a",
    "oracle": "#b0463c",
}
MAX_PERPLEXITY_RATIO: Final = 3.0
"""A perplexity of more than this times the baseline's is off the figure's scale."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargeBatchSettings(Settings):
    """Settings of `python -m experiments large-batch`.

    Attributes:
        data: A folder with data in subfolders: mnist, ptb, multi30k_en_de and iam, each used if it is there; by default
            embedded data.
        out: The folder for the page, the figure, the JSON and CSV files and, below it, the finished runs.
        applications: Which to run.
        multiples: Batches, in multiples of the baseline's, which is always run; by default those of the applications.
        rules: How settings follow the batch; the oracle tunes the rate for every batch.
        seeds: Runs of each, with the seeds 0, 1 and so on; by default 3, and 1 if quick.
        threads: Cores per run; by default 1, and with full what torch takes.
        jobs: Runs at a time, each in its own process; by default one per core, and 1 if quick or full.
        fresh: Repeat all runs instead of reusing finished ones and continuing those that were stopped.
        full: The sizes of the papers; takes many hours, and data for all applications but handwriting.
    """

    data: Path | None = None
    out: Path = Path("runs/reproduce-large-batch")
    applications: tuple[ApplicationName, ...] = get_args(ApplicationName)
    multiples: tuple[Annotated[int, Field(ge=1, le=2**20)], ...] | None = None
    rules: tuple[RuleName, ...] = tuple(RULES)
    seeds: Count | None = None
    jobs: Count | None = None
    fresh: bool = False
    full: bool = False

    def check(self) -> None:
        """Refuse what leaves nothing to run, or contradicts itself."""
        if self.quick and self.full:
            raise StrettoError("both --quick and --full were given", fix="Give one of the two, or none.")
        for name in ("applications", "rules"):
            if not getattr(self, name):
                raise StrettoError(f"there are no {name}", fix=f"Give some, or leave --{name} out.")
        if self.data is not None and not self.data.is_dir():
            raise StrettoError(
                f"there is no folder {str(self.data)!r}", fix="Name the folder that has mnist, ptb and so on in it."
            )
        if "lamb" in self.rules:
            # Rather now than after hours.
            optional("pytorch_optimizer")

    @property
    def num_jobs(self) -> int:
        """Runs at a time."""
        return self.jobs or (1 if self.quick or self.full else max(1, (os.cpu_count() or 1) // (self.threads or 1)))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationData:
    """An application with its data and the batches that these allow."""

    application: Application
    data: SequenceSet
    digest: str  # of the data
    multiples: tuple[int, ...]  # the batches to run, from the baseline's
    left_out: dict[int, str]  # the others, and why

    def facts(self) -> dict[str, Any]:
        """For the JSON file."""
        parts = {f"num_{part}": len(self.data.part(part)) for part in ("train", "test")}
        about = {"data": self.data.name, "notes": self.data.notes, **parts}
        batches = {"multiples": self.multiples, "left_out": self.left_out}
        return {**to_dict(self.application), "settings": dict(self.application.settings), **about, **batches}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rule at one batch, over seeds."""

    application: ApplicationName
    rule: RowRule  # at the baseline's batch: the baseline, which all rules but lamb share, and lamb
    multiple: int
    batch_size: int
    learning_rate: float  # the peak
    warmup_epochs: float
    runs: int  # as many as seeds
    diverged: int  # how many of them did
    valid: float | None  # mean of the metric; None if any run diverged
    valid_deviation: float  # standard deviation over seeds
    test: float | None
    test_deviation: float
    epochs: float  # mean per run
    updates: float  # mean per run
    seconds: float  # of the updates of a run, the median
    is_within: bool | None  # whether it is as good as the baseline; None if the baseline diverged
    cost_runs: int  # runs that it took; more than `runs` where the rate was searched
    cost_updates: int  # of all of them
    cost_seconds: float


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """How far one rule holds in one application."""

    application: ApplicationName
    rule: RuleName
    holds_to: int  # largest multiple up to which the rule is as good as the baseline at all batches run; 1 if none
    tried: int  # the largest multiple run
    fails_at: int | None  # the smallest multiple at which it is not
    says: str  # the same as a sentence


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LargeBatchResult:
    """The experiment."""

    applications: dict[ApplicationName, dict[str, Any]]  # as they were run
    rows: tuple[Row, ...]  # by application, the baseline first
    holdings: tuple[Holding, ...]
    runs: tuple[RunResult, ...]  # including those that searched for a rate
    reused: int  # runs that were finished before
    threads: int
    settings: dict[str, Any]

    def row_at(self, application: str, rule: str, multiple: int) -> Row | None:
        """The row of a rule at a batch; at the baseline's batch, the baseline is that of all rules but lamb."""
        shared = "baseline" if multiple == 1 and rule != "lamb" else rule
        wanted = (application, shared, multiple)
        return next((row for row in self.rows if (row.application, row.rule, row.multiple) == wanted), None)

    def rules_of(self, application: str) -> list[RowRule]:
        """The rules that have rows, and the baseline if no other row would show it."""
        present = {row.rule for row in self.rows if row.application == application}
        rules: list[RowRule] = [rule for rule in RULES if rule in present]
        return rules if any(rule != "lamb" for rule in rules) else ["baseline", *rules]


def reproduce_large_batch(
    settings: LargeBatchSettings, *, tell: Callable[[str], None] = lambda _: None
) -> LargeBatchResult:
    """Run the experiment, or what is left of it.

    Args:
        settings: What to run.
        tell: Called with a line after every run, and with what to expect before.

    Raises:
        StrettoError: If settings or data do not fit, or another process writes to the same folder.
        KeyboardInterrupt: If it was asked to stop; finished runs are kept, and checkpoints of those in progress.
    """
    settings.check()
    threads = settings.threads or (None if settings.full else 1)
    with locked(settings.out), torch_threads(threads) as num_threads:
        opened = [open_application(name, settings) for name in dict.fromkeys(settings.applications)]
        for each in opened:
            for multiple, why in each.left_out.items():
                tell(f"{each.application.name} x{multiple} is left out: {why}")
        search = _GridSearch(settings, opened, tell=tell)
        rows = search.run()
    return LargeBatchResult(
        applications={each.application.name: each.facts() for each in opened},
        rows=tuple(rows),
        holdings=tuple(find_holdings(rows)),
        runs=tuple(search.results.values()),
        reused=search.num_reused,
        threads=num_threads,
        settings=to_dict(settings),
    )


def open_application(name: ApplicationName, settings: LargeBatchSettings) -> ApplicationData:
    """Open the data of an application and find the batches that they allow.

    Raises:
        StrettoError: If the data are missing, or too few for the baseline.
    """
    application = applications("quick" if settings.quick else "full" if settings.full else "miniature")[name]
    data = open_data(application, settings.data)
    baseline = Run(application=application, multiple=1, rule="baseline", seed=0)
    feed = find_task(name)(baseline.config(), data).feed(world=World())
    num_sequences, left_out = feed.num_sequences, dict[int, str]()
    wanted = sorted({1, *(application.multiples if settings.multiples is None else settings.multiples)})
    for multiple in wanted:
        size = multiple * application.batch_size
        if size > num_sequences:
            left_out[multiple] = f"a batch of {size:,} is more than there is to train on, {num_sequences:,}"
            continue
        feed.resize(size)
        if len(feed) < MIN_UPDATES:
            left_out[multiple] = f"a batch of {size:,} leaves {len(feed)} updates per epoch, fewer than {MIN_UPDATES}"
    if 1 in left_out:
        raise StrettoError(
            f"{data.name} has too little for the baseline of {name}: {left_out[1]}",
            fix="Give more data, or leave the application out with --applications.",
        )
    multiples = tuple(multiple for multiple in wanted if multiple not in left_out)
    digest = data.digest()
    return ApplicationData(application=application, data=data, digest=digest, multiples=multiples, left_out=left_out)


@final
class _GridSearch:
    """Makes all runs that are not finished yet, in two rounds.

    First every rule with every seed, and the oracle's grid with the first seed. That decides the oracle's rates, which
    are then run with the other seeds.
    """

    def __init__(
        self, settings: LargeBatchSettings, opened: Sequence[ApplicationData], *, tell: Callable[[str], None]
    ) -> None:
        self._settings, self._opened, self._tell = settings, opened, tell
        self._rules: list[RunRule] = [rule for rule in dict.fromkeys(settings.rules) if rule != "oracle"]
        self._has_oracle = "oracle" in settings.rules
        self._seeds = range(settings.seeds or (1 if settings.quick else NUM_SEEDS))
        self._looked_up: set[str] = set()
        self._progress = Progress(settings.num_jobs)
        self.results: dict[str, RunResult] = {}

    @property
    def num_reused(self) -> int:
        """Runs that were finished before."""
        return len(self.results) - self._progress.done

    def run(self) -> list[Row]:
        """Make all runs and put them together."""
        first = [(each, run) for each in self._opened for run in self._independent_runs(each)]
        missing = [(each, run) for each, run in first if self._find(each, run) is None]
        # How many runs the second round needs is known only after the first.
        later = [run for each in self._opened for run in self._oracle_runs(each, is_guess=True)]
        self._progress.plan([*(run for _, run in missing), *later])
        if self.results:
            self._tell(f"{len(self.results)} runs are finished already and reused")
        self._tell(self._progress.outlook(self._settings.out / RESULTS))
        self._make(missing)
        second = [(each, run) for each in self._opened for run in self._oracle_runs(each)]
        missing = [(each, run) for each, run in second if self._find(each, run) is None]
        self._progress.plan([run for _, run in missing])
        self._make(missing)
        return [row for each in self._opened for row in self._rows(each)]

    def _independent_runs(self, each: ApplicationData) -> Iterator[Run]:
        """All runs that do not depend on the results of others."""
        for multiple in each.multiples:
            rules = self._rules
            if multiple == 1:
                rules = ["baseline", *(rule for rule in rules if rule == "lamb")]
            for rule in rules:
                yield from self._over_seeds(each, multiple, rule)
            if self._has_oracle and multiple > 1:
                yield from _grid(each, multiple)

    def _oracle_runs(self, each: ApplicationData, *, is_guess: bool = False) -> Iterator[Run]:
        """The oracle's rates with all seeds but the first; a guess has as many runs if the grid is not finished."""
        for multiple in each.multiples[1:] if self._has_oracle else ():
            tried = [found for run in _grid(each, multiple) if (found := self._find(each, run)) is not None]
            if not is_guess or len(tried) == len(FACTORS):
                factor = best_of(tried).factor
                runs = [dataclasses.replace(_grid(each, multiple)[0], factor=factor, seed=s) for s in self._seeds[1:]]
                yield from (run for run in runs if not is_guess or self._find(each, run) is None)
            else:
                yield from _grid(each, multiple)[:1] * (len(self._seeds) - 1)

    def _over_seeds(self, each: ApplicationData, multiple: int, rule: RunRule) -> list[Run]:
        return [Run(application=each.application, multiple=multiple, rule=rule, seed=seed) for seed in self._seeds]

    def _rows(self, each: ApplicationData) -> Iterator[Row]:
        def results(runs: Iterable[Run]) -> list[RunResult]:
            return [self.results[run.key(each.digest)] for run in runs]

        baseline = make_row("baseline", results(self._over_seeds(each, 1, "baseline")), baseline=None)
        yield baseline
        for multiple in each.multiples:
            for rule in self._rules if multiple > 1 else [rule for rule in self._rules if rule == "lamb"]:
                yield make_row(rule, results(self._over_seeds(each, multiple, rule)), baseline=baseline)
            if self._has_oracle and multiple > 1:
                tried = results(_grid(each, multiple))
                others = results(run for run in self._oracle_runs(each) if run.multiple == multiple)
                yield make_row("oracle", [best_of(tried), *others], baseline=baseline, cost=[*tried, *others])

    def _find(self, each: ApplicationData, run: Run) -> RunResult | None:
        """The result of a run, if it is finished; looked up on disk once."""
        key = run.key(each.digest)
        if key not in self._looked_up and not self._settings.fresh:
            self._looked_up.add(key)
            try:
                found = load_result(run, key=key, folder=self._settings.out / RESULTS)
            except StrettoError as error:
                self._tell(str(error))
            else:
                self.results |= {} if found is None else {key: found}
        return self.results.get(key)

    def _make(self, runs: Sequence[tuple[ApplicationData, Run]]) -> None:
        jobs, owners = dict[str, Job](), dict[str, ApplicationData]()
        for each, run in runs:
            key = run.key(each.digest)
            folder = self._settings.out / IN_PROGRESS / key
            if self._settings.fresh and key not in jobs:
                shutil.rmtree(folder, ignore_errors=True)
            jobs[key], owners[key] = Job(run=run, key=key, folder=folder), each
        try:
            for job, result in self._execute(list(jobs.values()), owners):
                save_result(job.run, result, folder=self._settings.out / RESULTS, data=owners[job.key].data.name)
                self.results[job.key] = result
                self._tell(self._progress.finish(job.run, result))
        except (Interrupted, KeyboardInterrupt):
            self._tell(STOPPED)
            raise KeyboardInterrupt from None

    def _execute(self, jobs: Sequence[Job], owners: dict[str, ApplicationData]) -> Iterator[tuple[Job, RunResult]]:
        if self._settings.num_jobs == 1 or not jobs:
            for job in jobs:
                yield job, execute(job.run, owners[job.key].data, key=job.key, folder=job.folder)
            return
        count, threads = self._settings.num_jobs, torch.get_num_threads()
        with WorkerPool(self._settings.data, num_processes=count, threads=threads) as pool:
            yield from pool.map(jobs)


def _grid(each: ApplicationData, multiple: int) -> list[Run]:
    """The oracle's rates at one batch, with the first seed."""
    return [Run(application=each.application, multiple=multiple, rule="sqrt", factor=f, seed=0) for f in FACTORS]


@final
class Progress:
    """Counts runs and estimates the time left.

    Until a run of an application at a batch has finished, its time is the one in the table of applications, times what
    other batches of the application took compared to that table.
    """

    def __init__(self, num_jobs: int) -> None:
        self._num_jobs = num_jobs
        self.done = 0
        self._left: list[Run] = []
        self._seconds: dict[tuple[str, int], list[float]] = {}
        self._ratios: dict[str, list[float]] = {}

    @property
    def left(self) -> int:
        """Runs to be made, at most."""
        return len(self._left)

    @property
    def seconds_left(self) -> float:
        """About."""
        return sum(map(self._estimate, self._left)) / self._num_jobs

    def plan(self, runs: Iterable[Run]) -> None:
        """Set the runs to be made."""
        self._left = list(runs)

    def outlook(self, folder: Path) -> str:
        """A line before the first run."""
        if not self.left:
            return "there is nothing left to run"
        return (
            f"up to {self.left} runs to make, about {duration(self.seconds_left)} on a machine like the one that the "
            f"estimate comes from; finished runs are kept in {folder}"
        )

    def finish(self, run: Run, result: RunResult) -> str:
        """Note a finished run; returns a line about it."""
        self.done += 1
        place = (run.application.name, run.multiple)
        match = next((each for each in self._left if (each.application.name, each.multiple) == place), None)
        if match is not None:
            self._left.remove(match)
        self._seconds.setdefault(place, []).append(result.wall_seconds)
        expected = run.application.expected_seconds(run.multiple)
        self._ratios.setdefault(run.application.name, []).append(result.wall_seconds / expected)
        if result.valid is None or result.test is None:
            outcome = f"diverged after {result.updates:,} updates"
        else:
            metric = METRICS[run.application.name]
            values = f"{metric.unit} {metric.format(result.test)} (validation {metric.format(result.valid)})"
            outcome = f"{values}, {result.updates:,} updates"
        left = f"{self.left} left, about {duration(self.seconds_left)}" if self.left else "that was the last"
        return f"{run}: {outcome}, {duration(result.wall_seconds)}; {left}"

    def _estimate(self, run: Run) -> float:
        known = self._seconds.get((run.application.name, run.multiple))
        if known:
            return statistics.fmean(known)
        ratio = statistics.median(self._ratios.get(run.application.name, [1.0]))
        return run.application.expected_seconds(run.multiple) * ratio


def best_of(results: Sequence[RunResult]) -> RunResult:
    """The run with the best value on the validation part; the first one if all diverged."""
    best = results[0]
    metric = METRICS[best.application]  # type: ignore[index]
    for result in results:
        if result.valid is not None and (best.valid is None or metric.is_better(result.valid, best.valid)):
            best = result
    return best


def make_row(
    rule: RowRule, results: Sequence[RunResult], *, baseline: Row | None, cost: Sequence[RunResult] | None = None
) -> Row:
    """Put the runs of one rule at one batch together.

    Args:
        rule: Its name.
        results: One run per seed.
        baseline: To compare with; None if this is it.
        cost: All runs that it took, if there were others.
    """
    first, spent = results[0], results if cost is None else cost
    application: ApplicationName = first.application  # type: ignore[assignment]
    diverged = sum(result.diverged for result in results)
    valid, test = ([getattr(r, part) for r in results if not r.diverged] for part in ("valid", "test"))
    mean = None if diverged else statistics.fmean(test)
    reference = mean if baseline is None else baseline.test
    is_within = mean is not None and reference is not None and METRICS[application].is_within(mean, reference)
    return Row(
        application=application,
        rule=rule,
        multiple=first.multiple,
        batch_size=first.batch_size,
        learning_rate=first.learning_rate,
        warmup_epochs=first.warmup_epochs,
        runs=len(results),
        diverged=diverged,
        valid=None if diverged else statistics.fmean(valid),
        valid_deviation=0.0 if diverged else _deviation(valid),
        test=mean,
        test_deviation=0.0 if diverged else _deviation(test),
        epochs=statistics.fmean(result.epochs for result in results),
        updates=statistics.fmean(result.updates for result in results),
        seconds=statistics.median(result.seconds for result in results),
        is_within=None if reference is None else is_within,
        cost_runs=len(spent),
        cost_updates=sum(result.updates for result in spent),
        cost_seconds=sum(result.seconds for result in spent),
    )


def _deviation(values: Sequence[float]) -> float:
    """Of a sample. Scaled, because squares of perplexities may overflow."""
    mean = statistics.fmean(values)
    largest = max(abs(value - mean) for value in values)
    if len(values) < 2 or largest == 0 or not math.isfinite(largest):
        return 0.0
    scaled = math.fsum(((value - mean) / largest) ** 2 for value in values)
    return largest * math.sqrt(scaled / (len(values) - 1))


def find_holdings(rows: Sequence[Row]) -> Iterator[Holding]:
    """How far each rule holds, by application."""
    for baseline in (row for row in rows if row.rule == "baseline"):
        for rule in RULES:
            own = [row for row in rows if (row.application, row.rule) == (baseline.application, rule)]
            own = sorted((row for row in own if row.multiple > 1), key=lambda row: row.multiple)
            if own:
                yield _find_holding(rule, own, baseline)


def _find_holding(rule: RuleName, rows: Sequence[Row], baseline: Row) -> Holding:
    failing = next((row for row in rows if not row.is_within), None)
    holds_to = max((row.multiple for row in rows if failing is None or row.multiple < failing.multiple), default=1)
    if baseline.test is None:
        says = "the baseline diverged, so there is nothing to compare with"
    elif failing is None:
        says = f"holds up to x{holds_to}, the largest batch that was run"
    else:
        far = f"holds up to x{holds_to}" if holds_to > 1 else "does not hold at any batch"
        how = f"{failing.diverged} of {failing.runs} runs diverged"
        if failing.test is not None:
            gap = METRICS[baseline.application].describe(failing.test, baseline.test)
            how = f"{gap}, with {failing.updates:,.0f} updates"
        again = [f"x{row.multiple}" for row in rows if row.multiple > failing.multiple and row.is_within]
        says = f"{far}; at x{failing.multiple}: {how}" + (f"; within again at {', '.join(again)}" if again else "")
    return Holding(
        application=baseline.application,
        rule=rule,
        holds_to=holds_to,
        tried=rows[-1].multiple,
        fails_at=None if failing is None else failing.multiple,
        says=says,
    )


@experiment("large-batch", title="Large batches without re-tuning")
def run(settings: LargeBatchSettings, report: Report) -> None:
    """Five applications at up to 64 times the batch, by rule or tuned at every batch (You et al. 2019)."""
    show(reproduce_large_batch(settings, tell=report.progress), report)


def show(result: LargeBatchResult, report: Report) -> None:
    """Write tables and figure into a report."""
    report.result = to_dict(result)
    report.attach("csv", to_csv(result.runs))
    multiples = sorted({k for facts in result.applications.values() for k in (*facts["multiples"], *facts["left_out"])})
    report.add(
        Table(
            title=f"Large batches: {len(result.runs)} runs, {result.rows[0].runs} seeds",
            columns=("application", "metric", "rule", *(f"x{multiple}" for multiple in multiples)),
            rows=[
                (name, METRICS[name].unit, rule, *(_cell(result.row_at(name, rule, k)) for k in multiples))
                for name in result.applications
                for rule in result.rules_of(name)
            ],
            caption="Mean of the test metric over seeds and its standard deviation, after the last epoch. Columns: the "
            "batch in multiples of the baseline's, with the same number of epochs at all of them. x1 is the baseline, "
            "which all rules but lamb share. *: no worse than the baseline by more than 1 point, or 3 % of a "
            "perplexity; -: not run.\n"
            "Rates are those of the baseline's batch; only the rule changes them. With the same seed, all rules of an "
            "application begin with the same weights. The validation part alone chose the oracle's rate. Sequences are "
            "not bucketed by length, so every batch but the last of an epoch has the size that rules count with. In "
            "language-model the batch is the number of parallel streams.",
        )
    )
    report.note(f"{result.reused} of {len(result.runs)} runs were finished before and reused")
    for name, facts in result.applications.items():
        for multiple, why in facts["left_out"].items():
            report.note(f"left out: {name} x{multiple}: {why}")
    for rule, meaning in RULES.items():
        report.note(f"{rule}: {meaning}")
    holdings = sorted(result.holdings, key=lambda holding: holding.rule != "legw")
    report.add(
        Table(
            title="Where LEGW stops holding",
            columns=("application", "legw"),
            rows=[(holding.application, holding.says) for holding in holdings if holding.rule == "legw"],
        )
    )
    _show_details(result, report, holdings)
    panels = [_panel(result, name) for name in result.applications]
    caption = "Shaded: as good as the baseline. Bars: standard deviation over seeds."
    report.plot(draw_figure(panels, cross="diverged, or off the scale"), title="Quality and batch", caption=caption)


def _show_details(result: LargeBatchResult, report: Report, holdings: Sequence[Holding]) -> None:
    def add(title: str, records: Sequence[Any], names: str, caption: str = "") -> None:
        values = [record if isinstance(record, dict) else to_dict(record) for record in records]
        rows = [[value[name] for name in names.split()] for value in values]
        columns = [name.replace("_", " ") for name in names.split()]
        report.add_detail(Table(title=title, columns=columns, rows=rows, caption=caption))

    add("Where rules stop holding", holdings, "rule application says")
    diverged = [run for run in result.runs if run.diverged]
    add("Runs that diverged", diverged, "application multiple rule learning_rate seed updates why")
    add(
        "Updates, epochs and time",
        result.rows,
        "application batch_size rule learning_rate warmup_epochs valid epochs updates seconds",
        "Seconds: of a run's updates, the median. Several runs were made at a time, and the first of a net may have "
        "compiled its kernels, so no ratio of them is given.",
    )
    add(
        "What tuning the rate costs",
        [row for row in result.rows if row.rule == "oracle"],
        "application multiple learning_rate cost_runs cost_updates cost_seconds",
        f"With the first seed, {', '.join(f'{factor:g}' for factor in FACTORS)} times the rate of sqrt; the best on "
        "the validation part is run with the other seeds. A rule takes one run per seed.",
    )
    add(
        "Settings of the baselines",
        [
            facts | {"settings": str(facts["settings"]), "notes": "; ".join(facts["notes"])}
            for facts in result.applications.values()
        ],
        "name data notes num_train num_test batch_size learning_rate lamb_rate warmup_epochs epochs optimizer schedule "
        "settings",
    )


def _cell(row: Row | None) -> str | None:
    if row is None:
        return None
    if row.test is None:
        return "diverged" if row.diverged == row.runs else f"{row.diverged} of {row.runs} diverged"
    metric = METRICS[row.application]
    deviation = "" if row.runs == 1 else f" ± {metric.format(row.test_deviation)}"
    return f"{'* ' if row.is_within else ''}{metric.format(row.test)}{deviation}"


def _panel(result: LargeBatchResult, application: ApplicationName) -> Panel:
    metric, facts = METRICS[application], result.applications[application]
    worst = math.inf if metric.better == "lower" else -math.inf
    lines = []
    for rule in result.rules_of(application):
        rows = [row for k in facts["multiples"] if (row := result.row_at(application, rule, k)) is not None]
        lines.append(
            Line(
                name=rule,
                colour=COLOURS[rule],
                xs=[f"{row.batch_size:,}" for row in rows],
                ys=[worst if row.test is None else metric.scale * row.test for row in rows],
                deviations=[metric.scale * row.test_deviation for row in rows],
            )
        )
    baseline = result.row_at(application, "baseline", 1)
    base = None if baseline is None or baseline.test is None else metric.scale * baseline.test
    limit = MAX_PERPLEXITY_RATIO * base if metric.is_relative and base is not None else math.inf
    values = [y for line in lines for y in line.ys if y is not None and math.isfinite(y) and y <= limit] or [0.0]
    room = 0.05 * (max(values) - min(values)) or 1.0
    band = None
    if base is not None:
        tolerance = base * metric.tolerance if metric.is_relative else metric.tolerance
        band = (base, base + tolerance) if metric.better == "lower" else (base - tolerance, base)
    y_range = (min(values) - room, max(values) + room)
    return Panel(title=application, x="batch", y=f"test {metric.unit}", lines=lines, y_range=y_range, band=band)
