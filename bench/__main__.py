"""`python -m bench NAME [flags]`: compare Stretto with other implementations.

`python -m bench render` writes the pages of the documentation from the results in `bench/results`.
"""

import importlib
import sys
from typing import Final

from bench.harness import bench, run_render
from stretto.cli import report_errors

MODULES: Final = (
    "buckets",
    "busy",
    "faults",
    "gpu_prediction",
    "gpu_targets",
    "kernels",
    "loops",
    "time_parallel",
    "training",
    "tuner",
    "workers",
)


def main(words: list[str]) -> int:
    """Run a benchmark, or render the stored results."""
    if words[:1] == ["render"]:
        return run_render(words[1:])
    for module in MODULES:
        importlib.import_module(f"bench.{module}")
    return bench.main(words)


if __name__ == "__main__":
    raise SystemExit(report_errors(main, sys.argv[1:]))
