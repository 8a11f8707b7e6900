"""The large-batch experiment: five applications, ever larger batches, and rules that adapt settings tuned once.

After You et al., "Large-batch training for LSTM and beyond" (SC19), who let the batch of four applications grow up to
64-fold with LEGW and report that nothing is lost and nothing needs tuning. Here it is compared with other rules and
with a rate that is tuned for every batch. The number of epochs is the same at every batch, so updates fall as the batch
grows. Failures are rows like any others.

In the order of this file:

    LargeBatchSettings      what to run
    reproduce_large_batch   opens applications, makes their runs, and puts them together
      runs of each rule     one per seed; the oracle first tries its grid of rates with one seed
      rows                  one rule at one batch, over seeds
      holdings              up to which batch a rule is as good as the baseline
    show                    tables and figure

`large_batch_apps` has the applications, `large_batch_runs` one run of one of them, and `large_batch_pool` makes many.
"""

import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, final, get_args

from pydantic import Field

from bench.figure import AMBER, BLUE, GREY, TEAL, Line, Panel, draw_figure
from bench.harness import Report, Settings
from experiments.large_batch_apps import (
    METRICS,
    WARMUP_CAP,
    Application,
    ApplicationName,
    applications,
    open_data,
)
from experiments.large_batch_pool import Runner
from experiments.large_batch_runs import Run, RunResult, RunRule
from experiments.registry import experiment, to_csv, to_dict
from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.extras import optional
from stretto.files import locked
from stretto.large_batch import ScalingRule
from stretto.tasks import find_task
from stretto.timing import torch_threads
from stretto.training import Count

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargeBatchSettings(Settings):
    """Settings of `python -m experiments large-batch`.

    Attributes:
        data: A folder with data in subfolders: mnist, ptb, multi30k_en_de and iam, each used if it is there; by default
            embedded data.
        out: The folder for the page, the figure, the JSON and CSV files and, below it, the finished runs.
        applications: Which to run.
        multiples: Batches, in multiples of the baseline's, which is always run; by default those of the applications.
        rules: How settings scale with the batch; the oracle tunes the rate for every batch.
        seeds: Runs of each, with the seeds 0, 1 and so on; by default 3, and 1 if quick.
        threads: Cores per run; by default 1, and with full torch's default.
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

    @property
    def seed_range(self) -> range:
        """Of the runs of each rule."""
        return range(self.seeds or (1 if self.quick else NUM_SEEDS))

    def rules_at(self, multiple: int) -> list[RunRule]:
        """The rules to run at one batch, without the oracle; at the baseline's, all but lamb are the same."""
        rules: list[RunRule] = [rule for rule in dict.fromkeys(self.rules) if rule != "oracle"]
        return rules if multiple > 1 else ["baseline", *(rule for rule in rules if rule == "lamb")]

    def has_oracle_at(self, multiple: int) -> bool:
        """Whether to tune the rate at one batch; the baseline's is tuned already."""
        return "oracle" in self.rules and multiple > 1


# From settings to a result -------------------------------------------------------------------------------------------


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationData:
    """An application with its data and the batches that these allow."""

    application: Application
    data: SequenceSet
    digest: str  # of the data
    multiples: tuple[int, ...]  # the batches to run, from the baseline's
    left_out: dict[int, str]  # the others, and why

    def run(self, multiple: int, rule: RunRule, *, seed: int = 0, factor: float = 1.0) -> Run:
        """A run at one batch; the factor is on the rate of the rule."""
        return Run(
            application=self.application,
            data_digest=self.digest,
            multiple=multiple,
            rule=rule,
            factor=factor,
            seed=seed,
        )

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
    settings: LargeBatchSettings, *, progress: Callable[[str], None] = lambda _: None
) -> LargeBatchResult:
    """Run the experiment, or what is left of it.

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
                progress(f"{each.application.name} x{multiple} is left out: {why}")
        runner = Runner(
            settings.out,
            data={each.application.name: each.data for each in opened},
            data_folder=settings.data,
            num_jobs=settings.num_jobs,
            fresh=settings.fresh,
            progress=progress,
        )
        _make_runs(opened, settings, runner)
        rows = [row for each in opened for row in _make_rows(each, settings, runner)]
    return LargeBatchResult(
        applications={each.application.name: each.facts() for each in opened},
        rows=tuple(rows),
        holdings=tuple(find_holdings(rows)),
        runs=tuple(runner.finished.values()),
        reused=runner.num_reused,
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
    digest = data.digest()
    baseline = Run(application=application, data_digest=digest, multiple=1, rule="baseline", seed=0)
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
    return ApplicationData(application=application, data=data, digest=digest, multiples=multiples, left_out=left_out)


# The runs ------------------------------------------------------------------------------------------------------------


def _make_runs(opened: Sequence[ApplicationData], settings: LargeBatchSettings, runner: Runner) -> None:
    """Make all runs that are not finished yet, in two rounds.

    First every rule with every seed, and the oracle's grid with the first seed. That decides the oracle's rates, which
    are then run with the other seeds.
    """
    first = list[Run]()
    for each in opened:
        for multiple in each.multiples:
            for rule in settings.rules_at(multiple):
                first += [each.run(multiple, rule, seed=seed) for seed in settings.seed_range]
            if settings.has_oracle_at(multiple):
                first += oracle_grid(each, multiple)
    runner.make(runner.missing(first))
    second = [
        run
        for each in opened
        for multiple in each.multiples
        if settings.has_oracle_at(multiple)
        for run in oracle_runs(each, multiple, settings, runner)
    ]
    runner.make(runner.missing(second))


def oracle_grid(each: ApplicationData, multiple: int) -> list[Run]:
    """The oracle's rates at one batch, with the first seed."""
    return [each.run(multiple, "sqrt", factor=factor) for factor in FACTORS]


