"""Stretto makes recurrent networks train fast: the same model, the same result, sooner."""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stretto import cells as cells
    from stretto import distributed as distributed
    from stretto.batching.collate import collate as collate
    from stretto.batching.edges import optimal_edges as optimal_edges
    from stretto.batching.sampler import BucketSampler as BucketSampler
    from stretto.cells.cell import Cell as Cell
    from stretto.errors import StrettoError as StrettoError
    from stretto.graph.network.graph import Graph as Graph
    from stretto.job import train as train
    from stretto.nn.accelerate import accelerate as accelerate
    from stretto.nn.rnn import RNN as RNN
    from stretto.solvers.multigrid.multigrid import Multigrid as Multigrid
    from stretto.solvers.newton.newton import Newton as Newton
    from stretto.solvers.shooting.shooting import Shooting as Shooting
    from stretto.solvers.shooting.trajectory_cache import TrajectoryCache as TrajectoryCache
    from stretto.tuning.batch_tuner import BatchTuner as BatchTuner
    from stretto.tuning.large_batch import LargeBatch as LargeBatch

FOLDERS: Final = ("cells", "distributed")
HOMES: Final = {
    "BatchTuner": "stretto.tuning.batch_tuner",
    "BucketSampler": "stretto.batching.sampler",
    "Cell": "stretto.cells.cell",
    "Graph": "stretto.graph.network.graph",
    "LargeBatch": "stretto.tuning.large_batch",
    "Multigrid": "stretto.solvers.multigrid.multigrid",
    "Newton": "stretto.solvers.newton.newton",
    "RNN": "stretto.nn.rnn",
    "Shooting": "stretto.solvers.shooting.shooting",
    "StrettoError": "stretto.errors",
    "TrajectoryCache": "stretto.solvers.shooting.trajectory_cache",
    "accelerate": "stretto.nn.accelerate",
    "collate": "stretto.batching.collate",
    "optimal_edges": "stretto.batching.edges",
    "train": "stretto.job",
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
    "optimal_edges",
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
