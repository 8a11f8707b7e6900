"""`stretto report RUN`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from stretto.cli.flags import parse
from stretto.errors import StrettoError
from stretto.report import write_run_report
from stretto.training import read_events


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
    if not read_events(settings.run):
        raise StrettoError(
            f"{str(settings.run)!r} has recorded nothing yet", fix="Start it again with --resume, or name another run."
        )
    print(f"report  {write_run_report(settings.run, settings.out)}")
    return 0
