"""DistributedOptimizer, and what averages the gradients behind it."""

from torch_ring.optimizer.distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
