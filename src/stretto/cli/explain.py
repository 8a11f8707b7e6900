"""`stretto explain CELL`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from stretto.cli.flags import check_flags, parse
from stretto.cli.loading import INPUT_SIZE, SetFlags, input_size_of, load_module, try_step
from stretto.files import check_ending, write_text_atomically
from stretto.kernels import Backend
from stretto.nn import RNN
from stretto.training import Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainSettings:
    """How a cell is compiled: what leaves the time loop, what stays in it, and what a step costs.

    For example:

    * stretto explain LSTM --hidden-size 256 --svg lstm.svg
    * stretto explain my_package.cells:MyCell --set "periods=(1, 2, 4)"
    * stretto explain path/to/file.py:make_cell --json

    Attributes:
        cell: A cell of Stretto's by its name, such as LSTM, or MODULE:NAME or FILE.py:NAME for your own: a class, a
            cell, a graph, or a function that makes one. The current folder is searched for modules.
        input_size: Features of a step; left out, what the cell has or 64.
        hidden_size: Hidden units the cell is made with; left out, the class's own default or 128.
        arguments: Another argument the cell is made with, as name=value with a Python literal; may be repeated.
        backend: Auto uses generated code where possible; cpp requires it; eager runs operator by operator; torch calls
            the cell at each step.
        dtype: Of the cell's parameters.
        svg: Also write a picture to this file.
        json: Print JSON in place of the table.
    """

    cell: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CELL")]
    input_size: Count | None = None
    hidden_size: Count | None = None
    arguments: SetFlags = ()
    backend: Backend = "auto"
    dtype: Literal["float32", "float64"] | None = None
    svg: Path | None = None
    json: bool = False


def run(words: list[str]) -> int:
    """Explain."""
    settings = check_flags(parse(ExplainSettings, words, prog="stretto explain"))
    check_ending(settings.svg, flag="--svg", endings=(".svg",))
    cell = load_module(
        settings.cell,
        input_size=settings.input_size,
        hidden_size=settings.hidden_size,
        arguments=settings.arguments,
    )
    if settings.dtype is not None:
        cell = cell.to(getattr(torch, settings.dtype))
    rnn = RNN(cell, backend=settings.backend)
    size = settings.input_size or input_size_of(rnn.cells[0]) or INPUT_SIZE
    try_step(rnn.cells[0], size, target=settings.cell, input_flag="--input-size")
    explanation = rnn.explain(size)
    if settings.svg is not None:
        write_text_atomically(settings.svg, explanation.svg())
    if settings.json:
        print(json.dumps(explanation.as_dict(), indent=2))
        return 0
    print(explanation)
    if settings.svg is not None:
        print(f"\npicture    {settings.svg}")
    return 0
