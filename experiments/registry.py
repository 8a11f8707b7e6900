"""The experiments by name, on the harness of the benchmarks."""

import csv
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.harness import Registry

experiment: Final = Registry("experiments", keeps_progress=True)


def to_dict(record: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON can hold them: paths as text."""
    values = dataclasses.asdict(record)
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def to_csv(records: Sequence[Any]) -> str:
    """The text of a CSV file with one row per dataclass; fields that are tuples are left out."""
    stream = io.StringIO()
    names = [name for name, value in dataclasses.asdict(records[0]).items() if not isinstance(value, tuple)]
    table = csv.writer(stream, lineterminator="\n")
    table.writerow(names)
    table.writerows([getattr(record, name) for name in names] for record in records)
    return stream.getvalue()
