"""`python -m experiments PAPER`."""

import os
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from experiments.bucketing import BucketingSettings, Contender, reproduce_bucketing
from experiments.bucketing_figure import write_bucketing_figure
from experiments.bucketing_page import bucketing_table, write_bucketing_page
from experiments.graph import GraphSettings, reproduce_graph
from experiments.graph_figure import write_graph_figure
from experiments.graph_page import graph_table, write_graph_page
from experiments.large_batch import reproduce_large_batch
from experiments.large_batch_figure import write_large_batch_figure
from experiments.large_batch_page import write_large_batch_page
from experiments.large_batch_settings import LargeBatchSettings
from experiments.large_batch_table import holding_lines, large_batch_table
from experiments.multigrid import reproduce_multigrid
from experiments.multigrid_figure import write_multigrid_figure
from experiments.multigrid_page import write_multigrid_page
from experiments.multigrid_settings import MultigridSettings
from experiments.multigrid_table import multigrid_table
from stretto.cli.console import console_for
from stretto.cli.fault import show_error
from stretto.cli.parsing import checked_flags, choose, parse
from stretto.distributed import World, detect_lost_rank, is_distributed, join_ranks, launch_ranks, leave_exit_code
from stretto.errors import StrettoError
from stretto.training import EpochRecord

WIDE_TABLE = 110
LONGEST_EPOCH = 120.0
"""Minutes that workers wait for those that train without them."""
PAPERS = {
    "bucketing": "the same net to the same loss with ever more length buckets (Khomenko et al. 2016)",
    "graph": "parallelism found in the graph, with one stream and many (Hwang and Sung 2015)",
    "large-batch": "five applications at up to 64 times the batch, by rule or tuned anew (You et al. 2019)",
    "multigrid": "solvers in time at ever longer sequences: multigrid and shooting (Moon and Cyr 2022)",
}
SMOKE_TEST = "A smoke test: its times mean nothing."
TINY_NETS = "A smoke test: its numbers mean nothing."


def run(words: list[str]) -> int:
    """Run a paper's experiment."""
    choice = choose(words, PAPERS, usage="python -m experiments PAPER [flags]")
    if choice is None:
        return 0
    name, rest = choice
    runs = {"bucketing": _bucketing, "graph": _graph, "large-batch": _large_batch, "multigrid": _multigrid}
    return runs[name](rest)


def _bucketing(words: list[str]) -> int:
    settings = checked_flags(parse(BucketingSettings, words, prog="python -m experiments bucketing"))
    if settings.nproc > 1 and not is_distributed():
        words = ["bucketing", *words]
        return launch_ranks(words, nproc=settings.nproc, threads=None, max_restarts=0, module="experiments")
    try:
        with join_ranks(timeout_minutes=LONGEST_EPOCH) as world, detect_lost_rank():
            return _compare_buckets(settings, world)
    except StrettoError as error:
        if not is_distributed():
            raise
        return leave_exit_code(show_error(error))


def _compare_buckets(settings: BucketingSettings, world: World) -> int:
    console = console_for(WIDE_TABLE) if world.is_rank0 else Console(quiet=True)

    def watch(contender: Contender, record: EpochRecord) -> None:
        workers = "" if settings.nproc == 1 else f"{contender.workers} workers  "
        console.print(
            f"{workers}{'none' if contender.buckets == 1 else contender.buckets:>5} buckets  epoch {record.epoch:>2}  "
            f"valid {record.valid_loss:.4f}  {record.seconds:6.2f} s  padding {record.padding:.1%}",
            highlight=False,
        )

    if world.size > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.size))
    result = reproduce_bucketing(settings, watch=watch, world=world)
    if world.is_rank0:
        console.print(bucketing_table(result))
        write_bucketing_figure(result, settings.out / "bucketing.svg")
        write_bucketing_page(result, settings.out / "bucketing.html")
        files = {"table": "bucketing.json", "plot": "bucketing.svg", "page": "bucketing.html"}
        _tell_files(console, settings.out, files)
    return 0


def _graph(words: list[str]) -> int:
    settings = checked_flags(parse(GraphSettings, words, prog="python -m experiments graph"))
    console = console_for(WIDE_TABLE)
    result = reproduce_graph(settings, tell=lambda line: console.print(Text(line), soft_wrap=True))
    console.print(graph_table(result))
    if settings.quick:
        console.print(Text(SMOKE_TEST))
    write_graph_figure(result, settings.out / "graph.svg")
    write_graph_page(result, settings.out / "graph.html")
    files = {"table": "graph.json", "rows": "graph.csv", "plot": "graph.svg", "page": "graph.html"}
    _tell_files(console, settings.out, files)
    return 0


def _large_batch(words: list[str]) -> int:
    settings = checked_flags(parse(LargeBatchSettings, words, prog="python -m experiments large-batch"))
    console = console_for(WIDE_TABLE)
    result = reproduce_large_batch(settings, tell=lambda line: console.print(Text(line), soft_wrap=True))
    console.print(large_batch_table(result))
    for line in holding_lines(result, "legw"):
        console.print(Text(f"legw, {line}"), soft_wrap=True)
    if settings.quick:
        console.print(Text(TINY_NETS))
    write_large_batch_figure(result, settings.out / "large-batch.svg")
    write_large_batch_page(result, settings.out / "large-batch.html")
    files = {
        "table": "large-batch.json",
        "rows": "large-batch.csv",
        "plot": "large-batch.svg",
        "page": "large-batch.html",
    }
    _tell_files(console, settings.out, files)
    return 0


def _multigrid(words: list[str]) -> int:
    settings = checked_flags(parse(MultigridSettings, words, prog="python -m experiments multigrid"))
    console = console_for(WIDE_TABLE)
    result = reproduce_multigrid(settings, tell=lambda line: console.print(Text(line), soft_wrap=True))
    console.print(multigrid_table(result))
    if settings.quick:
        console.print(Text(SMOKE_TEST))
    write_multigrid_figure(result, settings.out / "multigrid.svg")
    write_multigrid_page(result, settings.out / "multigrid.html")
    _tell_files(console, settings.out, {"table": "multigrid.json", "plot": "multigrid.svg", "page": "multigrid.html"})
    return 0


def _tell_files(console: Console, folder: Path, files: dict[str, str]) -> None:
    for what, name in files.items():
        console.print(Text(f"{what:<6} {folder / name}"), soft_wrap=True)


if __name__ == "__main__":
    from stretto.cli.main import report_errors

    raise SystemExit(report_errors(run, sys.argv[1:]))
