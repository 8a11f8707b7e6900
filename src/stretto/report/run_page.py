"""The page of one run, from its record of events."""

import datetime as dt
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from stretto.errors import StrettoError
from stretto.files import check_ending, is_locked, write_text_atomically
from stretto.large_batch import RULES_HEADER
from stretto.report import figures
from stretto.report.confusion import confusion_html
from stretto.report.page import (
    PAGE_ENDINGS,
    Html,
    bullets,
    columns,
    duration,
    escape,
    facts,
    flow,
    grid,
    headline,
    join,
    page,
    paragraph,
    sentence,
    times_fewer,
)
from stretto.report.record import Event, RunRecord
from stretto.report.samples import samples_html

PAGE_NAME: Final = "report.html"
BATCH_FACTS: Final = {
    "num_buckets": "buckets",
    "batches": "batches per epoch",
    "shapes": "distinct shapes",
    "largest_batch": "largest batch, in padded steps",
    "most_rows": "most sequences in a batch",
}
CHOSEN_BATCH: Final = (
    "The batch was chosen while the run trained. Seconds per update were probed at several batch sizes, the noise of "
    "gradients was measured all along, and each decision took the batch that is predicted to reach the same result "
    "soonest, if that is at least 5 % sooner. Rate and warm-up follow the batch. Decisions within an epoch that kept "
    "the batch show in the plot only."
)
SOLVERS: Final = {
    "warm_start": (
        "Approximate. Sequences were cut into chunks of time that all ran at once, each from the state in which its "
        "neighbour had ended when the sequence was last seen, and gradients stopped where chunks meet."
    ),
    "multigrid": (
        "Approximate, unless a tolerance was set: coarser and coarser grids of time steps were corrected a fixed "
        "number of times, as published."
    ),
    "shooting": (
        "Exact within the tolerance: chunks of time ran at once until they agreed where they meet; batches for "
        "which that does not pay fell back to the sequential solver."
    ),
    "auto": "Exact within the tolerance: each shape of batch used the solver that was expected to be fastest.",
}
TRIALS: Final = (
    "Trials began with the same weights, each with its whole schedule in its few updates, and were measured on a part "
    "of the validation sequences. The last two decided."
)
RESIDUAL: Final = (
    "The residual is the largest gap that was left between the end of one chunk of time and the start of the next, "
    "relative to states above 1: at 0 the result is the sequential one. Validation and test sequences always ran "
    "sequentially."
)


def write_run_report(run: Path, out: Path | None = None) -> Path:
    """Write the page of a run, by default as `report.html` in its folder: one HTML file that needs nothing else.

    A run that is not finished, was interrupted or has no update yet gets a page of what there is. Returns where it is.
    """
    check_ending(out, flag="--out", endings=PAGE_ENDINGS)
    path = run / PAGE_NAME if out is None else out
    write_text_atomically(path, run_page(run))
    return path


def run_page(run: Path, *, scripted: bool = True) -> str:
    """The page of a run; without the plotting library's source if it is not `scripted`."""
    try:
        return _page(RunRecord(run), run=run, scripted=scripted)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        if isinstance(error, StrettoError):
            raise
        raise StrettoError(
            f"the record of the run in {str(run)!r} has an event of another form ({error!r})",
            fix="Make the page with the version of Stretto that trained the run.",
        ) from error


def _page(record: RunRecord, *, run: Path, scripted: bool) -> str:
    data = record.started.get("data") or {}
    title = f"{record.started['task']} on {data.get('name', 'unknown data')}" if record.started else "Training run"
    return page(
        title=title,
        subtitle=_subtitle(record),
        top=[_state(record, is_training=is_locked(run)), headline(_numbers(record))],
        sections=_sections(record),
        footer=f"Run folder: {run}",
        scripted=scripted,
    )


