"""Input pipeline: each rank's share of the data, and the time that steps wait for it."""

from torch_ring.data.pipeline import MODES, InputPipeline
from torch_ring.data.prefetcher import DevicePrefetcher
from torch_ring.data.report import InputReport
from torch_ring.data.sampler import ShardedSampler
from torch_ring.data.workers import default_num_workers

__all__ = [
    "MODES",
    "DevicePrefetcher",
    "InputPipeline",
    "InputReport",
    "ShardedSampler",
    "default_num_workers",
]
