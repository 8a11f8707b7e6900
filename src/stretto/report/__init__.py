"""Events to what a person sees: the console and HTML pages."""

from stretto.report.console import console_view
from stretto.report.inspection import inspect_lengths, render
from stretto.report.inspection_page import write_inspection_page
from stretto.report.length_histogram import length_histogram
from stretto.report.line_chart import Line, line_chart
from stretto.report.page import (
    BigNumber,
    Html,
    Section,
    bullets,
    columns,
    duration,
    escaped,
    facts,
    figure,
    grid,
    headline,
    joined,
    page,
    paragraph,
    sentence,
)
from stretto.report.plot import AMBER, BLUE, GREY, PALE, TEAL, log_axis, plot
from stretto.report.run_report import write_run_report

__all__ = [
    "AMBER",
    "BLUE",
    "GREY",
    "PALE",
    "TEAL",
    "BigNumber",
    "Html",
    "Line",
    "Section",
    "bullets",
    "columns",
    "console_view",
    "duration",
    "escaped",
    "facts",
    "figure",
    "grid",
    "headline",
    "inspect_lengths",
    "joined",
    "length_histogram",
    "line_chart",
    "log_axis",
    "page",
    "paragraph",
    "plot",
    "render",
    "sentence",
    "write_inspection_page",
    "write_run_report",
]
