"""ReductionSettings: how an optimizer's gradients are reduced, the same on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from torch_ring.collectives.reduce_op import Average, ReduceOp, Sum
from torch_ring.compression import Compressor
from torch_ring.compression.stateful import StatefulCompressor
from torch_ring.optimizer.buckets import split_evenly

__all__ = ["Groups", "ReductionSettings", "check_groups", "resolve_groups"]

Groups = int | Sequence[Sequence[Tensor]] | None


def check_groups(groups: Groups, num_groups: int, parameters: Sequence[Tensor]) -> Groups:
    """Return the checked value of `groups`, or of its deprecated alias `num_groups`.

    Raises:
        ValueError: a number is negative; an element of a group is no tensor, is in `groups` twice,
            or is none of `parameters`.
    """
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups must be a non-negative integer, not {groups}")
        return groups
    if not isinstance(groups, list | tuple) or not all(isinstance(g, list | tuple) for g in groups):
        raise ValueError("groups must be a non-negative integer or a list of lists of tensors")
    known, seen = set(map(id, parameters)), set()
    for tensor in (tensor for group in groups for tensor in group):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"groups must consist of tensors, not of {type(tensor).__name__}")
        if id(tensor) in seen:
            raise ValueError("a parameter can be in groups only once")
        if id(tensor) not in known:
            raise ValueError(
                f"a tensor of shape {list(tensor.shape)} in groups is no parameter of the optimizer"
            )
        seen.add(id(tensor))
    return groups


def resolve_groups(groups: Groups, parameters: Sequence[Tensor]) -> list[Sequence[int]]:
    """Return the groups as parameter indices; a number means so many consecutive groups.

    Tensors in groups that are none of `parameters` have no gradients.
    """
    if isinstance(groups, int):
        return list(split_evenly(len(parameters), groups)) if groups else []
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    indices = [[index_of.get(id(tensor)) for tensor in group] for group in groups or ()]
    known = [[index for index in group if index is not None] for group in indices]
    return [group for group in known if group]


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
    run_ahead: bool = True

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
