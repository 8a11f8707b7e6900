"""`stretto evaluate RUN DATA`: the metrics of a trained model."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich import box
from rich.table import Table

from stretto.cli.flags import check_flags, console_for, parse
from stretto.cli.loading import load_task
from stretto.cli.predict import MAX_WIDTH, check_output
from stretto.data import Part
from stretto.files import check_ending, write_text_atomically
from stretto.report import format_metric
from stretto.trained import Weights, load


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """The metrics of a trained model on labelled data, as at the end of training.

    Attributes:
        run: The run folder, as `stretto train` names it.
        data: A file or folder that `stretto inspect` reads, with labels.
        split: The part of the data to take; left out, the test part of the data that the model was trained on, and all
            of any other.
        weights: Those of the best epoch or the last ones; left out, those that the result of the run belongs to.
        json: Also write the metrics to this file.
        task: MODULE:NAME of the class, for a task of your own.
        device: Where to run, as torch names it.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    data: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA")]
    split: Part | Literal["all"] | None = None
    weights: Weights | None = None
    json: Path | None = None
    task: str | None = None
    device: str = "cpu"


def run(words: list[str]) -> int:
    """Evaluate."""
    settings = check_flags(parse(EvaluateSettings, words, prog="stretto evaluate"))
    check_ending(settings.json, flag="--json", endings=(".json",))
    if settings.json is not None:
        check_output(settings.json, data=settings.data, run=settings.run)
    model = load(settings.run, weights=settings.weights, task=load_task(settings.task), device=settings.device)
    metrics, part = model.evaluation(settings.data, split=settings.split)
    if settings.json is not None:
        values = {"data": part.name, "sequences": len(part), "weights": model.weights, "metrics": metrics}
        write_text_atomically(settings.json, json.dumps(values, indent=2) + "\n")
    print(f"{part.name}: {len(part):,} sequences, {part.num_steps:,} steps; {model.weights} weights")
    for note in part.notes:
        print(f"note: {note}")
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    for name, value in metrics.items():
        table.add_row(name, format_metric(name, value))
    console_for(MAX_WIDTH).print(table)
    return 0
