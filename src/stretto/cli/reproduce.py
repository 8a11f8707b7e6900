"""`stretto reproduce PAPER`."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from stretto.cli.console import console_for
from stretto.cli.parsing import checked_flags, choose, parse
from stretto.recipes.bucketing import BucketingSettings, reproduce_bucketing
from stretto.recipes.bucketing_figure import write_bucketing_figure
from stretto.recipes.bucketing_page import bucketing_table, write_bucketing_page
from stretto.recipes.graph import GraphSettings, reproduce_graph
from stretto.recipes.graph_figure import write_graph_figure
from stretto.recipes.graph_page import graph_table, write_graph_page
from stretto.training.loop import EpochRecord

WIDE_TABLE = 110
PAPERS = {
    "bucketing": "the same net to the same loss with ever more length buckets (Khomenko et al. 2016)",
    "graph": "parallelism found in the graph, with one stream and many (Hwang and Sung 2015)",
}


def run(words: list[str]) -> int:
    """Run a paper's experiment."""
    choice = choose(words, PAPERS, usage="stretto reproduce PAPER [flags]")
    if choice is None:
        return 0
    name, rest = choice
    return _bucketing(rest) if name == "bucketing" else _graph(rest)


def _bucketing(words: list[str]) -> int:
    settings = checked_flags(parse(BucketingSettings, words, prog="stretto reproduce bucketing"))
    console = Console()

    def watch(buckets: int, record: EpochRecord) -> None:
        console.print(
            f"{'none' if buckets == 1 else buckets:>5} buckets  epoch {record.epoch:>2}  "
            f"valid {record.valid_loss:.4f}  {record.seconds:6.2f} s  padding {record.padding:.1%}",
            highlight=False,
        )

    result = reproduce_bucketing(settings, watch=watch)
    console.print(bucketing_table(result))
    write_bucketing_figure(result, settings.out / "bucketing.svg")
    write_bucketing_page(result, settings.out / "bucketing.html")
    _tell_files(console, settings.out, {"table": "bucketing.json", "plot": "bucketing.svg", "page": "bucketing.html"})
    return 0


def _graph(words: list[str]) -> int:
    settings = checked_flags(parse(GraphSettings, words, prog="stretto reproduce graph"))
    console = console_for(WIDE_TABLE)
    result = reproduce_graph(settings, tell=lambda line: console.print(Text(line), soft_wrap=True))
    console.print(graph_table(result))
    if settings.quick:
        console.print(Text("A smoke test: its times mean nothing."))
    write_graph_figure(result, settings.out / "graph.svg")
    write_graph_page(result, settings.out / "graph.html")
    files = {"table": "graph.json", "rows": "graph.csv", "plot": "graph.svg", "page": "graph.html"}
    _tell_files(console, settings.out, files)
    return 0


def _tell_files(console: Console, folder: Path, files: dict[str, str]) -> None:
    for what, name in files.items():
        console.print(Text(f"{what:<6} {folder / name}"), soft_wrap=True)
