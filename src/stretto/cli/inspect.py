"""`stretto inspect DATA`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from stretto.cli.flags import check_flags, parse
from stretto.data import load_handwriting, open_sequences
from stretto.files import check_ending
from stretto.report import PAGE_ENDINGS, inspect_lengths, render, write_inspection_page
from stretto.training import Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectSettings:
    """Counts, lengths and buckets of a data set, and its padding with and without them.

    Attributes:
        data: A file or folder (.npz, .parquet, .arrow, .feather, .txt, .txt.gz, .inkml, IAM-OnDB), or the word
            handwriting for the embedded set.
        batch_size: Most sequences in a batch; 32 if max-padded-steps is left out too.
        max_padded_steps: Most steps in a batch, padding included: sequences times longest.
        num_buckets: How many, or auto: as many as pay.
        html: Also write a page to this file.
    """

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    batch_size: Count | None = None
    max_padded_steps: Count | None = None
    num_buckets: Count | Literal["auto"] = "auto"
    html: Path | None = None


def run(words: list[str]) -> int:
    """Inspect a data set."""
    settings = check_flags(parse(InspectSettings, words, prog="stretto inspect"))
    check_ending(settings.html, flag="--html", endings=PAGE_ENDINGS)
    named = settings.data == "handwriting" and not Path(settings.data).exists()
    data = load_handwriting() if named else open_sequences(settings.data)
    batch_size = 32 if settings.batch_size is None and settings.max_padded_steps is None else settings.batch_size
    inspection = inspect_lengths(
        data, batch_size=batch_size, max_padded_steps=settings.max_padded_steps, num_buckets=settings.num_buckets
    )
    Console().print(render(inspection))
    if settings.html is not None:
        write_inspection_page(inspection, settings.html)
        print(f"page  {settings.html}")
    return 0
