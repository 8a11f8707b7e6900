"""Large batches without re-tuning: scaling rules, schedules, gradient noise, measured throughput, and the tuner."""

from typing import Any

from stretto.errors import StrettoError
from stretto.large_batch.choose import Candidate, Choice, choose_batch, split_share
from stretto.large_batch.gates import parameters_by_gate
from stretto.large_batch.guard import Guard, local_curvature
from stretto.large_batch.muon import RULES_HEADER, Muon, format_rules, orthogonalise
from stretto.large_batch.noise import (
    AbstractSplit,
    Noise,
    NoiseScale,
    SplitByMicroBatch,
    SplitByRank,
    SplitNorms,
    make_split,
    noise_of,
    squared_norm,
)
from stretto.large_batch.optimizers import MOMENTUM, OptimizerName, make_optimizer
from stretto.large_batch.scaling import LargeBatch, ScalingRule
from stretto.large_batch.schedules import DecayName, ScheduleName
from stretto.large_batch.search import Job, Outcome, Recipe, RecipeSearch, first_run_epochs
from stretto.large_batch.throughput import Entry, ThroughputTable, probe
from stretto.large_batch.tuner import BatchTuner, Decision

__all__ = [
    "MOMENTUM",
    "RULES_HEADER",
    "AbstractSplit",
    "BatchTuner",
    "Candidate",
    "Choice",
    "DecayName",
    "Decision",
    "Entry",
    "Guard",
    "Job",
    "LargeBatch",
    "Muon",
    "Noise",
    "NoiseScale",
    "OptimizerName",
    "Outcome",
    "Recipe",
    "RecipeSearch",
    "ScalingRule",
    "ScheduleName",
    "SplitByMicroBatch",
    "SplitByRank",
    "SplitNorms",
    "ThroughputTable",
    "choose_batch",
    "first_run_epochs",
    "format_rules",
    "local_curvature",
    "make_optimizer",
    "make_split",
    "noise_of",
    "orthogonalise",
    "parameters_by_gate",
    "probe",
    "split_share",
    "squared_norm",
]


def __getattr__(name: str) -> Any:
    """`TuneBatch`, a callback for Lightning, which is imported when it is first used."""
    if name != "TuneBatch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from stretto.large_batch.lightning import TuneBatch
    except ModuleNotFoundError as error:
        raise StrettoError(
            "TuneBatch is a callback for Lightning, which is not installed", fix="Install it: pip install lightning"
        ) from error
    return TuneBatch
