"""The tables of `stretto bench time`, for the terminal and the page alike."""

from collections.abc import Iterable, Sequence
from typing import Final

from rich import box
from rich.table import Table
from rich.text import Text

from bench.kernels_tables import shown
from bench.time_contest import NO_GOAL, TORCH, Goal, Row
from bench.time_model import ManyRanks, Prediction
from bench.time_ranks import RanksRun
from bench.time_solvers import TimeBench
from bench.time_training import SLACK, Training
from bench.workers_tables import BenchTable

WIDE: Final = 118
TITLES: Final = {
    "carried": "Carried boundaries: one sweep a training step",
    "forgets": "Exact chunks",
    "chaotic": "Exact solvers on chaotic nets: what the search costs that ends step after step",
    "auto": 'solver="auto" on trained nets that remember',
    "recordings": 'solver="auto" on whole recordings',
    "others": "Other methods",
}
CAPTIONS: Final = {
    "carried": "Least times. While weights stay, outputs of carried boundaries come to those of step after step, which "
    "was checked to 1e-5. Differences and residual are those after one update of all weights by Adam (2e-3), as large "
    "as it makes them; gradients are cut at boundaries, or carried too.",
    "forgets": "Least times. Exact: outputs and gradients are those of step after step within 1e-5, else there would "
    "be no table.",
    "chaotic": "Means of all calls, searches included, which took turns call by call. The largest Lyapunov exponent is "
    "above zero: nothing is ever forgotten. Solvers search at first and then ever more rarely, the dearer the rarer.",
    "auto": "Means of all calls, trials included, which took turns call by call.",
    "recordings": "Means of all calls, trials included, which took turns call by call; nn.GRU takes padded ones.",
    "others": "Least times. Newton's method is DEER's; multigrid is Moon and Cyr's, with their settings, or until "
    "chunks agree. All but what is as published is exact within 1e-5.",
}
RATIOS: Final = (
    "over: the time of the other over this one; serial is our own kernel, step after step. Forward and backward with "
    "the gradients of all weights, in turns. outputs, gradients: largest difference from serial, over the largest."
)
MADE_BY: Final = {
    "JAX scan": "JAX scan: jit of value_and_grad, the faster of unroll 1 and 8; it uses every processor.",
}


def bench_tables(bench: TimeBench) -> list[BenchTable]:
    """A table for each case that was run."""
    made = []
    for case, title in TITLES.items():
        rows = [row for row in bench.rows if row.case == case]
        # Of some there are two nets of one size.
        nets = dict.fromkeys(row.net for row in rows) if case in ("forgets", "chaotic", "others") else ()
        made += [_steps(f"{title}: {net}", [row for row in rows if row.net == net]) for net in nets]
        made += [] if nets else [_steps(title, rows)]
    made.append(_ranks(bench.ranks))
    if bench.training is not None:
        made.append(_training(bench.training))
    if bench.many is not None:
        made.append(_many(bench.many))
    return [table for table in made if table.rows]


def tables(bench: TimeBench) -> list[Table]:
    """The same for the terminal."""
    return [_drawn(table) for table in bench_tables(bench)]


def machine_line(bench: TimeBench) -> str:
    """Where it ran, with how many threads, and what of it counts."""
    judged = bench.judged
    goals = f" Goals met: {sum(judged)} of {len(judged)}." if judged else ""
    quick = " A smoke test: its times mean nothing." if bench.quick else ""
    return f"{bench.machine}; threads: {bench.threads}. Whole run: {bench.seconds:.0f} s.{goals}{quick}"


def _drawn(given: BenchTable) -> Table:
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
    for heading in given.headings:
        table.add_column(heading, justify="left" if heading in ("way", "T, B, H") else "right")
    for row in given.rows:
        table.add_row(*map(Text, row), style="yellow" if "no" in row else None)
    return table


def _steps(title: str, rows: Sequence[Row]) -> BenchTable:
    cells = tuple(
        (
            f"{row.num_steps}, {row.batch}, {row.hidden_size}",
            f"{row.way}, fell back" if row.fell_back else row.way,
            shown(1e3 * row.seconds),
            _ratio(row.over_torch),
            _ratio(row.over_serial),
            _goals(row.goal),
            _met(row.judged),
            _off(row.output_error),
            _off(row.gradient_error),
            "-" if row.residual is None else _off(row.residual),
        )
        for row in rows
    )
    turns = sorted({row.timing.rounds for row in rows if row.way != TORCH})
    told = f"Turns: {', '.join(map(str, turns))}{'; of nn.GRU two' if any(row.way == TORCH for row in rows) else ''}."
    notes = [note for way, note in MADE_BY.items() if any(row.way == way for row in rows)]
    nets = dict.fromkeys(f"T={row.num_steps}, H={row.hidden_size}: {row.net}." for row in rows)
    said = dict.fromkeys(f"{row.way}, H={row.hidden_size}: {row.told}." for row in rows if row.told)
    captions = [CAPTIONS[case] for case in dict.fromkeys(row.case for row in rows)]
    return BenchTable(
        title=title,
        headings=(
            *("T, B, H", "way", "ms", "over nn.GRU", "over serial", "goals", "met"),
            *("outputs", "gradients", "residual"),
        ),
        rows=cells,
        caption="\n".join([RATIOS, *captions, told, *notes, *nets, *said]),
    )


