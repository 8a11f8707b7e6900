"""What a person sees of data and runs: the terminal, HTML pages and plots."""

from stretto.report.console import console_view
from stretto.report.inspect_page import Inspection, inspect_lengths, length_histogram, render, write_inspection_page
from stretto.report.page import (
    BigNumber,
    Html,
    Section,
    bullets,
    columns,
    duration,
    escape,
    facts,
    figure,
    grid,
    headline,
    join,
    page,
    paragraph,
    sentence,
)
from stretto.report.plot import AMBER, BLUE, GREY, PALE, TEAL, log_axis, plot
from stretto.report.run_page import write_run_report

__all__ = [
    "AMBER",
    "BLUE",
    "GREY",
    "PALE",
    "TEAL",
    "BigNumber",
    "Html",
    "Inspection",
    "Section",
    "bullets",
    "columns",
    "console_view",
    "duration",
    "escape",
    "facts",
    "figure",
    "grid",
    "headline",
    "inspect_lengths",
    "join",
    "length_histogram",
    "log_axis",
    "page",
    "paragraph",
    "plot",
    "render",
    "sentence",
    "write_inspection_page",
    "write_run_report",
]