def _sections(record: RunRecord) -> Iterator[tuple[str, Html]]:
    yield "Training", _training(record)
    yield "Batches", _batches(record)
    if record.all("auto"):
        yield "How it was trained", _auto(record.all("auto"))
    if record.all("batch"):
        yield "Batch size", _batch_size(record)
    solved = [epoch for epoch in record.epochs if epoch.get("solving")]
    if solved:
        yield "Parallel in time", _solver(record, solved)
    if record.all("ranks"):
        yield "Ranks", _ranks(record.all("ranks"))
    samples = record.last("samples").get("items")
    missing = paragraph("No test sequence has been recorded with its output yet.")
    yield "Samples", samples_html(samples, metric=record.metric) if samples else missing
    yield "Results", _results(record)
    if record.last("confusion"):
        yield "Classes taken for others", confusion_html(record.last("confusion"))
    yield "Notes and warnings", _notes(record)
    yield "Settings", _settings(record.started.get("settings"))
    if record.started.get("rules"):
        yield "Which parameter is updated how", columns(RULES_HEADER, record.started["rules"])
    yield "Data and versions", _origin(record)


def _subtitle(record: RunRecord) -> str:
    start = record.started.get("time")
    when = dt.datetime.fromtimestamp(start, tz=dt.timezone.utc) if start is not None else None
    parameters = record.started.get("parameters")
    parts = [
        f"started {when:%d %B %Y, %H:%M} UTC" if when else "",
        f"{parameters:,} parameters" if parameters is not None else "",
        f"{len(record.epochs)} {'epoch' if len(record.epochs) == 1 else 'epochs'} finished",
    ]
    return ", ".join(filter(None, parts))


def _state(record: RunRecord, *, is_training: bool) -> Html:
    text, kind = "Finished", "state" if record.state == "finished" else "state open"
    if is_training and record.state == "unfinished" and len(record.updates):
        total, kind = record.started.get("epochs", 0), "state"
        epoch = min(len(record.epochs) + 1, total)
        text = f"Training: epoch {epoch:,} of {total:,}, update {record.updates.update_S[-1]:,.0f}"
    elif record.state == "interrupted":
        text = f"Interrupted at update {record.last('interrupted')['update']:,}: this page shows the run up to there"
    elif record.state == "unfinished" and len(record.updates):
        text = f"Not finished: the last recorded update is {record.updates.update_S[-1]:,.0f}"
    elif record.state == "unfinished":
        text = "Not finished: no update is recorded yet"
    return Html(f'<p class="{kind}">{escape(text)}</p>')


