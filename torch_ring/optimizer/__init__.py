"""DistributedOptimizer, and the reduction of gradients behind it.

Open first: `distributed_optimizer`, `backward_sync`, then `reducer`.
"""

from torch_ring.optimizer.distributed_optimizer import DistributedOptimizer, _DistributedOptimizer

__all__ = ["DistributedOptimizer", "_DistributedOptimizer"]
