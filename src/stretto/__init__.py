"""Stretto makes recurrent networks train fast: the same model, the same result, sooner."""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stretto import cells as cells
    from stretto import distributed as distributed
    from stretto.batching import BucketSampler as BucketSampler
    from stretto.batching import collate as collate
    from stretto.batching import optimal_edges as optimal_edges
    from stretto.cells import Cell as Cell
    from stretto.errors import StrettoError as StrettoError
    from stretto.graph import Graph as Graph
    from stretto.graph import straight_through as straight_through
    from stretto.large_batch import BatchTuner as BatchTuner
    from stretto.large_batch import LargeBatch as LargeBatch
    from stretto.nn import RNN as RNN
    from stretto.nn import accelerate as accelerate
    from stretto.nn import restore as restore
    from stretto.nn.explain_model import explain as explain
    from stretto.nn.scan import scan as scan
    from stretto.runs import train as train
    from stretto.solvers import Multigrid as Multigrid
    from stretto.solvers import Newton as Newton
    from stretto.solvers import Shooting as Shooting
    from stretto.solvers import TrajectoryCache as TrajectoryCache
    from stretto.trained import load as load

FOLDERS: Final = ("cells", "distributed")
HOMES: Final = {
    "BatchTuner": "stretto.large_batch",
    "BucketSampler": "stretto.batching",
    "Cell": "stretto.cells",
    "Graph": "stretto.graph",
    "LargeBatch": "stretto.large_batch",
    "Multigrid": "stretto.solvers",
    "Newton": "stretto.solvers",
    "RNN": "stretto.nn",
    "Shooting": "stretto.solvers",
    "StrettoError": "stretto.errors",
    "TrajectoryCache": "stretto.solvers",
    "accelerate": "stretto.nn",
    "collate": "stretto.batching",
    "explain": "stretto.nn",
    "load": "stretto.trained",
    "optimal_edges": "stretto.batching",
    "restore": "stretto.nn",
    "scan": "stretto.nn",
    "straight_through": "stretto.graph",
    "train": "stretto.runs",
}

__all__ = [
    "RNN",
    "BatchTuner",
    "BucketSampler",
    "Cell",
    "Graph",
    "LargeBatch",
    "Multigrid",
    "Newton",
    "Shooting",
    "StrettoError",
    "TrajectoryCache",
    "accelerate",
    "cells",
    "collate",
    "distributed",
    "explain",
    "load",
    "optimal_edges",
    "restore",
    "scan",
    "straight_through",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import stretto` costs next to nothing."""
    if name in FOLDERS:
        return importlib.import_module(f"stretto.{name}")
    if name not in HOMES:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
