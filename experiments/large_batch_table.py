"""The experiment with large batches as a table for the terminal, and the words that the page shares with it."""

from collections.abc import Iterator
from typing import Final

from rich import box
from rich.table import Table
from rich.text import Text

from experiments.large_batch import LargeBatchResult
from experiments.large_batch_applications import WARMUP_CAP
from experiments.large_batch_measures import MEASURES
from experiments.large_batch_rows import BASELINE, Row, RowRule
from experiments.large_batch_settings import RULES, ApplicationName, RuleName

WITHIN: Final = "*"
NOT_RUN: Final = "-"
MEANING: Final = (
    "mean of the test metric over seeds and its standard deviation; columns: the batch in multiples of the baseline's, "
    "the same number of epochs in all of them. x1 is the baseline, which all rules but lamb share. "
    f"{WITHIN}: no worse than the baseline by more than 1 point, or 3 % of a perplexity; {NOT_RUN}: not run"
)


def large_batch_table(result: LargeBatchResult) -> Table:
    """Applications one below the other: a row a rule, a column a multiple."""
    multiples = all_multiples(result)
    table = Table(
        title=Text(title(result)),
        title_justify="left",
        caption=Text(MEANING),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("application", no_wrap=True)
    table.add_column("rule", no_wrap=True)
    for multiple in multiples:
        table.add_column(f"x{multiple}", justify="right", no_wrap=True)
    for application in result.applications:
        rules = rules_of(result, application.name)
        heading = f"{application.name} ({MEASURES[application.name].unit})"
        for number, rule in enumerate(rules):
            cells = [cell_text(row_at(result, application.name, rule, multiple)) for multiple in multiples]
            words = [heading if number == 0 else "", rule, *cells]
            table.add_row(*map(Text, words), end_section=number + 1 == len(rules))
    return table


def title(result: LargeBatchResult) -> str:
    """What was run."""
    runs = len(result.cells)
    how = "tiny" if result.settings["quick"] else "full size" if result.settings["full"] else "miniature"
    names = ", ".join(application.name for application in result.applications)
    seeds = result.rows[0].runs
    return f"Large batches, {how}: {names}; {runs} runs, {seeds} seed{'s' if seeds > 1 else ''} each"


def all_multiples(result: LargeBatchResult) -> list[int]:
    """Of any application, run or left out."""
    run = {multiple for application in result.applications for multiple in application.multiples}
    return sorted(run | {item.multiple for item in result.left_out})


def rules_of(result: LargeBatchResult, application: ApplicationName) -> list[RowRule]:
    """Those that have rows, in the usual order; and the baseline, if no other row would show it."""
    there = {row.rule for row in result.of(application)}
    found: list[RowRule] = [rule for rule in RULES if rule in there]
    return found if any(rule != "lamb" for rule in found) else ["baseline", *found]


def row_at(result: LargeBatchResult, application: ApplicationName, rule: str, multiple: int) -> Row | None:
    """The row of a rule at a batch; at the baseline's batch that is the baseline, for all rules but lamb."""
    wanted = BASELINE if multiple == 1 and rule != "lamb" else rule
    return next((row for row in result.of(application) if row.rule == wanted and row.multiple == multiple), None)


def cell_text(row: Row | None) -> str:
    """Mark, mean and deviation, or what happened instead."""
    if row is None:
        return NOT_RUN
    if row.test is None:
        return "diverged" if row.diverged == row.runs else f"{row.diverged} of {row.runs} diverged"
    measure = MEASURES[row.application]
    spread = "" if row.runs == 1 else f" ± {measure.shown(row.test_deviation)}"
    return f"{f'{WITHIN} ' if row.is_within else ''}{measure.shown(row.test)}{spread}"


def holding_lines(result: LargeBatchResult, rule: RuleName) -> Iterator[str]:
    """Where a rule stops holding, an application a line."""
    for holding in result.holdings:
        if holding.rule == rule:
            yield f"{holding.application}: {holding.says}"


def rule_lines() -> Iterator[str]:
    """What each rule is."""
    for rule, meaning in RULES.items():
        cap = f" ({WARMUP_CAP:.0%})" if rule == "legw" else ""
        yield f"{rule}: {meaning}{cap}."
