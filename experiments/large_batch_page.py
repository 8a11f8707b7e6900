"""The experiment with large batches as a page with plots."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from experiments.large_batch import FACTORS, LargeBatchResult
from experiments.large_batch_courses import ApplicationTold
from experiments.large_batch_figure import COLOURS, Panel, panel_of
from experiments.large_batch_measures import MEASURES
from experiments.large_batch_rows import Row, baseline_of
from experiments.large_batch_settings import RULES, ApplicationName
from experiments.large_batch_table import (
    MEANING,
    all_multiples,
    cell_text,
    holding_lines,
    row_at,
    rule_lines,
    rules_of,
    title,
)
from stretto.extras import optional
from stretto.files import write_text_atomically
from stretto.report import (
    BigNumber,
    Html,
    Section,
    bullets,
    columns,
    facts,
    figure,
    grid,
    headline,
    joined,
    page,
    paragraph,
    plot,
)

NOT_COMPARED: Final = (
    "Runs were made one after another, on a machine that may have had other work to do, and the first run of each net "
    "may have built its kernels. Their seconds tell about how long such a run takes; they are not compared with each "
    "other, and no ratio of them is given."
)

TUNING: Final = (
    "Rates of the small baselines, and of LAMB, were chosen alike: the best on the validation part of five or six, "
    "each twice the one before, with seed 0 on the embedded data. "
    "Rates of full size are published ones or defaults of the tasks; those of LAMB there are guesses. "
    "With other data the same rates are used."
)


def write_large_batch_page(result: LargeBatchResult, path: Path) -> None:
    """Tables and plots on one self-contained page."""
    names = [application.name for application in result.applications]
    text = page(
        title="Large batches without re-tuning",
        subtitle=f"{title(result)}; {result.machine}, threads: {result.threads}",
        top=[headline(_numbers(result))],
        sections=[
            Section(title="Quality against the batch", body=grid(_plot(result, name) for name in names)),
            Section(title="All rules", body=joined([*(_table(result, name) for name in names), paragraph(MEANING)])),
            Section(title="Where rules stop holding", body=_holdings(result)),
            Section(title="What failed, and what was left out", body=_failures(result)),
            Section(title="What a rate tuned anew costs", body=_costs(result)),
            Section(title="Updates, epochs and time", body=_times(result)),
            Section(title="Settings", body=joined(_settings(application) for application in result.applications)),
            Section(title="How it was measured", body=_measured(result)),
        ],
        footer="Made by stretto reproduce large-batch, after You et al. (2019).",
    )
    write_text_atomically(path, text)


def _numbers(result: LargeBatchResult) -> Iterator[BigNumber]:
    """How far LEGW holds, an application a number."""
    for holding in result.holdings:
        if holding.rule == "legw":
            yield BigNumber(
                label=f"LEGW, {holding.application}",
                value=f"x{holding.holds_to}" if holding.holds_to > 1 else "none",
                detail=f"largest batch as good as the baseline; tried up to x{holding.tried}",
            )


def _plot(result: LargeBatchResult, application: ApplicationName) -> Html:
    panel, measure = panel_of(result, application), MEASURES[application]
    draw = optional("plotly.graph_objects").Scatter
    traces = [_trace(result, panel, rule, draw) for rule in panel.lines]
    drawn = plot(
        traces,
        name=f"quality-{application}",
        x={"title": "batch", "type": "category"},
        y={"title": f"test {measure.unit}", "range": [panel.low, panel.high]},
        height=340,
        shapes=[] if panel.band is None else [_band(panel.band)],
    )
    bad = [f"{rule} at {panel.batches[at]:,}" for rule, places in panel.diverged.items() for at in places]
    caption = f"Shaded: worse than the baseline by up to {measure.allowed}. Bars: standard deviation over seeds."
    if bad:
        caption += f" Not drawn, for runs diverged: {', '.join(bad)}."
    off = any(value is not None and value > panel.high for line in panel.lines.values() for value in line)
    return figure(drawn, title=application, caption=f"{caption} Some values are off the scale." if off else caption)


def _trace(result: LargeBatchResult, panel: Panel, rule: str, draw: Any) -> Any:
    measure = MEASURES[panel.application]
    multiples = next(told.multiples for told in result.applications if told.name == panel.application)
    rows = [row_at(result, panel.application, rule, multiple) for multiple in multiples]
    return draw(
        x=[f"{batch:,}" for batch in panel.batches],
        y=list(panel.lines[rule]),
        error_y={"type": "data", "array": [0 if row is None else measure.scale * row.test_deviation for row in rows]},
        name=rule,
        mode="lines+markers",
        line={"color": COLOURS[rule], "width": 2},
    )


def _band(band: tuple[float, float]) -> dict[str, Any]:
    low, high = band
    place = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": low, "y1": high}
    return {**place, "fillcolor": "#e6f0ee", "line": {"width": 0}, "layer": "below"}


def _table(result: LargeBatchResult, application: ApplicationName) -> Html:
    multiples, baseline = all_multiples(result), baseline_of(result.rows, application)
    base = baseline.batch_size
    header = (
        f"{application}: {MEASURES[application].unit}",
        *(f"x{multiple}: {multiple * base:,}" for multiple in multiples),
    )
    rows = [
        (rule, *(cell_text(row_at(result, application, rule, multiple)) for multiple in multiples))
        for rule in rules_of(result, application)
    ]
    return columns(header, rows)


def _holdings(result: LargeBatchResult) -> Html:
    parts = []
    for rule in sorted(RULES, key=lambda rule: rule != "legw"):
        lines = list(holding_lines(result, rule))
        if lines:
            parts += [paragraph(f"{rule}:"), bullets(lines)]
    return joined(parts or [paragraph("No batch but the baseline's was run.")])


def _failures(result: LargeBatchResult) -> Html:
    bad = [
        f"{cell.application} x{cell.multiple} {cell.rule}, rate {cell.learning_rate:.3g}, seed {cell.seed}: "
        f"after {cell.updates:,} updates {cell.why}"
        for cell in result.cells
        if cell.diverged
    ]
    missed = [
        f"{row.application} x{row.multiple} {row.rule}: {_missed(row, baseline_of(result.rows, row.application))}"
        for row in result.rows
        if row.is_within is False and row.test is not None
    ]
    left = [f"{item.application} x{item.multiple}: {item.why}" for item in result.left_out]
    return joined(
        [
            paragraph("Runs that diverged:" if bad else "No run diverged."),
            bullets(bad),
            paragraph("Not as good as the baseline:" if missed else "All others are as good as the baseline."),
            bullets(missed),
            paragraph("Batches that were left out:" if left else "No batch was left out."),
            bullets(left),
        ]
    )


def _missed(row: Row, baseline: Row) -> str:
    assert row.test is not None
    assert baseline.test is not None
    measure = MEASURES[row.application]
    return f"{measure.said(row.test)} against {measure.shown(baseline.test)}, {measure.gap(row.test, baseline.test)}"


def _costs(result: LargeBatchResult) -> Html:
    header = ("application and batch", "rate found", "rate of sqrt", "runs", "updates of all", "seconds of all")
    found = []
    for row in result.rows:
        if row.rule == "oracle":
            base = baseline_of(result.rows, row.application)
            found.append(
                (
                    f"{row.application} x{row.multiple}",
                    f"{row.learning_rate:.3g}",
                    f"{base.learning_rate * row.multiple**0.5:.3g}",
                    row.cost_runs,
                    f"{row.cost_updates:,}",
                    f"{row.cost_seconds:.1f}",
                )
            )
    tried = ", ".join(f"{factor:g}" for factor in FACTORS)
    how = (
        f"With the first seed, {tried} times the rate of sqrt; the best on the validation part is run with the other "
        "seeds. All of these runs are counted; a rule takes one run a seed."
    )
    return joined([columns(header, found), paragraph(how)]) if found else paragraph("No rate was tuned anew.")


def _times(result: LargeBatchResult) -> Html:
    header = ("application, batch and rule", "rate", "warm-up, epochs", "validation", "epochs", "updates", "seconds")
    rows = (
        (
            f"{row.application} {row.batch_size:,} {row.rule}",
            f"{row.learning_rate:.3g}",
            f"{row.warmup_epochs:.2f}",
            "diverged" if row.valid is None else MEASURES[row.application].shown(row.valid),
            f"{row.epochs:g}",
            f"{row.updates:,.0f}",
            f"{row.seconds:.2f}",
        )
        for row in result.rows
    )
    return joined([columns(header, rows), paragraph(f"Seconds: of a run's updates, the median. {NOT_COMPARED}")])


def _settings(application: ApplicationTold) -> Html:
    chosen = application.settings
    values = [
        ("application", application.name),
        ("data", f"{application.data}: {application.num_train:,} to train on, {application.num_test:,} to test on"),
        *((f"{name}".replace("_", " "), chosen[name]) for name in SHOWN),
        ("all else", ", ".join(f"{name}={value}" for name, value in chosen["settings"].items())),
        *(("note", note) for note in application.notes),
    ]
    return facts(values)


SHOWN: Final = (
    "batch_size",
    "learning_rate",
    "lamb_rate",
    "warmup_epochs",
    "warmup_cap",
    "epochs",
    "optimizer",
    "schedule",
)


def _measured(result: LargeBatchResult) -> Html:
    same = (
        "Rates are those of the baseline's batch; nothing but the rule changes them. With the same seed, all rules of "
        "an application begin with the same weights. Epochs are the same at every batch, so that a batch k times as "
        "large has k times fewer updates. Quality is that after the last epoch, on the test part; the validation part "
        "alone chose the oracle's rate."
    )
    batches = (
        "Sequences are not put in buckets by length here, so that every batch but the last of an epoch has the size "
        "that rules count with. In language-model the batch is the number of streams that are read side by side."
    )
    reused = f"{result.reused} of {len(result.cells)} runs were finished before and taken as they were."
    return joined(
        [
            paragraph(same),
            paragraph(TUNING),
            paragraph(batches),
            bullets(rule_lines()),
            paragraph(f"{NOT_COMPARED} {reused}"),
        ]
    )
