"""Lengths to batches: exact bucket edges, the plan of an epoch, the sampler, padding."""

from stretto.batching.collate import NO_STEP, Batch, collate
from stretto.batching.cost import StepCost
from stretto.batching.edges import bucket_of, optimal_edges, padded_cost
from stretto.batching.heuristics import equal_mass_edges, percentile_edges, uniform_edges
from stretto.batching.lengths import as_lengths
from stretto.batching.plan import EpochPlan, adjacent_correlation
from stretto.batching.report import SamplerReport
from stretto.batching.sampler import BucketSampler
from stretto.batching.shuffled import shuffled_slots

__all__ = [
    "NO_STEP",
    "Batch",
    "BucketSampler",
    "EpochPlan",
    "SamplerReport",
    "StepCost",
    "adjacent_correlation",
    "as_lengths",
    "bucket_of",
    "collate",
    "equal_mass_edges",
    "optimal_edges",
    "padded_cost",
    "percentile_edges",
    "shuffled_slots",
    "uniform_edges",
]
