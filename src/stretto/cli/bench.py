"""`stretto bench NAME`."""

from rich import box
from rich.table import Table
from rich.text import Text

from stretto.benchmarks import buckets_tables, kernels_tables, workers_tables
from stretto.benchmarks.buckets import BucketsBenchSettings, run_buckets_bench
from stretto.benchmarks.faults import KINDS, FaultsBenchSettings, run_faults_bench
from stretto.benchmarks.kernels import KernelsBenchSettings, run_kernels_bench
from stretto.benchmarks.kernels_page import write_kernels_page
from stretto.benchmarks.workers import WorkersBenchSettings, run_workers_bench
from stretto.cli.console import console_for
from stretto.cli.parsing import checked_flags, choose, parse

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
    table = Table(title="Workers struck while they train", box=box.SIMPLE_HEAD, show_header=False)
    struck = ", ".join(f"{sum(strike.kind == kind for strike in bench.strikes)} {what}" for kind, what in KINDS.items())
    for name, value in (
        ("workers", bench.workers),
        ("strikes", f"{len(bench.strikes)}: {struck}"),
        ("survived", bench.survived),
        ("resumed from a checkpoint", bench.resumed),
        ("epochs", bench.epochs),
        ("sequences lost", bench.lost),
        ("sequences repeated", bench.repeated),
        ("final weights equal the undisturbed run's", "yes, to the last bit" if bench.same_weights else "no"),
        ("seconds, both runs", f"{bench.seconds:.0f}"),
    ):
        table.add_row(name, str(value))
    console.print(table)
    if settings.json is not None:
        console.print(Text(f"table  {settings.json}"), soft_wrap=True)
    return 0


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
    if settings.json is not None:
        console.print(Text(f"table  {settings.json}"), soft_wrap=True)
    return 0
