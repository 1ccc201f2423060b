# SPDX-License-Identifier: Apache-2.0
"""ReduceOp: the reduction operators: Horovod's names and numbers, and MPI's bitwise ones."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from numbers import Integral

from torch_ring.errors import InvalidArgumentError

__all__ = [
    "Adasum",
    "Average",
    "Band",
    "Bor",
    "Bxor",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "checked_op",
    "resolve_op",
]


class ReduceOp(IntEnum):
    """The operator that combines the ranks' tensors, element by element except for Adasum.

    Average divides the sum by the number of ranks. An average of integers truncates toward zero,
    and its sum does not wrap around: it is kept in a wider dtype. Sum wraps around, as torch's sums
    do. Whole factors multiply integers exactly, others in float64; each product is truncated toward
    zero, and clamped to the range of the dtype. Adasum is adaptive summation (S. Maleki et al.,
    MLSys 2021). It takes floating point, on a power of two of ranks. Band, Bor and Bxor are the
    bitwise and, or and exclusive or of integers, and the logical ones of bools; on a GPU they run
    on a copy on the CPU, as Adasum does.
    """

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5
    Band = 6
    Bor = 7
    Bxor = 8


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product
Band = ReduceOp.Band
Bor = ReduceOp.Bor
Bxor = ReduceOp.Bxor


# The operators' names in other libraries: torch.distributed, NumPy, MPI.
_OTHER_NAMES = {
    "add": Sum,
    "avg": Average,
    "bitwise_and": Band,
    "bitwise_or": Bor,
    "bitwise_xor": Bxor,
    "mean": Average,
    "maximum": Max,
    "minimum": Min,
    "mul": Product,
    "prod": Product,
}


def resolve_op(average: bool | None, op: int | None) -> ReduceOp:
    """Return the operator that an `average` flag (deprecated) or an `op` asks for.

    Raises:
        InvalidArgumentError: both are given, `op` is unknown, or `average` is no flag.
    """
    if op is not None:
        if average is not None:
            raise InvalidArgumentError("give `op` or the deprecated `average`, not both")
        return op if type(op) is ReduceOp else checked_op(op)
    if average is None:
        return Average
    meant = _meant(average)
    if meant is not None or isinstance(average, str):
        advice = f"name={average!r}" if meant is None else f"op=hvd.{meant.name}"
        raise InvalidArgumentError(
            f"`average` must be True or False; got {_described(average)}: use {advice}"
        )
    return Average if average else Sum


def checked_op(
    op: object, allowed: Sequence[ReduceOp] = tuple(ReduceOp), argument: str = "op"
) -> ReduceOp:
    """Return an operator that a user has given as `argument`, by name or by Horovod's number.

    Raises:
        InvalidArgumentError: the operator is not allowed; for example another library's, whose
            number means something else here.
    """
    if isinstance(op, Integral) and not isinstance(op, bool) and op in allowed:  # NumPy's, too
        return ReduceOp(int(op))
    names = [f"hvd.{each.name}" for each in allowed]
    meant = _meant(op)
    advice = f": use hvd.{meant.name}" if meant is not None and meant in allowed else ""
    raise InvalidArgumentError(
        f"{argument} must be {', '.join(names[:-1])} or {names[-1]}; got {_described(op)}{advice}"
    )


def _meant(op: object) -> ReduceOp | None:
    """Return the operator whose name `op` is or has; None: there is none."""
    if isinstance(op, ReduceOp):
        return op
    word = op if isinstance(op, str) else getattr(op, "name", getattr(op, "__name__", ""))
    known = {each.name.lower(): each for each in ReduceOp} | _OTHER_NAMES
    return known.get(str(word).lower())


def _described(value: object) -> str:
    return f"hvd.{value.name}" if isinstance(value, ReduceOp) else repr(value)
