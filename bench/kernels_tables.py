"""The result of the kernel benchmark as tables: all columns from 120 characters on, the main ones below."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from rich import box
from rich.table import Table
from rich.text import Text

from bench.kernel_comparison import Comparison
from bench.kernels import KernelsBench
from bench.training_step import StepShape

WIDE: Final = 118
TITLES: Final = {
    "shapes": "Training step, forward and backward with the gradients of all weights",
    "bidirectional": "Both directions in two layers",
    "stack": "Three layers, beside the same layers one after another and torch's",
    "hidden": "Large layers",
    "threads": "Threads",
}
WORDS: Final = {"net", "peer", "way", "cache", "limit", "grows", "others"}
AXES: Final = {"num_steps": "T", "batch": "B", "hidden_size": "H"}
# Headings, and whether a narrow terminal shows them too.
COMPARISON: Final = {
    "net": True,
    "T, B, F, H": True,
    "peer": True,
    "us/step": False,
    "ours ms": True,
    "peer ms": True,
    "ratio": True,
    "goal": True,
    "met": True,
    "medians": False,
    "error": False,
}
RATIO: Final = (
    "ratio: the peer's least time over ours, of one interleaved run (A, B, A, B, ...); medians: the same of medians.\n"
    "us/step: ours, a time step of all sequences. error: largest difference of outputs and gradients, over the largest."
)

CONTESTANTS: Final = {
    "JAX scan": "JAX scan: jit of value_and_grad, the input's product taken out by hand, the faster of unroll 1 and 8; "
    "it uses every processor, whatever --threads says.",
    "Python loop": "LayerNormLSTM: its recurrent gain starts at 0.3; with 1 it is chaotic, and no two ways agree.",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchTable:
    """A table as text, for the terminal and for a page.

    Attributes:
        title: Above it.
        headings: Of its columns, and whether a narrow terminal shows them too.
        rows: Cells as they are shown.
        caption: Below it.
    """

    title: str
    headings: Mapping[str, bool]
    rows: tuple[tuple[str, ...], ...]
    caption: str


def bench_tables(bench: KernelsBench) -> list[BenchTable]:
    """A table for each part that was run."""
    made = [
        _comparison_table(title, [row for row in bench.comparisons if row.topic == topic])
        for topic, title in TITLES.items()
    ]
    made += [
        _ragged_table(bench),
        _memory_table(bench),
        _compile_table(bench),
        _limits_table(bench),
        _growth_table(bench),
    ]
    return [table for table in made if table.rows]


def tables(bench: KernelsBench, *, width: int = WIDE) -> list[Table]:
    """The tables for so many columns of text; the machine stands below the last."""
    return [_drawn(table, wide=width >= WIDE) for table in bench_tables(bench)]


def shown(value: float) -> str:
    """A number with three digits that count, or all in front of the point."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def machine_line(bench: KernelsBench) -> str:
    """Where it ran, with how many threads, and what of it counts."""
    quick = " A smoke test: its times mean nothing." if bench.quick else ""
    return f"{bench.machine}; threads: {bench.threads}. Whole run: {bench.seconds:.0f} s.{quick}"


def slower_lines(bench: KernelsBench) -> list[str]:
    """What of ours did not run as generated code, each once."""
    found = {f"{row.net} ran without generated code, {row.kernel}" for row in bench.comparisons if row.kernel != "cpp"}
    return sorted(found)