def _numbers(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    finished, started, epochs = record.finished, record.started, record.epochs
    tested = (finished.get("metrics") or {}).get(record.metric)
    name = figures.metric_name(record.metric)
    if tested is not None:
        yield sentence(name), format_metric(record.metric, tested), "on the test sequences"
    elif epochs:
        detail = f"on the validation sequences, after epoch {epochs[-1]['epoch']}"
        yield sentence(name), format_metric(record.metric, epochs[-1]["value"]), detail
    seconds = finished.get("seconds")
    if seconds is None and len(record.updates):
        seconds = float(record.updates.seconds_S[-1])
    if seconds is not None:
        updates = f"{record.updates.update_S[-1]:,.0f} updates" if len(record.updates) else ""
        yield "Time", duration(seconds), updates
    speed = finished.get("steps_per_second", epochs[-1].get("steps_per_second") if epochs else None)
    if speed is not None:
        yield "Steps per second", f"{speed:,.0f}", "real time steps, without padding"
    yield from _padding_numbers(record)
    ratio = started.get("padded_steps_ratio")
    if ratio is not None:
        yield "Padded steps saved", times_fewer(ratio), "than shuffled batches would need"


def _padding_numbers(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    padding, detail = record.finished.get("padding"), ""
    if padding is None and len(record.updates):
        padding = 1.0 - float(record.updates.real_S.sum()) / float(record.updates.padded_S.sum())
    if padding is None:
        padding, detail = (record.started.get("report") or {}).get("padding"), "planned; "
    shuffled = record.started.get("shuffled_padding")
    if padding is not None:
        detail += f"shuffled batches: {shuffled:.1%}" if shuffled is not None else "of all padded steps"
        yield "Padding", f"{padding:.1%}", detail


def _training(record: RunRecord) -> Html:
    parts = []
    if len(record.updates) or record.epochs:
        parts.append(figures.loss_figure(record))
    if record.epochs:
        parts.append(figures.metric_figure(record))
    if len(record.updates) and (record.updates.took_S == record.updates.took_S).any():
        parts.append(figures.time_figure(record))
    return grid(parts) if parts else paragraph("No update has been recorded yet.")


def _batches(record: RunRecord) -> Html:
    parts = []
    histogram = record.started.get("histogram")
    if histogram:
        parts.append(figures.lengths_figure(**histogram, edges=record.edges, whose="training sequences"))
    if len(record.updates):
        parts += [figures.padding_figure(record), figures.shapes_figure(record)]
    report = record.started.get("report") or {}
    rows = [(name, _number(report[key])) for key, name in BATCH_FACTS.items() if key in report]
    if report.get("straggler", 1) != 1:
        rows.append(("straggler factor", _number(report["straggler"])))
    plan = [facts(rows)] if rows else []
    return join([grid(parts), *plan]) if parts or plan else paragraph("No batch has been recorded yet.")


def _batch_size(record: RunRecord) -> Html:
    """How the batch size was chosen: every decision, what it was based on, and what came of it."""
    drawn = [figures.batch_size_figure(record)]
    entries = (record.last("probe").get("table") or {}).get("entries") or []
    measured = [entry for entry in entries if entry.get("seconds")]
    if measured:
        drawn.append(figures.probe_figure(measured))
    listed = [event for event in record.all("batch") if is_reported(event)]
    header = ["after", "update", "decision", "batch", "rate", "noise scale", "predicted gain"]
    rows = []
    for event in listed:
        noise, gain = event["noise_scale"], event["predicted_gain"]
        accumulated = f" in {event['accumulate']} parts" if event["accumulate"] > 1 else ""
        rows.append(
            [
                _when(event),
                f"{event['update']:,}",
                event["action"],
                f"{event['batch_size']:,}{accumulated}",
                f"{event['rate']:.3g}",
                "not known" if noise is None else f"{noise:,.3g}",
                f"{gain:.0%}" if gain else "-",
            ]
        )
    why = bullets(f"After {_when(event)}: {event['reason']}." for event in listed)
    return join([paragraph(CHOSEN_BATCH), grid(drawn), columns(header, rows), why])


def _auto(events: Sequence[Event]) -> Html:
    """What `--auto` tried, and why it trained as it did."""
    trials = [event for event in events if event["action"] == "trial"]
    rows = [
        [
            event["recipe"],
            f"{event['epochs']:.3g}",
            f"{event['updates']:,}",
            "diverged" if event["loss"] is None else _number(event["loss"]),
            duration(event["seconds"]),
        ]
        for event in trials
    ]
    table = columns(["recipe", "epochs", "updates", "validation loss", "time"], rows)
    runs = [
        f"Update {event['update']:,}: {event['recipe']} for {event['epochs']:.0f} epochs. Why: {event['reason']}."
        for event in events
        if event["action"] == "run"
    ]
    ends = [f"End: {event['reason']}." for event in events if event["action"] == "end"]
    return join([*([paragraph(TRIALS), table] if rows else []), bullets([*runs, *ends])])


def is_reported(decision: Event) -> bool:
    """Whether a decision on the batch size changed something, or was made at the end of an epoch."""
    return decision["action"] != "keep" or float(decision["epoch"]).is_integer()


def _when(event: Event) -> str:
    return f"update {event['update']:,}" if event["action"] == "roll-back" else f"epoch {event['epoch']:.3g}"


def _solver(record: RunRecord, epochs: Sequence[Event]) -> Html:
    """What a solver left over, epoch by epoch, and what that means."""
    name = str(epochs[-1]["solving"]["solver"])
    approximate: Event = next((e["solving"] for e in reversed(epochs) if not e["solving"]["exact"]), {})
    rows = [("solver", name)]
    if approximate.get("reason"):
        rows.append(("in the last batch", str(approximate["reason"])))
    if approximate.get("cache_bytes") is not None:
        most = max(filter(None, (epoch["solving"]["cache_bytes"] for epoch in epochs)), default=0)
        rows.append(("memory for boundary states", format_bytes(most)))
    num_exact = sum(bool(epoch["solving"]["exact"]) for epoch in epochs)
    if num_exact:
        rows.append(("sequential epochs at the end", f"{num_exact}"))
    header = ["epoch", "residual, mean", "largest", "of gradients, mean", "passes", "batches", "fell back"]
    cells = []
    for epoch in epochs:
        solving = epoch["solving"]
        residuals = [format_residual(solving[key]) for key in ("residual_mean", "residual_max")]
        cells.append(
            [
                epoch["epoch"],
                *(["exact", "exact"] if solving["exact"] else residuals),
                format_residual(solving["backward_residual_mean"]),
                f"{solving['iterations']:.2f}",
                f"{solving['batches']:,}",
                f"{solving['fell_back']:,}",
            ]
        )
    drawn = figures.residual_figure(record, epochs)
    words = paragraph(f"{SOLVERS.get(name, '')} {RESIDUAL}".strip())
    return join([words, *([] if drawn is None else [drawn]), facts(rows), columns(header, cells)])


def format_bytes(count: int) -> str:
    """A size as a person says it."""
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def format_residual(value: float | None) -> str:
    """0 as it is, other residuals with two digits."""
    return "-" if value is None else "0" if value == 0 else f"{value:.2g}"


def _ranks(epochs: Sequence[Event]) -> Html:
    """A table over all epochs and two plots, with a line for each rank."""
    num_ranks = max(len(event["steps_real"]) for event in epochs)
    whole = [event for event in epochs if len(event["steps_real"]) == num_ranks]
    rows = []
    for rank in range(num_ranks):
        steps, seconds, waited = (
            sum(event[key][rank] for event in whole) for key in ("steps_real", "seconds", "waited")
        )
        rows.append([rank, f"{steps:,}", f"{steps / max(seconds, 1e-9):,.0f}", f"{waited / max(seconds, 1e-9):.1%}"])
    table = columns(["rank", "real steps", "real steps per second", "share of time waiting for others"], rows)
    others = sorted({len(event["steps_real"]) for event in epochs} - {num_ranks})
    note = f"Some epochs ended with {', '.join(map(str, others))} ranks; they are left out here."
    return join([table, *([paragraph(note)] if others else []), grid(figures.rank_figures(whole))])


def _results(record: RunRecord) -> Html:
    parts = []
    metrics = record.finished.get("metrics") or {}
    if metrics:
        parts.append(paragraph("On the test sequences, at the end:"))
        parts.append(facts((figures.metric_name(name), format_metric(name, value)) for name, value in metrics.items()))
    if record.epochs:
        metric = figures.metric_name(record.metric)
        header = ["epoch", "update", "train loss", "valid loss", metric, "seconds", "padding"]
        rows = [
            [
                epoch["epoch"],
                _number(epoch["update"]),
                _number(epoch.get("train_loss")),
                _number(epoch.get("valid_loss")),
                format_metric(record.metric, epoch.get("value")),
                _number(epoch.get("seconds")),
                format_metric("padding", epoch.get("padding")),
            ]
            for epoch in record.epochs
        ]
        parts += [paragraph("After each epoch, on the validation sequences:"), columns(header, rows)]
    return join(parts) if parts else paragraph("No epoch is finished yet.")


def _notes(record: RunRecord) -> Html:
    lines = [*((record.started.get("data") or {}).get("notes") or [])]
    lines += [f"Warning: {event['message']}" for event in record.all("warning")]
    lines += [f"Resumed at update {event['update']:,}." for event in record.all("resumed")]
    if record.state == "interrupted":
        lines.append(f"Interrupted at update {record.last('interrupted')['update']:,}.")
    saved = record.all("checkpoint")
    if saved:
        last = saved[-1]
        count = f"{len(saved):,} checkpoint{'s' * (len(saved) != 1)}"
        lines.append(f"{count} saved; the last, at update {last['update']:,}, is {last['path']}.")
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
    return flow(
        facts(
            (name, value if isinstance(value, str) else "not set" if value is None else json.dumps(value))
            for name, value in settings.items()
        )
    )


def format_metric(name: str, value: float | None) -> str:
    """Shares as percentages, anything else as a number."""
    if value is None:
        return "not known"
    return f"{value:.2%}" if figures.is_share(name) else _number(value)


def _number(value: Any) -> str:
    if value is None:
        return "not known"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:#,.4g}".rstrip(".")
