"""DistributedOptimizer, LocalSGD and DiLoCo, and the reduction of gradients behind them.

Open first: `distributed_optimizer`, `backward_sync`, then `reducer`; `local_steps` for the rest.
"""

from torch_ring.optimizer.distributed_optimizer import DistributedOptimizer, _DistributedOptimizer
from torch_ring.optimizer.local_steps import DiLoCo, LocalSGD

__all__ = ["DiLoCo", "DistributedOptimizer", "LocalSGD", "_DistributedOptimizer"]
