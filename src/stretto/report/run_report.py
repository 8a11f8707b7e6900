"""The page of one run, from its record of events."""

import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from stretto.errors import StrettoError
from stretto.files import write_text_atomically
from stretto.report import figures
from stretto.report.batch_panel import batch_html
from stretto.report.lengths_figure import lengths_figure
from stretto.report.page import (
    BigNumber,
    Html,
    Section,
    bullets,
    columns,
    duration,
    escaped,
    facts,
    grid,
    headline,
    joined,
    page,
    paragraph,
    sentence,
)
from stretto.report.record import RunRecord
from stretto.report.samples import samples_html
from stretto.report.solver_panel import solver_html
from stretto.report.workers import workers_html

PAGE_NAME: Final = "report.html"
BATCH_FACTS: Final = {
    "num_buckets": "buckets",
    "batches": "batches an epoch",
    "shapes": "distinct shapes",
    "largest_batch": "largest batch, in slots",
    "most_rows": "most sequences in a batch",
}


def write_run_report(run: Path, out: Path | None = None) -> Path:
    """Write the page of a run: one HTML file that needs nothing else.

    A run that is not finished, was interrupted or has no step yet gets a page of what there is.

    Args:
        run: The run folder, which holds `events.jsonl`.
        out: The page; None is `report.html` in the run folder.

    Returns:
        Where the page is.

    Raises:
        StrettoError: The folder holds no record of a run, or one that does not make sense.
    """
    try:
        text = _page(RunRecord.read(run), run=run)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, StrettoError):
            raise
        raise StrettoError(
            f"the record of the run in {str(run)!r} has an event of another form ({error!r})",
            fix="Make the page with the version of Stretto that trained the run.",
        ) from error
    path = run / PAGE_NAME if out is None else out
    write_text_atomically(path, text)
    return path


def _page(record: RunRecord, *, run: Path) -> str:
    data = record.started.get("data") or {}
    title = f"{record.started['task']} on {data.get('name', 'unknown data')}" if record.started else "Training run"
    return page(
        title=title,
        subtitle=_subtitle(record),
        top=[_state(record), headline(_numbers(record))],
        sections=_sections(record),
        footer=f"Run folder: {run}",
    )


def _sections(record: RunRecord) -> Iterator[Section]:
    yield Section(title="Training", body=_training(record))
    yield Section(title="Batches", body=_batches(record))
    sized = batch_html(record)
    if sized is not None:
        yield Section(title="Batch size", body=sized)
    solved = solver_html(record)
    if solved is not None:
        yield Section(title="Parallel in time", body=solved)
    if record.ranks:
        yield Section(title="Workers", body=workers_html(record.ranks))
    samples = samples_html(record.samples, metric=record.metric) if record.samples else None
    yield Section(title="Samples", body=samples or paragraph("No test sequence has been recorded with its output yet."))
    yield Section(title="Results", body=_results(record))
    yield Section(title="Notes and warnings", body=_notes(record))
    yield Section(title="Settings", body=_settings(record.started.get("settings")))
    yield Section(title="Data and versions", body=_origin(record))


def _subtitle(record: RunRecord) -> str:
    begun = record.started.get("time")
    when = dt.datetime.fromtimestamp(begun, tz=dt.timezone.utc) if begun is not None else None
    parameters = record.started.get("parameters")
    told = [
        f"started {when:%d %B %Y, %H:%M} UTC" if when else "",
        f"{parameters:,} parameters" if parameters is not None else "",
        f"{len(record.epochs)} {'epoch' if len(record.epochs) == 1 else 'epochs'} finished",
    ]
    return ", ".join(filter(None, told))


def _state(record: RunRecord) -> Html:
    last = (
        f"the last recorded step is {record.steps.step_S[-1]:,.0f}" if len(record.steps) else "no step is recorded yet"
    )
    told = {
        "finished": "Finished",
        "interrupted": f"Interrupted at step {record.interrupted_at or 0:,}: this page shows the run up to there",
        "unfinished": f"Not finished: {last}",
    }[record.state]
    kind = "state" if record.state == "finished" else "state open"
    return Html(f'<p class="{kind}">{escaped(told)}</p>')


def _numbers(record: RunRecord) -> Iterator[BigNumber]:
    finished, started, epochs = record.finished, record.started, record.epochs
    tested = (finished.get("metrics") or {}).get(record.metric)
    name = figures.metric_name(record.metric)
    if tested is not None:
        yield BigNumber(label=sentence(name), value=_metric(record.metric, tested), detail="on the test sequences")
    elif epochs:
        detail = f"on the validation sequences, after epoch {epochs[-1]['epoch']}"
        yield BigNumber(label=sentence(name), value=_metric(record.metric, epochs[-1]["value"]), detail=detail)
    seconds = finished.get("seconds")
    if seconds is None and len(record.steps):
        seconds = float(record.steps.seconds_S[-1])
    if seconds is not None:
        steps = f"{record.steps.step_S[-1]:,.0f} training steps" if len(record.steps) else ""
        yield BigNumber(label="Time", value=duration(seconds), detail=steps)
    speed = finished.get("steps_per_second", epochs[-1].get("steps_per_second") if epochs else None)
    if speed is not None:
        detail = "real steps of the sequences; padding does not count"
        yield BigNumber(label="Steps a second", value=f"{speed:,.0f}", detail=detail)
    yield from _padding_numbers(record)
    ratio = started.get("slot_ratio")
    if ratio is not None:
        value = f"{ratio:.1f}x fewer" if ratio >= 1 else f"{1 / ratio:.1f}x more"
        yield BigNumber(label="Slots saved", value=value, detail="than shuffled batches would need")


