"""Runs of the experiment with large batches put together: means over seeds, and how far each rule holds."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Final, Literal, final

from experiments.large_batch_cells import CellResult
from experiments.large_batch_measures import MEASURES
from experiments.large_batch_settings import RULES, ApplicationName, RuleName

BASELINE: Final = "baseline"
RowRule = Literal["baseline", "none", "linear", "sqrt", "legw", "lamb", "oracle"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rule at one batch, over seeds.

    Attributes:
        application: Which.
        rule: Which; the baseline's batch has the baseline, which all rules but lamb share, and lamb.
        multiple: The batch, in multiples of the baseline's.
        batch_size: The same in sequences or streams.
        learning_rate: The peak.
        warmup_epochs: Until the peak.
        runs: As many as seeds.
        diverged: How many of them did.
        valid: Mean of the metric on the validation part; None if any diverged.
        valid_deviation: Over seeds; 0 of one.
        test: Mean of the metric on the test part; None if any diverged.
        test_deviation: Over seeds; 0 of one.
        epochs: Of a run, the mean.
        updates: Of a run, the mean.
        seconds: Of the updates of a run, the median.
        is_within: Whether it is as good as the baseline, as `Measure` has it; None if the baseline diverged.
        cost_runs: Runs that it took to get there; more than `runs` where the rate was searched for.
        cost_updates: Of all of them.
        cost_seconds: Of all their updates.
    """

    application: ApplicationName
    rule: RowRule
    multiple: int
    batch_size: int
    learning_rate: float
    warmup_epochs: float
    runs: int
    diverged: int
    valid: float | None
    valid_deviation: float
    test: float | None
    test_deviation: float
    epochs: float
    updates: float
    seconds: float
    is_within: bool | None
    cost_runs: int
    cost_updates: int
    cost_seconds: float


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """How far one rule holds in one application.

    Attributes:
        application: Which.
        rule: Which.
        holds_to: The largest multiple such that the rule is as good as the baseline there and at all smaller ones that
            were run; 1 if there is none.
        tried: The largest multiple that was run.
        fails_at: The smallest multiple at which it is not; None if it holds throughout.
        says: The same as a sentence.
    """

    application: ApplicationName
    rule: RuleName
    holds_to: int
    tried: int
    fails_at: int | None
    says: str


def row_of(
    rule: RowRule, results: Sequence[CellResult], *, baseline: Row | None, cost: Sequence[CellResult] | None = None
) -> Row:
    """One row.

    Args:
        rule: Its rule.
        results: The runs, one a seed.
        baseline: To compare with; None if this is it.
        cost: All runs that it took, if there are others.
    """
    first, spent = results[0], results if cost is None else cost
    application: ApplicationName = first.application  # type: ignore[assignment]
    bad = sum(result.diverged for result in results)
    valid, test = ([getattr(r, part) for r in results if not r.diverged] for part in ("valid", "test"))
    mean = None if bad else statistics.fmean(test)
    return Row(
        application=application,
        rule=rule,
        multiple=first.multiple,
        batch_size=first.batch_size,
        learning_rate=first.learning_rate,
        warmup_epochs=first.warmup_epochs,
        runs=len(results),
        diverged=bad,
        valid=None if bad else statistics.fmean(valid),
        valid_deviation=0.0 if bad else _deviation(valid),
        test=mean,
        test_deviation=0.0 if bad else _deviation(test),
        epochs=statistics.fmean(result.epochs for result in results),
        updates=statistics.fmean(result.updates for result in results),
        seconds=statistics.median(result.seconds for result in results),
        is_within=_is_within(application, mean, mean if baseline is None else baseline.test),
        cost_runs=len(spent),
        cost_updates=sum(result.updates for result in spent),
        cost_seconds=sum(result.seconds for result in spent),
    )


def _is_within(application: ApplicationName, test: float | None, baseline: float | None) -> bool | None:
    if baseline is None:
        return None
    return test is not None and MEASURES[application].is_within(test, baseline)


def _deviation(values: Sequence[float]) -> float:
    """Of a sample; the squares of perplexities may be larger than any number."""
    mean = statistics.fmean(values)
    largest = max(abs(value - mean) for value in values)
    if len(values) < 2 or largest == 0 or not math.isfinite(largest):
        return 0.0
    scaled = math.fsum(((value - mean) / largest) ** 2 for value in values)
    return largest * math.sqrt(scaled / (len(values) - 1))


def baseline_of(rows: Sequence[Row], application: str) -> Row:
    """The row that the others of an application are compared with."""
    return next(row for row in rows if row.application == application and row.rule == BASELINE)


def best_of(results: Sequence[CellResult], application: ApplicationName) -> CellResult:
    """The run with the best value on the validation part; the first one, if all diverged."""
    best = results[0]
    for result in results:
        if result.valid is not None and (
            best.valid is None or MEASURES[application].is_better(result.valid, best.valid)
        ):
            best = result
    return best


def holdings(rows: Sequence[Row]) -> tuple[Holding, ...]:
    """How far each rule holds, application by application."""
    found = []
    for application in dict.fromkeys(row.application for row in rows):
        baseline = baseline_of(rows, application)
        for rule in RULES:
            own = [row for row in rows if row.application == application and row.rule == rule and row.multiple > 1]
            if own:
                found.append(_holding(rule, sorted(own, key=lambda row: row.multiple), baseline))
    return tuple(found)


def _holding(rule: RuleName, rows: Sequence[Row], baseline: Row) -> Holding:
    application, tried = baseline.application, rows[-1].multiple
    failing = next((row for row in rows if not row.is_within), None)
    held = [row.multiple for row in rows if failing is None or row.multiple < failing.multiple]
    holds_to = max(held, default=1)
    measure = MEASURES[application]
    if baseline.test is None:
        says = "the baseline diverged, so that there is nothing to compare with"
    elif failing is None:
        says = f"holds up to x{tried}, the largest batch that was run"
    else:
        far = f"holds up to x{holds_to}" if held else "does not hold at any batch"
        if failing.test is None:
            how = f"{failing.diverged} of {failing.runs} runs diverged"
        else:
            values = f"{measure.said(failing.test)} against {measure.shown(baseline.test)}"
            gap = measure.gap(failing.test, baseline.test)
            how = f"{values}, {gap}, with {failing.updates:,.0f} updates"
        again = [f"x{row.multiple}" for row in rows if row.multiple > failing.multiple and row.is_within]
        says = f"{far}; at x{failing.multiple}: {how}" + (f"; within again at {', '.join(again)}" if again else "")
    return Holding(
        application=application,
        rule=rule,
        holds_to=holds_to,
        tried=tried,
        fails_at=None if failing is None else failing.multiple,
        says=says,
    )
