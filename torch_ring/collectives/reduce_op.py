"""ReduceOp: the reduction operators, by Horovod's names and numbers."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "ReduceOp", "Sum", "resolve_op"]


class ReduceOp(IntEnum):
    """The operator that combines the ranks' tensors, element by element except for Adasum.

    Average divides the sum by the number of ranks; integers truncate toward zero. Adasum is
    adaptive summation (S. Maleki et al., MLSys 2021). It takes floating point, on a power of two of
    ranks.
    """

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


def resolve_op(average: bool | None, op: int | None) -> ReduceOp:
    """Return the operator that an `average` flag (deprecated) or an `op` asks for.

    Raises:
        ValueError: both are given, or `op` is unknown.
    """
    if op is not None:
        if average is not None:
            raise ValueError("give `op` or the deprecated `average`, not both")
        return op if type(op) is ReduceOp else ReduceOp(op)
    return Average if average is None or average else Sum
