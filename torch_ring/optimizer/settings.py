"""How an optimizer's gradients are combined: what all ranks must have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch_ring.compression import Compressor
from torch_ring.reduce_op import Average, ReduceOp, Sum
from torch_ring.stateful import StatefulCompressor

__all__ = ["Reduction"]


@dataclass(frozen=True)
class Reduction:
    """How gradients are combined.

    Attributes:
        op: Average or Sum.
        predivide_factor: Average divides by this before the sum, by size / this after it.
        compression: what travels in place of a bucket, or of each gradient.
        bucket_bytes: the most that is reduced together.
        direct_bytes: from here on a gradient is computed where it is reduced, inside a host, if it
            is in no group and not compressed; 0: no gradient is.
        sparse_as_dense: whether sparse gradients are dense on their way.
    """

    op: ReduceOp
    predivide_factor: float
    compression: Compressor | StatefulCompressor
    bucket_bytes: int
    direct_bytes: int = 0
    sparse_as_dense: bool = False

    def __post_init__(self) -> None:
        kind = self.compression
        if isinstance(kind, type) and issubclass(kind, StatefulCompressor):
            raise ValueError(f"compression must be an instance, {kind.__name__}(), not the class")

    def arguments(self, size: int) -> tuple[ReduceOp, float, float]:
        """Return the operator, the prescale and the postscale factor of an allreduce."""
        if self.predivide_factor == 1.0:
            return self.op, 1.0, 1.0
        return Sum, 1.0 / self.predivide_factor, self.predivide_factor / size

    def mean_arguments(self, size: int) -> tuple[ReduceOp, float, float]:
        """Return the same for a mean, whatever `op` is."""
        return replace(self, op=Average).arguments(size)

    def describe(self) -> str:
        """Return what all ranks must have in common."""
        kind = self.compression
        if isinstance(kind, StatefulCompressor):
            name = str(kind)  # with its settings
        else:  # an instance's repr may have an address in it
            name = (kind if isinstance(kind, type) else type(kind)).__qualname__
        return (
            f"{self.op.name}, gradient_predivide_factor={self.predivide_factor}, {name}, "
            f"bucket_bytes={self.bucket_bytes}, direct_bytes={self.direct_bytes}, "
            f"sparse_as_dense={self.sparse_as_dense}"
        )