def _ranks(runs: Sequence[RanksRun]) -> BenchTable:
    rows = tuple(
        (
            f"{run.num_steps}, 1, {run.hidden_size}",
            f"{run.timings['whole'].least:.3f}",
            f"{run.timings['relay'].least:.3f}",
            _ratio(run.ratio),
            _goal(run.goal),
            _met(run.judged),
            f"{run.rounds}, {run.backward_rounds}",
            f"{run.work:.2f}",
            f"{run.sharing:.2f}",
            _off(run.output_error),
            _off(run.gradient_error),
            _off(run.residual),
        )
        for run in runs
    )
    told = [f"H={run.hidden_size}: {run.net}." for run in runs]
    return BenchTable(
        title="One long sequence over two gloo ranks, one thread each, exact",
        headings=(
            *("T, B, H", "1 rank s", "2 ranks s", "ratio", "goal", "met", "rounds", "work", "at once"),
            *("outputs", "gradients", "residual"),
        ),
        rows=rows,
        caption="\n".join(
            [
                "Recordings joined. ratio: of least times, in turns; the sum of gradients included. rounds: walks of a "
                "block, forwards and backwards. work: steps walked forwards, over those of a block. at once: what a "
                "block takes when both ranks work, nothing exchanged, over what it takes alone. outputs, gradients: "
                "largest difference from one rank, over the largest value.",
                *told,
            ]
        ),
    )


def _training(training: Training) -> BenchTable:
    best = training.best.way
    rows = tuple(
        (
            run.way,
            shown(sum(epoch.seconds for epoch in run.epochs) / len(run.epochs)),
            " ".join(f"{100 * epoch.accuracy:.1f}" for epoch in run.epochs),
            "not" if run.reached is None else shown(run.reached),
            _ratio(run.over_torch),
            _ratio(run.over_serial),
            _goals(run.goal),
            _met(training.judged) if run.way == best else "-",
            _off(run.epochs[-1].residual),
        )
        for run in training.runs
    )
    return BenchTable(
        title=f"Training to the accuracy of step after step, H {training.hidden_size}",
        headings=(
            *("way", "s an epoch", "test accuracy % after each epoch", "there after s"),
            *("over nn.GRU", "over serial", "goals", "met", "residual"),
        ),
        rows=rows,
        caption=f"One label a step, {training.recordings} whole recordings of {training.num_steps:,} steps in all, one "
        f"at a time, Adam 2e-3; accuracy step after step, whatever the training. There: at {100 * training.aim:.1f} %, "
        f"the last of step after step less {100 * SLACK:.1f} points; who is not goes on, up to twice as many epochs. "
        f"nn.GRU is estimated: {training.torch_epoch:.0f} s an epoch, from one recording of {training.torch_steps:,} "
        "steps, for as many epochs as step after step needed. Goals are for the better of the carried.",
    )


def _many(many: ManyRanks) -> BenchTable:
    checks = [
        f"H={check.hidden_size}: the model is off by {check.off_one:+.0%} for one rank, by {check.off_two:+.0%} for "
        f"two, and by {check.off_two_sharing:+.0%} when it is allowed for that two at once slow each other down. They "
        f"walked {'as' if check.same_rounds else 'not as'} often as was counted."
        for check in many.checks
    ]
    return BenchTable(
        title="Predicted for more ranks, one thread each, exact",
        headings=(
            *("T, B, H", "ranks", "block / memory", "rounds", "work", "back", "messages", "over serial", "goal", "met"),
        ),
        rows=tuple(_predicted(many.predictions)),
        caption="\n".join(
            [
                "over serial: our own kernel, step after step, on one rank with one thread. Rounds and work are "
                "counted on the net itself, forwards and backwards. As many cores as ranks, each with memory as fast "
                "as here; messages as between two ranks here, sums and comparisons round a ring.",
                *checks,
            ]
        ),
    )


def _predicted(predictions: Iterable[Prediction]) -> Iterable[tuple[str, ...]]:
    for row in predictions:
        yield (
            f"{row.num_steps}, 1, {row.hidden_size}",
            str(row.ranks),
            "-" if row.memories is None else shown(row.memories),
            f"{row.rounds}, {row.backward_rounds}",
            f"{row.work:.2f}",
            f"{row.backward_work:.2f}",
            f"{row.talking:.0%}",
            shown(row.speed_up),
            _goal(row.goal),
            _met(row.judged),
        )


def _ratio(value: float | None) -> str:
    return "-" if value is None else shown(value)


def _goal(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _goals(goal: Goal) -> str:
    """Over torch's layer and over our kernel."""
    return "-" if goal == NO_GOAL else f"{_goal(goal.over_torch)}, {_goal(goal.over_serial)}"


def _met(judged: Sequence[bool]) -> str:
    return "-" if not judged else "yes" if all(judged) else "no"


def _off(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"
