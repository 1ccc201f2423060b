"""alltoall: every rank sends some rows to each rank."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ring._C import Work
from torch_ring.collectives.handle import Handle, needs_function, require_tensor
from torch_ring.errors import InvalidArgumentError
from torch_ring.world.process_set import ProcessSet, engine_of, global_process_set

__all__ = ["alltoall", "alltoall_async"]


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As `alltoall`, without waiting or derivatives.

    Returns:
        A handle, whose result is that of `alltoall`.
    """
    require_tensor(tensor, "alltoall_async")
    engine = engine_of(process_set)
    work = engine.alltoall(tensor, _splits(tensor, splits, process_set.size()), name or "")
    return Handle(work, None if splits is None else lambda result: (result, _received(work)))


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send some rows of `tensor` to each rank, and receive some from each.

    Differentiable: each row's gradient goes back to the rank that sent the row.

    Args:
        tensor: at least one dimension; dtype and all dimensions but the first are equal on all
            ranks.
        splits: integers, shape [ranks]: the number of rows for rank 0, 1, ..., together at most
            those of `tensor`; None: the same number for each.
        name: matches the operation between the ranks; None: a running number.
        process_set: the ranks that take part, this one among them; by default all.

    Returns:
        The received rows in the order of ranks. With `splits`, a pair of these rows and the number
        of rows from each rank (int32, shape [ranks]).

    Raises:
        TypeError: `tensor` is no tensor.
        ValueError: `splits` do not fit `tensor`, or `tensor` is a scalar; nothing was sent.
        RingError: MismatchError, PeerLostError or TimeoutError, on every rank.
    """
    require_tensor(tensor, "alltoall")
    engine = engine_of(process_set)  # first, to report a wrong process set
    rows = _splits(tensor, splits, process_set.size())
    if needs_function(tensor):
        result, received = _Alltoall.apply(tensor, rows, name, process_set)
        return result if splits is None else (result, received)
    work = engine.alltoall(tensor, rows, name or "", True)
    result = work.wait()
    return result if splits is None else (result, _received(work))


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: list[int], name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        work = engine_of(process_set).alltoall(tensor, splits, name or "", blocking=True)
        result = work.wait()
        received = _received(work)
        ctx.mark_non_differentiable(received)
        ctx.received = received.tolist()
        ctx.unsent = tensor.shape[0] - sum(splits)
        ctx.process_set = process_set
        return result, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        back, _ = _Alltoall.apply(gradient, ctx.received, None, ctx.process_set)
        if ctx.unsent:
            back = torch.cat([back, back.new_zeros(ctx.unsent, *back.shape[1:])])
        return back, None, None, None


def _splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> list[int]:
    """Return the number of rows for each rank."""
    if splits is None:
        rows = tensor.shape[0] if tensor.dim() > 0 else 0
        if rows % size:
            raise InvalidArgumentError(
                f"alltoall: {rows} rows do not divide among {size} ranks: give splits"
            )
        return [rows // size] * size
    try:
        counts: Any = splits.tolist() if isinstance(splits, Tensor) else splits
        return [operator.index(count) for count in counts]
    except TypeError:
        raise InvalidArgumentError("alltoall: splits must be integers, one for each rank") from None


def _received(work: Work) -> Tensor:
    return torch.tensor(work.received_splits(), dtype=torch.int32, device="cpu")
