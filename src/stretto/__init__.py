"""Stretto makes recurrent networks train fast."""

from stretto.batching.collate import collate as collate
from stretto.batching.edges import optimal_edges as optimal_edges
from stretto.batching.sampler import BucketSampler as BucketSampler
from stretto.errors import StrettoError as StrettoError
