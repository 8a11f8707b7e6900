"""`stretto bench NAME`."""

from rich.console import Console
from rich.text import Text

from stretto.benchmarks.buckets import BucketsBenchSettings, run_buckets_bench
from stretto.benchmarks.buckets_tables import WIDE, tables
from stretto.cli.parsing import choose, parse

BENCHMARKS = {"buckets": "batches of our sampler beside Lhotse's, Hugging Face's and simpler edges"}


def run(words: list[str]) -> int:
    """Run a benchmark."""
    choice = choose(words, BENCHMARKS, usage="stretto bench NAME [flags]")
    if choice is None:
        return 0
    _, rest = choice
    settings = parse(BucketsBenchSettings, rest, prog="stretto bench buckets")
    console = Console()
    if not console.is_terminal:
        # A file or pipe has no width of its own; this one shows every column.
        console = Console(width=max(console.width, WIDE + 2))
    with console.status("") as status:
        bench = run_buckets_bench(settings, tell=status.update)
    for table in tables(bench, width=console.width):
        console.print(table)
    for missing in bench.missing:
        console.print(Text(f"left out: {missing}"), soft_wrap=True)
    if settings.out is not None:
        console.print(Text(f"table  {settings.out}"), soft_wrap=True)
    return 0
