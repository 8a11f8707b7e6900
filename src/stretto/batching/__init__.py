"""Lengths to batches: exact bucket edges, the plan of an epoch, the sampler, padding."""

from stretto.batching.collate import NO_STEP, Batch, collate
from stretto.batching.cost import StepCost
from stretto.batching.edges import as_lengths, bucket_of, optimal_edges, padded_cost
from stretto.batching.plan import EpochPlan, SamplerReport, adjacent_correlation, shuffled_padded_steps, steps_of
from stretto.batching.sampler import BucketSampler

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
    "optimal_edges",
    "padded_cost",
    "shuffled_padded_steps",
    "steps_of",
]
