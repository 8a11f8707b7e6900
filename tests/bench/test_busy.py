"""The benchmark beside busy processes in small: every combination gives a row. No time is judged."""

import pytest
from bench_reports import column, measure

from bench import busy


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
def test_every_combination_gives_a_row() -> None:
    report = measure("busy")
    assert tuple(report.tables[0].columns) == busy.COLUMNS
    rows = list(zip(column(report.tables, "busy processes"), column(report.tables, "threads"), strict=True))
    assert rows == [(count, threads) for count in (0, 1, 2) for threads in (1, 2)]
    assert all(time > 0 for time in column(report.tables, "ours ms"))
