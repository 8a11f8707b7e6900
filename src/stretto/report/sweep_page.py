"""The page that compares the runs of a sweep: curves over each other, a table from the best to the worst."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from stretto.errors import StrettoError
from stretto.files import write_text_atomically
from stretto.report.figures import is_share, metric_name
from stretto.report.page import Html, columns, duration, escape, figure, headline, page, paragraph, sentence
from stretto.report.plot import epoch_axis, line, plot
from stretto.report.record import RunRecord, column
from stretto.report.run_page import format_metric

COLOURS: Final = (
    *("#2f5d8a", "#cf8a35", "#3f8f86", "#a5473c", "#6f5b9a", "#8a94a0", "#4c8a3f", "#b0609b"),
    *("#1f9ac9", "#7a6a2f"),
)
SEED: Final = "seed"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One run of a sweep: its number, what is its own among the settings, and its folder, which may not exist yet."""

    number: int
    changes: Mapping[str, Any]
    folder: Path

    @property
    def name(self) -> str:
        """The settings in which it differs from the others, or else its number."""
        return ", ".join(f"{key} {value}" for key, value in self.changes.items()) or f"run {self.number}"


def write_sweep_page(runs: Sequence[SweepRun], path: Path, *, title: str, higher_is_better: bool) -> Path:
    """Write the page of what the runs have recorded so far; runs that have not started are named."""
    records = {run.number: record for run in runs if (record := _record(run.folder)) is not None}
    sign = -1.0 if higher_is_better else 1.0

    def best_of(run: SweepRun) -> float:
        values = [float(e["value"]) for e in records[run.number].epochs] if run.number in records else []
        return min((sign * value for value in values if not math.isnan(value)), default=math.inf)

    ranked = sorted(runs, key=lambda run: (best_of(run), run.number))
    done = [run for run in ranked if run.number in records and records[run.number].epochs]
    metric = records[done[0].number].metric if done else ""
    top = [headline(_numbers(done, records, runs, metric))] if done else [paragraph("No epoch has ended yet.")]
    text = page(
        title=title,
        subtitle=f"{len(runs)} runs, {sum(record.state == 'finished' for record in records.values())} finished",
        top=top,
        sections=[
            *([("Curves", _draw_curves(sorted(done, key=lambda run: run.number), records, metric))] if done else []),
            ("Runs", _table(ranked, records, metric, sign=sign)),
            *([("Over seeds", table)] if (table := _seed_table(done, best_of, metric, sign=sign)) else []),
        ],
        footer=f"Sweep folder: {path.parent}",
        scripted=bool(done),
    )
    write_text_atomically(path, text)
    return path


def _record(folder: Path) -> RunRecord | None:
    try:
        return RunRecord(folder)
    except (StrettoError, KeyError, TypeError, ValueError):
        return None


def _numbers(
    done: Sequence[SweepRun], records: Mapping[int, RunRecord], runs: Sequence[SweepRun], metric: str
) -> list[tuple[str, str, str]]:
    best = records[done[0].number]
    tested = (best.finished.get("metrics") or {}).get(metric)
    seconds = sum(float(record.finished.get("seconds", 0.0)) for record in records.values())
    return [
        ("Best run", f"{done[0].number}", done[0].name),
        (f"Its {metric_name(metric)}", format_metric(metric, tested), "on the test sequences"),
        ("Time", duration(seconds), f"of {len(done)} of {len(runs)} runs, added up"),
    ]


def _draw_curves(runs: Sequence[SweepRun], records: Mapping[int, RunRecord], metric: str) -> Html:
    pictures, most = [], max(len(records[run.number].epochs) for run in runs)
    for key, title in (("value", metric_name(metric)), ("valid_loss", "loss")):
        traces = [
            line(
                column(records[run.number].epochs, "epoch"),
                column(records[run.number].epochs, key),
                name=str(escape(f"{run.number}: {run.name}")),
                colour=COLOURS[place % len(COLOURS)],
                markers=True,
                dash="solid" if place < len(COLOURS) else "dot",
            )
            for place, run in enumerate(runs)
        ]
        y = {"title": str(escape(title)), "tickformat": ".0%" if key == "value" and is_share(metric) else ""}
        picture = plot(traces, name=f"sweep-{key.replace('_', '-')}", x=epoch_axis(most), y=y, height=420)
        caption = "On the validation sequences, after each epoch. A click on a name, or Tab and Enter, hides its curve."
        pictures.append(figure(picture, title=sentence(title), caption=caption, wide=True))
    return Html('<div class="grid">' + "\n".join(pictures) + "</div>")


def _table(ranked: Sequence[SweepRun], records: Mapping[int, RunRecord], metric: str, *, sign: float) -> Html:
    names = list(dict.fromkeys(key for run in ranked for key in run.changes))
    header = [
        "run",
        *names,
        f"best {metric or 'metric'}",
        "epoch",
        f"test {metric or 'metric'}",
        "epochs",
        "time",
        "state",
    ]
    rows = []
    for run in ranked:
        record = records.get(run.number)
        epochs = record.epochs if record is not None else []
        best = min(epochs, key=lambda epoch: sign * float(epoch["value"]), default=None)
        finished = record.finished if record is not None else {}
        tested = (finished.get("metrics") or {}).get(metric)
        rows.append(
            [
                run.number,
                *(run.changes.get(name, "") for name in names),
                "" if best is None else format_metric(metric, best["value"]),
                "" if best is None else best["epoch"],
                "" if tested is None else format_metric(metric, tested),
                len(epochs),
                duration(float(finished["seconds"])) if "seconds" in finished else "",
                "waiting" if record is None else record.state,
            ]
        )
    return columns(header, rows)


def _seed_table(done: Sequence[SweepRun], best_of: Any, metric: str, *, sign: float) -> Html | None:
    """The mean and the spread of runs that differ in their seed alone."""
    groups: dict[str, list[float]] = {}
    for run in done:
        rest = {key: value for key, value in run.changes.items() if key != SEED}
        groups.setdefault(json.dumps(rest, default=str), []).append(sign * best_of(run))
    if all(len(values) < 2 for values in groups.values()):
        return None
    rows = []
    for key, values in sorted(groups.items(), key=lambda item: sign * sum(item[1]) / len(item[1])):
        mean = sum(values) / len(values)
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))
        name = ", ".join(f"{k} {v}" for k, v in json.loads(key).items()) or "all"
        rows.append([name, len(values), format_metric(metric, mean), format_metric(metric, spread)])
    return columns(["settings", "seeds", f"mean of the best {metric}", "standard deviation"], rows)
