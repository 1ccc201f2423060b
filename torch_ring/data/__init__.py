# SPDX-License-Identifier: Apache-2.0
"""Input pipeline: each rank's share of the data, and the time that steps wait for it.

Open first: `sampler`, then `split` and `pipeline`.
"""

from torch_ring.data.pipeline import MODES, InputPipeline, InputReport
from torch_ring.data.prefetcher import DevicePrefetcher, default_num_workers
from torch_ring.data.sampler import ShardedSampler
from torch_ring.data.split import split

__all__ = [
    "MODES",
    "DevicePrefetcher",
    "InputPipeline",
    "InputReport",
    "ShardedSampler",
    "default_num_workers",
    "split",
]
