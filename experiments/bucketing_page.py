"""The bucketing experiment as a table for the terminal and a page with plots."""

import itertools
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from experiments.bucketing import BucketingResult, BucketingRow
from stretto.extras import optional
from stretto.files import write_text_atomically
from stretto.report import BLUE, PALE, BigNumber, Html, Section, columns, figure, grid, headline, page, paragraph, plot

HEADER = ("workers", "buckets", "s/epoch", "epochs", "total s", "loss", "padding", "faster", "slots", "share")
MEANING = (
    "s/epoch: median; total s: until the loss was reached; loss: the best; faster: epochs, median of the ratios of "
    "interleaved ones; slots: how many times fewer; share: of the speed-up that slots and workers allow"
)


PARALLEL = (
    " Every worker has batches of that size and as many threads as the worker that trains alone; the batch of an "
    "update grows with their number, and so may the epochs until the loss is reached."
)


def name_of(row: BucketingRow) -> str:
    """A contender in words."""
    buckets = "no buckets" if row.buckets == 1 else f"{row.buckets} buckets"
    return buckets if row.workers == 1 else f"{row.workers} workers, {buckets}"


def bucketing_table(result: BucketingResult) -> Table:
    """The rows, the baseline first."""
    table = Table(
        title=Text(
            f"{result.task} on {result.data}, {result.num_train:,} training sequences, "
            f"to validation loss {result.target:.4f}"
        ),
        title_justify="left",
        caption=MEANING,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for name in HEADER:
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(*_cells(row))
    return table


def write_bucketing_page(result: BucketingResult, path: Path) -> None:
    """Table and plots on one self-contained page."""
    best = min(result.rows, key=lambda row: row.total_seconds if row.reached else float("inf"))
    baseline = result.rows[0]
    most = max(row.workers for row in result.rows)
    gain = baseline.total_seconds / best.total_seconds
    top = headline(
        [
            BigNumber(label="Sooner to the same loss", value=f"{gain:.1f} x", detail=f"with {name_of(best)}"),
            BigNumber(
                label="Faster epochs", value=f"{best.speed_up:.1f} x", detail=f"slots allow {best.slot_ratio:.1f} x"
            ),
            BigNumber(label="Padding", value=f"{best.padding:.1%}", detail=f"{baseline.padding:.1%} without buckets"),
        ]
    )
    body = grid([_loss_figure(result), _speed_figure(result)])
    text = page(
        title="Sequence bucketing",
        subtitle=f"{result.task} on {result.data}: {result.num_train:,} training sequences, one net, "
        f"the same weights at the start, trained to validation loss {result.target:.4f}",
        top=[top],
        sections=[
            Section(title="Time and loss", body=body),
            Section(title="All contenders", body=columns(HEADER, [_cells(row) for row in result.rows])),
            Section(
                title="How it was measured",
                body=paragraph(
                    f"{MEANING}. Contenders train an epoch each in turn. Seconds are those of the updates; measuring "
                    "the validation part is left out. The target is the best validation loss of the baseline."
                    + (PARALLEL if most > 1 else "")
                ),
            ),
        ],
        footer="Made by stretto reproduce bucketing.",
    )
    write_text_atomically(path, text)


def _cells(row: BucketingRow) -> tuple[str, ...]:
    return (
        str(row.workers),
        "none" if row.buckets == 1 else str(row.buckets),
        f"{row.epoch_seconds:.2f}",
        f"{row.epochs}" if row.reached else f"> {row.epochs}",
        f"{row.total_seconds:.1f}",
        f"{row.valid_loss:.4f}",
        f"{row.padding:.1%}",
        f"{row.speed_up:.2f}",
        f"{row.slot_ratio:.2f}",
        f"{row.speed_up / (row.slot_ratio * row.workers):.2f}",
    )


def _loss_figure(result: BucketingResult) -> Html:
    graph_objects = optional("plotly.graph_objects")
    shades = ("#cf8a35", "#c3d2e0", "#94b3cd", "#6690b5", "#2f5d8a", "#1d3c5c", "#2b2350")
    counts = sorted({row.buckets for row in result.rows})
    traces = [
        graph_objects.Scatter(
            x=list(itertools.accumulate(row.seconds)),
            y=list(row.losses),
            name=name_of(row),
            line={
                "color": shades[min(counts.index(row.buckets), len(shades) - 1)],
                "width": 2,
                "dash": "solid" if row.workers == 1 else "dash",
            },
        )
        for row in result.rows
    ]
    drawn = plot(traces, name="loss", x={"title": "seconds of training"}, y={"title": "validation loss", "type": "log"})
    caption = "One line a contender; left is sooner."
    if any(row.workers > 1 for row in result.rows):
        caption += " Dashed: several workers."
    return figure(drawn, title="Validation loss against time", caption=caption)


def _speed_figure(result: BucketingResult) -> Html:
    graph_objects = optional("plotly.graph_objects")
    names = [name_of(row) for row in result.rows]
    traces = [
        graph_objects.Bar(
            x=names,
            y=[row.slot_ratio * row.workers for row in result.rows],
            name="slots and workers allow",
            marker={"color": PALE},
        ),
        graph_objects.Bar(x=names, y=[row.speed_up for row in result.rows], name="measured", marker={"color": BLUE}),
    ]
    drawn = plot(traces, name="speed", x={"title": "", "type": "category"}, y={"title": "times faster an epoch"})
    return figure(drawn, title="Speed-up of an epoch", caption="Measured beside what slots and workers allow.")
