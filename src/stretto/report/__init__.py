"""What a person sees of data and runs: the terminal, HTML pages and plots."""

from stretto.report.confusion import confusion_html, most_confused
from stretto.report.console import console_view
from stretto.report.inspect_page import Inspection, inspect_lengths, length_histogram, render, write_inspection_page
from stretto.report.loggers import open_logger
from stretto.report.page import (
    PAGE_ENDINGS,
    Html,
    bullets,
    columns,
    duration,
    escape,
    facts,
    figure,
    grid,
    join,
    page,
    paragraph,
)
from stretto.report.plot import AMBER, BLUE, GREY, TEAL, plot
from stretto.report.run_page import PAGE_NAME, format_metric, run_page, write_run_report
from stretto.report.sweep_page import SweepRun, write_sweep_page

__all__ = [
    "AMBER",
    "BLUE",
    "GREY",
    "PAGE_ENDINGS",
    "PAGE_NAME",
    "TEAL",
    "Html",
    "Inspection",
    "SweepRun",
    "bullets",
    "columns",
    "confusion_html",
    "console_view",
    "duration",
    "escape",
    "facts",
    "figure",
    "format_metric",
    "grid",
    "inspect_lengths",
    "join",
    "length_histogram",
    "most_confused",
    "open_logger",
    "page",
    "paragraph",
    "plot",
    "render",
    "run_page",
    "write_inspection_page",
    "write_run_report",
    "write_sweep_page",
]
