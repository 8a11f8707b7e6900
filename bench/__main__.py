"""`python -m bench NAME`: side by side with peers."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from rich.console import Console
from rich.text import Text

from bench import (
    buckets_tables,
    faults_tables,
    kernels_tables,
    time_tables,
    training_tables,
    tuner_tables,
    workers_tables,
)
from bench.buckets import BucketsBenchSettings, run_buckets_bench
from bench.faults import FaultsBenchSettings, run_faults_bench
from bench.harness import run_render
from bench.kernels import KernelsBenchSettings, run_kernels_bench
from bench.kernels_page import write_kernels_page
from bench.time_page import write_time_figure, write_time_page
from bench.time_solvers import TimeBenchSettings, run_time_bench
from bench.training import TrainingBenchSettings, run_training_bench
from bench.training_page import write_training_page
from bench.tuner import TunerBenchSettings, run_tuner_bench
from bench.tuner_page import write_tuner_page
from bench.workers import WorkersBenchSettings, run_workers_bench
from bench.workers_page import write_workers_figure, write_workers_page
from stretto.cli.console import console_for
from stretto.cli.parsing import checked_flags, choose, parse
from stretto.files import write_text_atomically

BENCHMARKS = {
    "buckets": "batches of our sampler beside Lhotse's, Hugging Face's and simpler edges",
    "faults": "workers killed and stopped while they train, and what is lost",
    "kernels": "training steps of our layers beside torch's, JAX's and the Python loop",
    "time": "chunks of time, carried boundaries and ranks beside step after step, torch's layer and JAX's",
    "training": "all of Stretto beside plain PyTorch scripts of the same models: time to the same quality",
    "tuner": "the batch that the engine chooses beside a grid of them, and what measuring costs",
    "workers": "two workers beside one, and what more of them would reach",
}


def run(words: list[str]) -> int:
    """Run a benchmark, or render the stored results."""
    if words[:1] == ["render"]:
        return run_render(words[1:])
    choice = choose(words, BENCHMARKS, usage="python -m bench NAME [flags]")
    if choice is None:
        return 0
    name, rest = choice
    verbs = {
        "buckets": _buckets,
        "faults": _faults,
        "kernels": _kernels,
        "time": _time,
        "training": _training,
        "tuner": _tuner,
        "workers": _workers,
    }
    return verbs[name](rest)


class _Bench(Protocol):
    """The result of a benchmark that has a page."""

    @property
    def missing(self) -> tuple[str, ...]:
        """What was left out, and why."""

    def to_json(self) -> str:
        """All numbers."""


BenchT = TypeVar("BenchT", bound=_Bench)
Write: TypeAlias = Callable[[BenchT, Path], None]
Files: TypeAlias = Sequence[tuple[str, Path | None]]


@contextlib.contextmanager
def _telling(console: Console) -> Iterator[Callable[[str], None]]:
    """Where a benchmark says how far it is: a status line, or plain lines where none can be shown."""
    with console.status("") as status:
        yield status.update if console.is_terminal else lambda line: console.print(Text(line), soft_wrap=True)


def _tell_rest(console: Console, lines: Iterable[str], files: Files) -> None:
    """What else there is to say, and the files that were asked for."""
    written = [f"{what:<6} {path}" for what, path in files if path is not None]
    for line in [*lines, *written]:
        console.print(Text(line), soft_wrap=True)


def _written(
    name: str, bench: BenchT, out: Path | None, *, page: Write[BenchT], plot: Write[BenchT] | None = None
) -> Files:
    """Write the page, the plot if there is one, and all numbers into a folder, if one was named."""
    if out is None:
        return []
    html, svg, numbers = (out / f"{name}.{kind}" for kind in ("html", "svg", "json"))
    page(bench, html)
    if plot is not None:
        plot(bench, svg)
    write_text_atomically(numbers, bench.to_json())
    return [("page", html), ("plot", None if plot is None else svg), ("table", numbers)]


def _buckets(words: list[str]) -> int:
    settings = parse(BucketsBenchSettings, words, prog="python -m bench buckets")
    console = console_for(buckets_tables.WIDE + 2)
    with console.status("") as status:
        bench = run_buckets_bench(settings, tell=status.update)
    for table in buckets_tables.tables(bench, width=console.width):
        console.print(table)
    _tell_rest(console, _left_out(bench.missing), [("table", settings.out)])
    return 0


def _faults(words: list[str]) -> int:
    settings = checked_flags(parse(FaultsBenchSettings, words, prog="python -m bench faults"))
    console = console_for(80)
    with _telling(console) as tell:
        bench = run_faults_bench(settings, tell=tell)
    for table in faults_tables.tables(bench):
        console.print(table)
    _tell_rest(console, _left_out(bench.missing), [("table", settings.json)])
    return 0 if bench.kept_all else 1


def _kernels(words: list[str]) -> int:
    settings = parse(KernelsBenchSettings, words, prog="python -m bench kernels")
    console = console_for(kernels_tables.WIDE + 2)
    with _telling(console) as tell:
        bench = run_kernels_bench(settings, tell=tell)
    for table in kernels_tables.tables(bench, width=console.width):
        console.print(table, "")
    files = _written("kernels", bench, settings.out, page=write_kernels_page)
    lines = [*kernels_tables.slower_lines(bench), *_left_out(bench.missing), kernels_tables.machine_line(bench)]
    _tell_rest(console, lines, [("table", settings.json), *files])
    return 0


def _time(words: list[str]) -> int:
    settings = checked_flags(parse(TimeBenchSettings, words, prog="python -m bench time"))
    console = console_for(time_tables.WIDE + 2)
    with _telling(console) as tell:
        bench = run_time_bench(settings, tell=tell)
    for table in time_tables.tables(bench):
        console.print(table, "")
    many = bench.many
    plot = None if many is None else lambda _, path: write_time_figure(many, path)
    files = _written("time", bench, settings.out, page=write_time_page, plot=plot)
    lines = [*_left_out(bench.missing), time_tables.machine_line(bench)]
    _tell_rest(console, lines, [("table", settings.json), *files])
    return 0


def _training(words: list[str]) -> int:
    settings = checked_flags(parse(TrainingBenchSettings, words, prog="python -m bench training"))
    console = console_for(training_tables.WIDE + 2)
    with _telling(console) as tell:
        bench = run_training_bench(settings, tell=tell)
    for table in training_tables.tables(bench):
        console.print(table, "")
    files = _written("training", bench, settings.out, page=write_training_page)
    lines = [*_left_out(bench.missing), training_tables.machine_line(bench)]
    _tell_rest(console, lines, [("table", settings.json), *files])
    return 0


def _tuner(words: list[str]) -> int:
    settings = checked_flags(parse(TunerBenchSettings, words, prog="python -m bench tuner"))
    console = console_for(tuner_tables.WIDE + 2)
    with _telling(console) as tell:
        bench = run_tuner_bench(settings, tell=tell)
    for table in tuner_tables.tables(bench):
        console.print(table, "")
    files = _written("tuner", bench, settings.out, page=write_tuner_page)
    lines = [*_left_out(bench.missing), tuner_tables.machine_line(bench)]
    _tell_rest(console, lines, [("table", settings.json), *files])
    return 0


def _workers(words: list[str]) -> int:
    settings = checked_flags(parse(WorkersBenchSettings, words, prog="python -m bench workers"))
    console = console_for(110)
    with _telling(console) as tell:
        bench = run_workers_bench(settings, tell=tell)
    for table in workers_tables.tables(bench):
        console.print(table)
    files = _written("workers", bench, settings.out, page=write_workers_page, plot=write_workers_figure)
    _tell_rest(console, _left_out(bench.missing), [("table", settings.json), *files])
    return 0


def _left_out(missing: Iterable[str]) -> list[str]:
    return [f"left out: {what}" for what in missing]


if __name__ == "__main__":
    from stretto.cli.main import report_errors

    raise SystemExit(report_errors(run, sys.argv[1:]))
