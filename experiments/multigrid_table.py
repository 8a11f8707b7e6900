"""The multigrid experiment as a table for the terminal."""

from typing import Final

from rich import box
from rich.table import Table
from rich.text import Text

from experiments.multigrid import MultigridResult, MultigridRow
from experiments.multigrid_contestant import WAYS
from experiments.multigrid_settings import WHOLE

HEADER: Final = (
    "length",
    "solver",
    "s/epoch",
    "least",
    "x serial",
    "residual",
    "by solver",
    "serially",
    "differ",
    "fell back",
)
MEANING: Final = (
    "s/epoch: median; x serial: times faster than step after step, median of the ratios of interleaved epochs; "
    "residual: mean of the last epoch, 0 is exact; by solver, serially: test accuracy of the trained net with its "
    "solver in use and step after step; differ: labels for which the two find something else; fell back: batches "
    "walked step after step in the end"
)


def multigrid_table(result: MultigridResult) -> Table:
    """A row for each length and contestant."""
    table = Table(
        title=Text(title(result)),
        title_justify="left",
        caption=Text(MEANING),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for number, name in enumerate(HEADER):
        table.add_column(name, justify="left" if number < 2 else "right", no_wrap=True)
    for row in result.rows:
        table.add_row(*map(Text, cells(row)), end_section=row.way == tuple(WAYS)[-1])
    return table


def title(result: MultigridResult) -> str:
    """What was trained on what."""
    chosen = result.settings
    kind = "GRU" if chosen["cell"] == "gru" else "implicit GRU"
    layers = "1 layer" if chosen["num_layers"] == 1 else f"{chosen['num_layers']} layers"
    epochs = "1 epoch" if chosen["epochs"] == 1 else f"{chosen['epochs']} epochs"
    return f"{kind}, {layers} of {chosen['hidden_size']} units, on {result.data}, {epochs}"


def cells(row: MultigridRow) -> tuple[str, ...]:
    """A row under `HEADER`."""
    last = row.last
    return (
        "whole" if row.length == WHOLE else f"{row.length:,}",
        row.way,
        f"{row.median_seconds:.2f}",
        f"{row.least_seconds:.2f}",
        f"{row.speed_up:.2f}",
        small(last.residual),
        f"{last.parallel:.1%}",
        f"{last.serial:.1%}",
        f"{last.differing:.1%}",
        f"{row.fell_back:.0%}",
    )


def small(residual: float) -> str:
    """A number that may be tiny."""
    return "0" if residual == 0 else f"{residual:.1e}" if residual < 0.01 else f"{residual:.2f}"
