# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer, LocalSGD and DiLoCo, and the reduction of gradients behind them.

Open first: `distributed_optimizer`, `backward_sync`, then `reducer`; `local_steps` for the rest.
"""

from torch_ring.optimizer.distributed_optimizer import (
    DistributedOptimizer,
    WrappedOptimizer,
    _DistributedOptimizer,
)
from torch_ring.optimizer.local_steps import DiLoCo, DiLoCoOptimizer, LocalOptimizer, LocalSGD

__all__ = [
    "DiLoCo",
    "DiLoCoOptimizer",
    "DistributedOptimizer",
    "LocalOptimizer",
    "LocalSGD",
    "WrappedOptimizer",
    "_DistributedOptimizer",
]
