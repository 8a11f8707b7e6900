"""`stretto predict RUN DATA`: a trained model on new data."""

import csv
import dataclasses
import io
import json
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import tyro
from rich import box
from rich.table import Table
from rich.text import Text

from stretto.cli.flags import check_flags, console_for, parse
from stretto.cli.loading import load_task
from stretto.data import Part
from stretto.errors import StrettoError
from stretto.files import write_text_atomically
from stretto.trained import Weights, load

MAX_SHOWN: Final = 40
MAX_WIDTH: Final = 100
FORMATS: Final = (".jsonl", ".csv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictSettings:
    """What a trained model makes of each sequence: text, class and probabilities, labels, continuation, translation.

    Attributes:
        run: The run folder, as `stretto train` names it.
        data: A file or folder that `stretto inspect` reads, labelled or not; for a translation also a file of lines.
        out: Write to this file, one line per sequence, in the order of the data: .jsonl or .csv. Left out, a table.
        split: The part of the data to take.
        weights: Those of the best epoch or the last ones; left out, those that the result of the run belongs to.
        task: MODULE:NAME of the class, for a task of your own.
        device: Where to run, as torch names it.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    data: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA")]
    out: Path | None = None
    split: Part | Literal["all"] = "all"
    weights: Weights | None = None
    task: str | None = None
    device: str = "cpu"


def run(words: list[str]) -> int:
    """Predict."""
    settings = check_flags(parse(PredictSettings, words, prog="stretto predict"))
    out = settings.out
    if out is not None:
        if out.suffix.lower() not in FORMATS:
            raise StrettoError(f"--out {str(out)!r} is of no kind that is written", fix="Name a .jsonl or .csv file.")
        check_output(out, data=settings.data, run=settings.run)
    model = load(settings.run, weights=settings.weights, task=load_task(settings.task), device=settings.device)
    rows = [
        {"sequence": number, **row} for number, row in enumerate(model.predict(settings.data, split=settings.split))
    ]
    if out is None:
        _print(rows)
        return 0
    write_text_atomically(out, _csv(rows) if out.suffix.lower() == ".csv" else _jsonl(rows))
    print(f"{len(rows):,} sequence{'s' * (len(rows) != 1)}  {out}")
    return 0


def check_output(out: Path, *, data: Path | None, run: Path) -> None:
    """Refuse to write over the data or into what a run has recorded."""
    try:
        place = out.resolve()
    except (OSError, ValueError) as error:
        raise StrettoError(f"{str(out)!r} is no name for a file ({error})", fix="Name another file.") from error
    if data is not None and (place == data.resolve() or (data.is_dir() and place.is_relative_to(data.resolve()))):
        raise StrettoError(f"{str(out)!r} is the input", fix="Name another file.")
    if place.is_dir() or (place.exists() and place.is_relative_to(run.resolve())):
        what = "a folder" if place.is_dir() else "a file of the run"
        raise StrettoError(f"{str(out)!r} is {what}", fix="Name another file.")


def _jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _csv(rows: list[dict[str, Any]]) -> str:
    """A column for each entry of a nested value; lists as JSON."""
    flat: list[dict[str, Any]] = [{} for _ in rows]
    for row, columns in zip(rows, flat, strict=True):
        for name, value in row.items():
            if isinstance(value, dict):
                columns |= {f"{name}.{key}": item for key, item in value.items()}
            else:
                columns[name] = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = [name for name, value in rows[0].items() if not isinstance(value, dict)]
    for name in names:
        table.add_column(name, justify="left" if isinstance(rows[0][name], (str, list)) else "right")
    for row in rows[:MAX_SHOWN]:
        table.add_row(*(Text(shown(row[name])) for name in names))
    console_for(MAX_WIDTH).print(table)
    if len(rows) > MAX_SHOWN:
        print(f"... and {len(rows) - MAX_SHOWN:,} more; --out FILE.jsonl or FILE.csv has all.")


def shown(value: Any) -> str:
    """A value as one line of a table."""
    if isinstance(value, list):
        text = ", ".join(f"{name} x{len(list(run))}" for name, run in groupby(value))
        return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 3] + "..."
    if isinstance(value, float):
        return f"{value:.4g}"
    # Control characters of a text would move the cursor.
    return "".join(letter if letter.isprintable() else " " for letter in str(value))
