"""Benchmarks in small, and what their tables hold."""

from collections.abc import Sequence
from typing import Any

from bench.harness import Report, Table, bench


def measure(name: str, *flags: str) -> Report:
    """Run a benchmark with --quick and other flags."""
    return bench.measure(name, bench.parse(name, ["--quick", *flags]))


def column(tables: Sequence[Table], name: str) -> list[Any]:
    """All values under a heading."""
    return [row[table.columns.index(name)] for table in tables if name in table.columns for row in table.rows]
