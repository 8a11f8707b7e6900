"""Large batches without re-tuning: rules of scale, gradient noise, measured throughput, and the choice of a batch."""

from stretto.large_batch.batch_tuner import BatchTuner, Decision
from stretto.large_batch.clipping import ClipMeter
from stretto.large_batch.curvature import local_curvature
from stretto.large_batch.decay import DecayName, named_decay
from stretto.large_batch.guard import Guard
from stretto.large_batch.noise import GradientParts, NoiseMeter
from stretto.large_batch.optimizers import MOMENTUM, OptimizerName, make_optimizer
from stretto.large_batch.probe import ThroughputTable, probe
from stretto.large_batch.scaling import LargeBatch, Rule, refuse_larger_than_data
from stretto.large_batch.separate_parts import SeparateParts

__all__ = [
    "MOMENTUM",
    "BatchTuner",
    "ClipMeter",
    "DecayName",
    "Decision",
    "GradientParts",
    "Guard",
    "LargeBatch",
    "NoiseMeter",
    "OptimizerName",
    "Rule",
    "SeparateParts",
    "ThroughputTable",
    "local_curvature",
    "make_optimizer",
    "named_decay",
    "probe",
    "refuse_larger_than_data",
]
