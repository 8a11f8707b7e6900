"""`stretto bench NAME`."""

from rich.text import Text

from stretto.benchmarks import buckets_tables, faults_tables, kernels_tables, workers_tables
from stretto.benchmarks.buckets import BucketsBenchSettings, run_buckets_bench
from stretto.benchmarks.faults import FaultsBenchSettings, run_faults_bench
from stretto.benchmarks.kernels import KernelsBenchSettings, run_kernels_bench
from stretto.benchmarks.kernels_page import write_kernels_page
from stretto.benchmarks.workers import WorkersBenchSettings, run_workers_bench
from stretto.benchmarks.workers_page import write_workers_figure, write_workers_page
from stretto.cli.console import console_for
from stretto.cli.parsing import checked_flags, choose, parse
from stretto.storage import write_text_atomically

BENCHMARKS = {
    "buckets": "batches of our sampler beside Lhotse's, Hugging Face's and simpler edges",
    "faults": "workers killed and stopped while they train, and what is lost",
    "kernels": "training steps of our layers beside torch's, JAX's and the Python loop",
    "workers": "two workers beside one, and what more of them would reach",
}


def run(words: list[str]) -> int:
    """Run a benchmark."""
    choice = choose(words, BENCHMARKS, usage="stretto bench NAME [flags]")
    if choice is None:
        return 0
    name, rest = choice
    return {"buckets": _buckets, "faults": _faults, "kernels": _kernels, "workers": _workers}[name](rest)


def _buckets(words: list[str]) -> int:
    settings = parse(BucketsBenchSettings, words, prog="stretto bench buckets")
    console = console_for(buckets_tables.WIDE + 2)
    with console.status("") as status:
        bench = run_buckets_bench(settings, tell=status.update)
    for table in buckets_tables.tables(bench, width=console.width):
        console.print(table)
    for missing in bench.missing:
        console.print(Text(f"left out: {missing}"), soft_wrap=True)
    if settings.out is not None:
        console.print(Text(f"table  {settings.out}"), soft_wrap=True)
    return 0


def _faults(words: list[str]) -> int:
    settings = checked_flags(parse(FaultsBenchSettings, words, prog="stretto bench faults"))
    console = console_for(80)
    with console.status("") as status:
        tell = status.update if console.is_terminal else lambda line: console.print(Text(line), soft_wrap=True)
        bench = run_faults_bench(settings, tell=tell)
    for table in faults_tables.tables(bench):
        console.print(table)
    for missing in bench.missing:
        console.print(Text(f"left out: {missing}"), soft_wrap=True)
    if settings.json is not None:
        console.print(Text(f"table  {settings.json}"), soft_wrap=True)
    return 0 if bench.kept_all else 1


def _kernels(words: list[str]) -> int:
    settings = parse(KernelsBenchSettings, words, prog="stretto bench kernels")
    console = console_for(kernels_tables.WIDE + 2)
    with console.status("") as status:
        # It takes minutes: where no status line can be shown, plain lines tell how far it is.
        tell = status.update if console.is_terminal else lambda line: console.print(Text(line), soft_wrap=True)
        bench = run_kernels_bench(settings, tell=tell)
    for table in kernels_tables.tables(bench, width=console.width):
        console.print(table, "")
    for line in [*kernels_tables.slower_lines(bench), *(f"left out: {missing}" for missing in bench.missing)]:
        console.print(Text(line), soft_wrap=True)
    console.print(Text(kernels_tables.machine_line(bench)), soft_wrap=True)
    if settings.json is not None:
        console.print(Text(f"table  {settings.json}"), soft_wrap=True)
    if settings.out is not None:
        path = settings.out / "kernels.html"
        write_kernels_page(bench, path)
        console.print(Text(f"page   {path}"), soft_wrap=True)
    return 0


def _workers(words: list[str]) -> int:
    settings = checked_flags(parse(WorkersBenchSettings, words, prog="stretto bench workers"))
    console = console_for(90)
    with console.status("") as status:
        tell = status.update if console.is_terminal else lambda line: console.print(Text(line), soft_wrap=True)
        bench = run_workers_bench(settings, tell=tell)
    for table in workers_tables.tables(bench):
        console.print(table)
    for missing in bench.missing:
        console.print(Text(f"left out: {missing}"), soft_wrap=True)
    if settings.json is not None:
        console.print(Text(f"table  {settings.json}"), soft_wrap=True)
    if settings.out is not None:
        write_workers_page(bench, settings.out / "workers.html")
        write_workers_figure(bench, settings.out / "workers.svg")
        write_text_atomically(settings.out / "workers.json", bench.to_json())
        for what, name in (("page", "workers.html"), ("plot", "workers.svg"), ("table", "workers.json")):
            console.print(Text(f"{what:<6} {settings.out / name}"), soft_wrap=True)
    return 0
