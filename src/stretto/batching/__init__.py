"""Lengths to batches: exact bucket edges, the plan of an epoch, the sampler, padding."""

from stretto.batching.collate import Batch as Batch
from stretto.batching.collate import collate as collate
from stretto.batching.cost import StepCost as StepCost
from stretto.batching.edges import optimal_edges as optimal_edges
from stretto.batching.edges import padded_cost as padded_cost
from stretto.batching.plan import EpochPlan as EpochPlan
from stretto.batching.report import SamplerReport as SamplerReport
from stretto.batching.sampler import BucketSampler as BucketSampler
