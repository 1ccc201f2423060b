"""DistributedOptimizer, and the reduction of gradients behind it."""

from torch_ring.optimizer.distributed_optimizer import DistributedOptimizer, _DistributedOptimizer

__all__ = ["DistributedOptimizer", "_DistributedOptimizer"]
