"""What a person sees of data and runs: the terminal, HTML pages and plots."""

from stretto.report.console import console_view
from stretto.report.inspect_page import Inspection, inspect_lengths, length_histogram, render, write_inspection_page
from stretto.report.page import Html, bullets, columns, duration, escape, facts, figure, grid, join, page, paragraph
from stretto.report.plot import AMBER, BLUE, GREY, TEAL, plot
from stretto.report.run_page import write_run_report

__all__ = [
    "AMBER",
    "BLUE",
    "GREY",
    "TEAL",
    "Html",
    "Inspection",
    "bullets",
    "columns",
    "console_view",
    "duration",
    "escape",
    "facts",
    "figure",
    "grid",
    "inspect_lengths",
    "join",
    "length_histogram",
    "page",
    "paragraph",
    "plot",
    "render",
    "write_inspection_page",
    "write_run_report",
]