def oracle_runs(each: ApplicationData, multiple: int, settings: LargeBatchSettings, runner: Runner) -> list[Run]:
    """The best rate of the grid, which is finished, with all other seeds."""
    factor = best_of(runner.results(oracle_grid(each, multiple))).factor
    return [each.run(multiple, "sqrt", factor=factor, seed=seed) for seed in settings.seed_range[1:]]


def best_of(results: Sequence[RunResult]) -> RunResult:
    """The run with the best value on the validation part; the first one if all diverged."""
    best = results[0]
    metric = METRICS[best.application]  # type: ignore[index]
    for result in results:
        if result.valid is not None and (best.valid is None or metric.is_better(result.valid, best.valid)):
            best = result
    return best


# Rows, and where rules stop holding ----------------------------------------------------------------------------------


def _make_rows(each: ApplicationData, settings: LargeBatchSettings, runner: Runner) -> Iterator[Row]:
    """The rows of one application, the baseline first."""
    baseline: Row | None = None
    for multiple in each.multiples:
        for rule in settings.rules_at(multiple):
            results = runner.results(each.run(multiple, rule, seed=seed) for seed in settings.seed_range)
            row = make_row(rule, results, baseline=baseline)
            baseline = baseline or row
            yield row
        if settings.has_oracle_at(multiple):
            tried = runner.results(oracle_grid(each, multiple))
            others = runner.results(oracle_runs(each, multiple, settings, runner))
            yield make_row("oracle", [best_of(tried), *others], baseline=baseline, cost=[*tried, *others])


def make_row(
    rule: RowRule, results: Sequence[RunResult], *, baseline: Row | None, cost: Sequence[RunResult] | None = None
) -> Row:
    """Put the runs of one rule at one batch together, one per seed; `cost` are all that it took."""
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
    """Of a sample. By hypot, because squares of perplexities may overflow."""
    mean = statistics.fmean(values)
    return math.hypot(*(value - mean for value in values)) / math.sqrt(max(1, len(values) - 1))


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


# The report ----------------------------------------------------------------------------------------------------------


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


@experiment("large-batch", title="Large batches without re-tuning")
def run(settings: LargeBatchSettings, report: Report) -> None:
    """Five applications at up to 64 times the batch, by rule or tuned at every batch (You et al. 2019)."""
    show(reproduce_large_batch(settings, progress=report.progress), report)


def show(result: LargeBatchResult, report: Report) -> None:
    """Write tables and figure into a report."""
    report.result = to_dict(result)
    report.attach("csv", to_csv(result.runs))
    multiples = sorted({k for facts in result.applications.values() for k in (*facts["multiples"], *facts["left_out"])})
    report.table(
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
    report.note(f"{result.reused} of {len(result.runs)} runs were finished before and reused")
    for name, facts in result.applications.items():
        for multiple, why in facts["left_out"].items():
            report.note(f"left out: {name} x{multiple}: {why}")
    for rule, meaning in RULES.items():
        report.note(f"{rule}: {meaning}")
    holdings = sorted(result.holdings, key=lambda holding: holding.rule != "legw")
    report.table(
        title="Where LEGW stops holding",
        columns=("application", "legw"),
        rows=[(holding.application, holding.says) for holding in holdings if holding.rule == "legw"],
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
        report.table(
            title=title,
            columns=columns,
            rows=rows,
            caption=caption,
            is_detail=True,
        )

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
