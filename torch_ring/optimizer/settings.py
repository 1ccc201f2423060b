"""ReductionSettings: how an optimizer's gradients are reduced, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch_ring.collectives.reduce_op import Average, ReduceOp, Sum
from torch_ring.compression import Compressor
from torch_ring.compression.stateful import StatefulCompressor

__all__ = ["ReductionSettings"]


@dataclass(frozen=True)
class ReductionSettings:
    """How the gradients of one optimizer are reduced.

    Attributes:
        op: Average or Sum.
        predivide_factor: Average divides by this before the sum, by size / this after it.
        compression: compresses a bucket, or each gradient, before it is sent.
        bucket_bytes: the most bytes of a bucket, whose gradients are reduced together.
        direct_bytes: inside a host, backward writes a gradient of so many bytes or more straight
            into the memory in which it is reduced, if it is in no group and not compressed; 0: no
            gradient.
        sparse_as_dense: whether sparse gradients are reduced as dense ones.
        run_ahead: whether passes on devices may end without an agreement (`run_ahead`).
    """

    op: ReduceOp
    predivide_factor: float
    compression: Compressor | StatefulCompressor
    bucket_bytes: int
    direct_bytes: int = 0
    sparse_as_dense: bool = False
    run_ahead: bool = False

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
        """Return the arguments of a mean, whatever `op` is."""
        return replace(self, op=Average).arguments(size)

    def describe(self) -> str:
        """Return the settings as a line that must be the same on all ranks."""
        kind = self.compression
        if isinstance(kind, StatefulCompressor):
            name = str(kind)  # with its settings
        else:  # an instance's repr may contain an address
            name = (kind if isinstance(kind, type) else type(kind)).__qualname__
        return (
            f"{self.op.name}, gradient_predivide_factor={self.predivide_factor}, {name}, "
            f"bucket_bytes={self.bucket_bytes}, direct_bytes={self.direct_bytes}, "
            f"sparse_as_dense={self.sparse_as_dense}, run_ahead={self.run_ahead}"
        )
