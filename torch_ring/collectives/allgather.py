"""allgather: every rank gets the rows of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ring.collectives.allreduce import allreduce, grouped_allreduce
from torch_ring.collectives.handle import (
    GroupHandle,
    Handle,
    checked_group,
    needs_function,
    require_tensor,
)
from torch_ring.collectives.reduce_op import Average, Sum, checked_op
from torch_ring.world.process_set import ProcessSet, engine_of, global_process_set

__all__ = ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As `allgather`, without waiting or derivatives.

    Returns:
        A handle, whose result has the rows of all tensors, in the order of ranks.
    """
    require_tensor(tensor, "allgather_async")
    return Handle(engine_of(process_set).allgather(tensor, name or ""))


def allgather(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    grad_op: int = Average,
) -> Tensor:
    """Concatenate the ranks' tensors along their first dimension.

    Differentiable: the ranks' gradients of the result are reduced by `grad_op`, and each rank gets
    its rows.

    Args:
        tensor: at least one dimension; dtype and all dimensions but the first are equal on all
            ranks, and the first may differ.
        name: matches the operation between the ranks; None: a running number.
        process_set: the ranks that take part, this one among them; by default all.
        grad_op: Average, as in Horovod; or Sum, the gradient of the sum of all ranks' losses, with
            which a loss of gathered features trains as on one process
            (docs/migrating-from-ddp.md#contrastive-losses).

    Returns:
        A new tensor with the rows of all tensors, in the order of ranks; equal on all ranks.

    Raises:
        ValueError, TypeError: an argument is wrong on this rank; nothing was sent.
        RingError: MismatchError, PeerLostError or TimeoutError, on every rank.
    """
    require_tensor(tensor, "allgather")
    grad_op = checked_op(grad_op, (Average, Sum), "grad_op")
    if not needs_function(tensor):
        return engine_of(process_set).allgather(tensor, name or "", True).wait()
    result: Tensor = _Allgather.apply(tensor, name, process_set, grad_op)
    return result


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet, grad_op: int
    ) -> Tensor:
        work = engine_of(process_set).allgather(tensor, name or "", blocking=True)
        gathered = work.wait()
        ctx.rows = work.received_splits()
        ctx.process_set, ctx.grad_op = process_set, grad_op
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        reduced = allreduce(gradient, op=ctx.grad_op, process_set=ctx.process_set)
        return torch.split(reduced, ctx.rows)[ctx.process_set.rank()], None, None, None


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> GroupHandle:
    """As `grouped_allgather`, without waiting or derivatives.

    Returns:
        A handle that is done when all are gathered; its result is the list of gathered tensors.
    """
    tensors = checked_group(tensors)
    return GroupHandle(engine_of(process_set).grouped_allgather(tensors, name or ""))


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    grad_op: int = Average,
) -> list[Tensor]:
    """As `allgather`, of several tensors that are gathered together.

    `tensors`: of one device, as many on every rank; each with at least one dimension, and dtype
    and all dimensions but the first equal on all ranks. `grad_op`: of all of them.

    Returns:
        The list of gathered tensors; each has the rows of all ranks, in the order of ranks.
    """
    grad_op = checked_op(grad_op, (Average, Sum), "grad_op")
    return list(_GroupedAllgather.apply(name, process_set, grad_op, *checked_group(tensors)))


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, grad_op: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        works = engine_of(process_set).grouped_allgather(tensors, name or "", blocking=True)
        gathered = GroupHandle(works).wait()
        ctx.rows = [work.received_splits() for work in works]
        ctx.process_set, ctx.grad_op = process_set, grad_op
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        reduced = grouped_allreduce(gradients, op=ctx.grad_op, process_set=ctx.process_set)
        rank = ctx.process_set.rank()
        own = [torch.split(all_, rows)[rank] for all_, rows in zip(reduced, ctx.rows, strict=True)]
        return None, None, None, *own
