"""`stretto evaluate RUN DATA`: the metrics of a trained model."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Final, Literal

import tyro
from rich import box
from rich.table import Table
from rich.text import Text

from stretto.cli.flags import check_flags, console_for, parse
from stretto.cli.loading import load_task
from stretto.cli.predict import MAX_WIDTH, check_output, shown
from stretto.data import Part
from stretto.files import check_ending, write_text_atomically
from stretto.report import PAGE_ENDINGS, confusion_html, facts, format_metric, most_confused, page
from stretto.trained import Weights, load

MAX_PRINTED: Final = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """The metrics of a trained model on labelled data, as at the end of training.

    Attributes:
        run: The run folder, as `stretto train` names it.
        data: A file or folder that `stretto inspect` reads, with labels.
        split: The part of the data to take; left out, the test part of the data that the model was trained on, and all
            of any other.
        weights: Those of the best epoch or the last ones; left out, those that the result of the run belongs to.
        json: Also write the metrics to this file, and of a task with classes how they were confused.
        html: Also write a page with both to this file.
        task: MODULE:NAME of the class, for a task of your own.
        device: Where to run, as torch names it.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    data: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA")]
    split: Part | Literal["all"] | None = None
    weights: Weights | None = None
    json: Path | None = None
    html: Path | None = None
    task: str | None = None
    device: str = "cpu"


def run(words: list[str]) -> int:
    """Evaluate."""
    settings = check_flags(parse(EvaluateSettings, words, prog="stretto evaluate"))
    check_ending(settings.json, flag="--json", endings=(".json",))
    check_ending(settings.html, flag="--html", endings=PAGE_ENDINGS)
    for out in filter(None, (settings.json, settings.html)):
        check_output(out, data=settings.data, run=settings.run)
    model = load(settings.run, weights=settings.weights, task=load_task(settings.task), device=settings.device)
    found, part = model.evaluation(settings.data, split=settings.split)
    metrics = {**found.metrics, "loss": found.loss}
    confusion = None if found.confusion is None else dataclasses.asdict(found.confusion)
    about = f"{part.name}: {len(part):,} sequences, {part.num_steps:,} steps; {model.weights} weights"
    if settings.json is not None:
        values = {"data": part.name, "sequences": len(part), "weights": model.weights, "metrics": metrics}
        values |= {} if confusion is None else {"confusion": confusion}
        write_text_atomically(settings.json, json.dumps(values, indent=2) + "\n")
    if settings.html is not None:
        rows = facts((name, format_metric(name, value)) for name, value in metrics.items())
        sections = [("Metrics", rows)]
        sections += [] if confusion is None else [("Classes taken for others", confusion_html(confusion))]
        title = f"{model.task.name} on {part.name}"
        footer = f"Run folder: {settings.run}"
        text = page(title=title, subtitle=about, top=[], sections=sections, footer=footer, scripted=False)
        write_text_atomically(settings.html, text)
    print(about)
    for note in part.notes:
        print(f"note: {note}")
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    for name, value in metrics.items():
        table.add_row(name, format_metric(name, value))
    wrong = [] if confusion is None else most_confused(confusion)[:MAX_PRINTED]
    console_for(MAX_WIDTH).print(table)
    if wrong:
        # Names come from the data: nothing in them is markup.
        confused = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("true class", "taken for", "times"):
            confused.add_column(heading, justify="right" if heading == "times" else "left")
        for true, taken, count, total in wrong:
            confused.add_row(Text(shown(true)), Text(shown(taken)), f"{count:,} of {total:,}")
        console_for(MAX_WIDTH).print(confused)
    if settings.html is not None:
        print(f"page  {settings.html}")
    return 0
