"""The result of the bucketing benchmark as tables: all columns from 120 characters on, the main ones below."""

import itertools
from collections.abc import Sequence
from typing import Final

from rich import box
from rich.markup import escape
from rich.table import Table

from bench.buckets import BucketsBench, BucketsRow, LawFacts
from bench.samplers import OURS

LEGEND: Final = (
    "waste: padding to the longest of the batch, or to the edge of its bucket. cap: largest batch / slots allowed.\n"
    "seen, twice: sequences drawn at least once, more than once. serial: time steps one after another, in thousands.\n"
    "wait: slowest rank over the mean, by length and by slots; 1 is none. corr.: of the lengths of adjacent steps.\n"
    "same order: of the lengths in two epochs of two seeds; 0 is chance, 1 is the same. first, next: time to a batch.\n"
)


WIDE: Final = 118
# The headings of a law's table, in two lines each, and whether a narrow terminal shows them too.
HEADINGS: Final = {
    "\nK": True,
    "\nwaste": True,
    "to\nedge": False,
    "\ncap": True,
    "\nseen": True,
    "\ntwice": True,
    "\nbatches": True,
    "\nshapes": False,
    "\nserial": False,
    "length\nwait": True,
    "slot\nwait": False,
    "\ncorr.": True,
    "same\norder": False,
    "first\ns": False,
    "next\nms": True,
}


def tables(bench: BucketsBench, *, width: int = WIDE) -> list[Table]:
    """A table for each law, then edges, world sizes, large sets and the contestants, for so many columns of text."""
    made = [_law_table(fact, bench=bench, wide=width >= WIDE) for fact in bench.laws]
    return [*made, _edge_waste_table(bench), _scaling_table(bench), _large_table(bench), _contestants_table(bench)]


def _law_table(fact: LawFacts, *, bench: BucketsBench, wide: bool) -> Table:
    rows = [row for row in bench.rows if row.law == fact.name]
    times = f"Times of rank 0, the least of {bench.seeds} seeds in one interleaved run; counts of seed 0, all ranks."
    table = _table(
        f"{fact.name}: {fact.description}\n{fact.num_sequences:,} sequences of {fact.mean:,.0f} steps on average, "
        f"{fact.max_padded_steps:,} slots a batch, {_ranks(bench.world_size)}",
        left=("\nsampler",),
        right=[heading for heading, narrow in HEADINGS.items() if narrow or wide],
        caption=LEGEND + times if fact is bench.laws[0] else times,
    )
    for row, following in itertools.zip_longest(rows, rows[1:]):
        cells = zip(_law_cells(row), HEADINGS.values(), strict=True)
        table.add_row(
            row.sampler,
            *(cell for cell, narrow in cells if narrow or wide),
            style="bold" if row.sampler.startswith(OURS) else None,
            end_section=following is not None and following.num_buckets != row.num_buckets,
        )
    return table


def _law_cells(row: BucketsRow) -> tuple[str, ...]:
    return (
        _or_dash(row.num_buckets, "{}"),
        f"{row.waste:.1%}",
        _or_dash(row.waste_to_edge, "{:.1%}"),
        f"{row.cap:.0%}",
        _share(row.coverage),
        _share(row.repeated),
        f"{row.batches:,}",
        f"{row.shapes:,}",
        f"{row.serial_steps / 1000:,.0f}",
        f"{row.length_straggler:.3f}",
        f"{row.token_straggler:.3f}",
        f"{row.correlation:+.2f}",
        f"{row.order_match:+.2f}",
        f"{row.plan_seconds:.3f}",
        _or_dash(row.ms_per_batch, "{:.3f}"),
    )


def _edge_waste_table(bench: BucketsBench) -> Table:
    table = _table(
        "Edges alone: padding when every sequence is padded to its edge",
        left=("law",),
        right=("K", "optimal", "equal mass", "percentile", "uniform", "best other / optimal"),
        caption="Arithmetic, nothing timed. Equal mass: Lhotse, NeMo; percentile: fairseq.",
    )
    for row in bench.edge_waste:
        others = (row.equal_mass, row.percentile, row.uniform)
        table.add_row(
            row.law,
            str(row.num_buckets),
            f"[bold]{row.optimal:.1%}[/bold]",
            *(f"{waste:.1%}" for waste in others),
            f"{min(others) / row.optimal:.2f}" if row.optimal > 0 else "-",
            end_section=row is not bench.edge_waste[-1] and row.num_buckets == bench.edge_waste[-1].num_buckets,
        )
    return table


def _scaling_table(bench: BucketsBench) -> Table:
    table = _table(
        f"World sizes: {bench.laws[0].name}",
        left=("sampler",),
        right=("ranks", "first s", "next ms"),
        caption=f"Rank 0, up to 30 batches, least\nof {bench.seeds} seeds, interleaved.",
    )
    for row in sorted(bench.scaling, key=lambda row: row.sampler != OURS):
        table.add_row(
            row.sampler,
            str(row.world_size),
            f"{row.plan_seconds:.3f}",
            _or_dash(row.ms_per_batch, "{:.3f}"),
            style="bold" if row.sampler == OURS else None,
        )
    return table


def _large_table(bench: BucketsBench) -> Table:
    table = _table(
        "Large sets: stretto alone",
        left=("task",),
        right=("sequences", "distinct", "K", "s"),
        caption=f"Rank 0 of 1; the least of {bench.seeds} repeats.",
    )
    for row in bench.edges:
        table.add_row(
            row.task, f"{row.num_lengths:,}", f"{row.num_distinct:,}", str(row.num_buckets), f"{row.seconds:.3f}"
        )
    return table


def _contestants_table(bench: BucketsBench) -> Table:
    table = _table(
        "Contestants", left=("sampler", "note"), right=(), caption=f"{bench.machine}. Whole run: {bench.seconds:.0f} s."
    )
    notes = {row.sampler: row.note for row in bench.rows}
    for sampler, note in notes.items():
        table.add_row(sampler, note, style="bold" if sampler.startswith(OURS) else None)
    for line in bench.missing:
        sampler, _, reason = line.partition(": ")
        table.add_row(sampler, f"left out: {escape(reason)}", style="yellow")
    return table


def _table(title: str, *, left: Sequence[str], right: Sequence[str], caption: str) -> Table:
    table = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    for heading in left:
        table.add_column(heading, no_wrap=heading.strip() in ("sampler", "law"))
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def _share(value: float) -> str:
    """A share in percent that never rounds to none or all when it is neither."""
    text = f"{value:.1%}"
    if text == "100.0%" and value < 1:
        return "<100%"
    if text == "0.0%" and value > 0:
        return "<0.1%"
    return "100%" if value == 1 else "0" if value == 0 else text


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