def _drawn(given: BenchTable, *, wide: bool) -> Table:
    table = Table(
        title=Text(given.title),
        caption=Text(given.caption),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    shown = [wide or narrow for narrow in given.headings.values()]
    for heading, narrow in given.headings.items():
        if wide or narrow:
            table.add_column(heading, justify="left" if heading in WORDS else "right", no_wrap=True)
    for row in given.rows:
        cells = [Text(cell) for cell, kept in zip(row, shown, strict=True) if kept]
        table.add_row(*cells, style="yellow" if "no" in row else None)
    return table


def _comparison_table(title: str, rows: Sequence[Comparison]) -> BenchTable:
    cells = tuple(
        (
            row.net if row.topic != "threads" else f"{row.net}, {row.threads} threads",
            _sizes(row),
            row.peer,
            shown(1e6 * row.ours.least / row.num_steps),
            shown(1e3 * row.ours.least),
            shown(1e3 * row.theirs.least),
            shown(row.ratio),
            "-" if row.goal is None else f"{row.goal:g}",
            "-" if row.goal is None else _met(row.ratio >= row.goal),
            shown(row.ratio_of_medians),
            f"{row.error:.0e}",
        )
        for row in rows
    )
    peers, rounds = {row.peer for row in rows}, [row.ours.rounds for row in rows]
    told = (
        f"Rounds: {min(rounds, default=0)} to {max(rounds, default=0)}, equally many for all of a row; in each, steps "
        "one after another for a tenth of a second, or one that takes longer."
    )
    caption = "\n".join([RATIO, told, *(note for peer, note in CONTESTANTS.items() if peer in peers)])
    return BenchTable(title=title, headings=COMPARISON, rows=cells, caption=caption)


def _ragged_table(bench: KernelsBench) -> BenchTable:
    return BenchTable(
        title="LSTM on batches of unequal lengths: uniform in [10 %, 100 %] of T",
        headings={
            "way": True,
            "T, B, F, H": True,
            "real steps": False,
            "slots": False,
            "ms": True,
            "us/real step": True,
            "over full": True,
            "medians ms": False,
        },
        rows=tuple(
            (
                row.way,
                _sizes(row),
                f"{row.real_steps:,}",
                f"{row.slots:,}",
                shown(1e3 * row.timing.least),
                shown(row.us_per_real_step),
                f"{row.over_full:.2f}",
                shown(1e3 * row.timing.median),
            )
            for row in bench.ragged
        ),
        caption="over full: cost of a real step over one of our batch without padding; 1 is none lost. Least times.",
    )


def _memory_table(bench: KernelsBench) -> BenchTable:
    return BenchTable(
        title="Peak memory of a training step of an LSTM, beyond weights and batch",
        headings={"way": True, "T, B, F, H": True, "MB": True, "over nn.LSTM": True, "times outputs": True},
        rows=tuple(
            (row.way, _sizes(row), f"{row.extra_bytes / 1e6:.1f}", f"{row.over_torch:.2f}", f"{row.outputs:.1f}")
            for row in bench.memory
        ),
        caption="Peak resident memory less what was resident before, each in a fresh process, warm.",
    )


def _compile_table(bench: KernelsBench) -> BenchTable:
    return BenchTable(
        title="The first training step in a fresh process, less a later one",
        headings={
            "net": True,
            "cache": True,
            "forward s": True,
            "backward s": True,
            "wait s": True,
            "goal": True,
            "met": True,
            "analysis s": False,
            "building s": False,
            "processes": False,
        },
        rows=tuple(
            (
                row.net,
                "compiled before" if row.cached else "empty",
                f"{row.forward_seconds:.3f}",
                f"{row.backward_seconds:.3f}",
                f"{row.wait_seconds:.3f}",
                f"{row.goal:g}",
                _met(row.wait_seconds <= row.goal),
                f"{row.analysis_seconds:.3f}",
                f"{row.compile_seconds:.3f}",
                str(row.processes),
            )
            for row in bench.compiling
        ),
        caption="After all imports. wait: forward and backward. building: code generated, compiled or found, and "
        "loaded when the layer is built; what is left to the first step is in forward and backward alone.",
    )


def _limits_table(bench: KernelsBench) -> BenchTable:
    return BenchTable(
        title="Shares of what this machine can do",
        headings={
            "limit": True,
            "net": True,
            "T, B, F, H": True,
            "threads": True,
            "step ms": False,
            "ours G/s": True,
            "machine G/s": True,
            "share": True,
        },
        rows=tuple(
            (
                row.limit,
                row.net,
                _sizes(row),
                str(row.threads),
                shown(1e3 * row.timing.least),
                shown(row.rate / 1e9),
                shown(row.machine_rate / 1e9),
                f"{row.share:.0%}",
            )
            for row in bench.limits
        ),
        caption="products: FLOPs of all matrix products of the step a second; machine: torch.mm of 1024 x 1024.\n"
        "reads: bytes of recurrent weights a second, both ways; machine: reading as large a buffer over and over.",
    )


def _growth_table(bench: KernelsBench) -> BenchTable:
    return BenchTable(
        title="Growth of a GRU's training step",
        headings={"grows": True, "others": True, "ms at each size": True, "exponent": True, "off the line": True},
        rows=tuple(
            (
                AXES[item.axis],
                ", ".join(f"{short}={getattr(item.base, axis)}" for axis, short in AXES.items() if axis != item.axis),
                "  ".join(
                    f"{size}: {1e3 * seconds:.3g}" for size, seconds in zip(item.sizes, item.seconds, strict=True)
                ),
                f"{item.exponent:.2f}",
                f"{item.off_line:.0%}",
            )
            for item in bench.growth
        ),
        caption="exponent: of the power that fits best, 1 is linear. off the line: largest distance from a line.",
    )


def _sizes(shape: StepShape) -> str:
    return f"{shape.num_steps}, {shape.batch}, {shape.input_size}, {shape.hidden_size}"


def _met(is_met: bool) -> str:
    return "yes" if is_met else "no"