def _padding_numbers(record: RunRecord) -> Iterator[BigNumber]:
    padding, detail = record.finished.get("padding"), ""
    if padding is None and len(record.steps):
        padding = record.steps.padding
    if padding is None:
        padding, detail = (record.started.get("report") or {}).get("padding"), "planned; "
    shuffled = record.started.get("shuffled_padding")
    if padding is not None:
        detail += f"shuffled batches: {shuffled:.1%}" if shuffled is not None else "of all slots"
        yield BigNumber(label="Padding", value=f"{padding:.1%}", detail=detail)


def _training(record: RunRecord) -> Html:
    parts = []
    if len(record.steps) or record.epochs:
        parts.append(figures.loss_figure(record))
    if record.epochs:
        parts.append(figures.metric_figure(record))
    if len(record.steps) and (record.steps.took_S == record.steps.took_S).any():
        parts.append(figures.time_figure(record))
    return grid(parts) if parts else paragraph("No training step has been recorded yet.")


def _batches(record: RunRecord) -> Html:
    parts = []
    histogram = record.started.get("histogram")
    if histogram:
        parts.append(
            lengths_figure(
                bounds=histogram["bounds"], counts=histogram["counts"], edges=record.edges, whose="training sequences"
            )
        )
    if len(record.steps):
        parts += [figures.padding_figure(record), figures.shapes_figure(record)]
    report = record.started.get("report") or {}
    rows = [(name, _number(report[key])) for key, name in BATCH_FACTS.items() if key in report]
    if report.get("straggler", 1) != 1:
        rows.append(("straggler factor", _number(report["straggler"])))
    plan = [facts(rows)] if rows else []
    return joined([grid(parts), *plan]) if parts or plan else paragraph("No batch has been recorded yet.")


def _results(record: RunRecord) -> Html:
    parts = []
    metrics = record.finished.get("metrics") or {}
    if metrics:
        parts.append(paragraph("On the test sequences, at the end:"))
        parts.append(facts((figures.metric_name(name), _metric(name, value)) for name, value in metrics.items()))
    if record.epochs:
        header = ["epoch", "step", "train loss", "valid loss", figures.metric_name(record.metric), "seconds", "padding"]
        rows = [
            [
                epoch["epoch"],
                _number(epoch["step"]),
                _number(epoch.get("train_loss")),
                _number(epoch.get("valid_loss")),
                _metric(record.metric, epoch.get("value")),
                _number(epoch.get("seconds")),
                _metric("padding", epoch.get("padding")),
            ]
            for epoch in record.epochs
        ]
        parts += [paragraph("After each epoch, on the validation sequences:"), columns(header, rows)]
    return joined(parts) if parts else paragraph("No epoch is finished yet.")


def _notes(record: RunRecord) -> Html:
    lines = [*((record.started.get("data") or {}).get("notes") or [])]
    lines += [f"Warning: {message}" for message in record.warnings]
    lines += [f"Resumed at step {step:,}." for step in record.resumed_at]
    if record.interrupted_at is not None:
        lines.append(f"Interrupted at step {record.interrupted_at:,}.")
    if record.checkpoints:
        last = record.checkpoints[-1]
        lines.append(
            f"{len(record.checkpoints):,} checkpoints saved; the last, at step {last['step']:,}, is {last['path']}."
        )
    return bullets(lines) if lines else paragraph("None.")


def _origin(record: RunRecord) -> Html:
    data = record.started.get("data") or {}
    rows: list[tuple[str, Any]] = [(f"{part} sequences", num) for part, num in (data.get("sequences") or {}).items()]
    rows += [(name, data[key]) for key, name in (("steps", "steps in all"), ("features", "features")) if key in data]
    rows += [(key, record.started[key]) for key in ("parameters", "threads") if key in record.started]
    shown = [(name, _number(value)) for name, value in rows]
    shown += [(name, str(version)) for name, version in (record.started.get("versions") or {}).items()]
    return facts(shown) if shown else paragraph("Not recorded.")


def _settings(settings: dict[str, Any] | None) -> Html:
    if not settings:
        return paragraph("Not recorded.")
    return facts(
        (name, value if isinstance(value, str) else "not set" if value is None else json.dumps(value))
        for name, value in settings.items()
    )


def _metric(name: str, value: float | None) -> str:
    if value is None:
        return "not known"
    return f"{value:.2%}" if figures.is_share(name) else _number(value)


def _number(value: Any) -> str:
    if value is None:
        return "not known"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:#,.4g}".rstrip(".")
