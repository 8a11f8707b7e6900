"""`stretto report RUN`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from stretto.cli.flags import parse
from stretto.report import write_run_report


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """The HTML page of a run, finished or not.

    Attributes:
        run: The run folder, as `stretto train` names it.
        out: The file to write; left out, report.html in the run folder.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    out: Path | None = None


def run(words: list[str]) -> int:
    """Write the page."""
    settings = parse(ReportSettings, words, prog="stretto report")
    print(f"report  {write_run_report(settings.run, settings.out)}")
    return 0
