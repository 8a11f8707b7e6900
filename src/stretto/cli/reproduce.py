"""`stretto reproduce PAPER`."""

from rich.console import Console
from rich.text import Text

from stretto.cli.parsing import checked_flags, choose, parse
from stretto.recipes.bucketing import BucketingSettings, reproduce_bucketing
from stretto.recipes.bucketing_figure import write_bucketing_figure
from stretto.recipes.bucketing_page import bucketing_table, write_bucketing_page
from stretto.training.loop import EpochRecord

PAPERS = {"bucketing": "the same net to the same loss with ever more length buckets (Khomenko et al. 2016)"}


def run(words: list[str]) -> int:
    """Run a paper's experiment."""
    choice = choose(words, PAPERS, usage="stretto reproduce PAPER [flags]")
    if choice is None:
        return 0
    _, rest = choice
    settings = checked_flags(parse(BucketingSettings, rest, prog="stretto reproduce bucketing"))
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
    for what, ending in (("table", "json"), ("plot", "svg"), ("page", "html")):
        console.print(Text(f"{what:<6} {settings.out / f'bucketing.{ending}'}"), soft_wrap=True)
    return 0
