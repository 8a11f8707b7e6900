"""The experiments by name, on the harness of the benchmarks."""

import dataclasses
from pathlib import Path
from typing import Any, Final

from bench.harness import Registry

experiment: Final = Registry("experiments", keeps_progress=True)


def to_dict(record: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON can hold them: paths as text."""
    values = dataclasses.asdict(record)
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
