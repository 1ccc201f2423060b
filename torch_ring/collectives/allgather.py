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
from torch_ring.collectives.reduce_op import Average
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
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Concatenate the ranks' tensors along their first dimension.

    Differentiable: the result's gradient is averaged over the ranks, as in Horovod, and each rank
    gets its rows of the average.

    Args:
        tensor: at least one dimension; dtype and all dimensions but the first are equal on all
            ranks, and the first may differ.
        name: matches the operation between the ranks; None: a running number.
        process_set: the ranks that take part, this one among them; by default all.

    Returns:
        A new tensor with the rows of all tensors, in the order of ranks; equal on all ranks.

    Raises:
        ValueError, TypeError: an argument is wrong on this rank; nothing was sent.
        RingError: MismatchError, PeerLostError or TimeoutError, on every rank.
    """
    require_tensor(tensor, "allgather")
    if not needs_function(tensor):
        return engine_of(process_set).allgather(tensor, name or "", True).wait()
    result: Tensor = _Allgather.apply(tensor, name, process_set)
    return result


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        work = engine_of(process_set).allgather(tensor, name or "", blocking=True)
        gathered = work.wait()
        ctx.rows = work.received_splits()
        ctx.process_set = process_set
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        averaged = allreduce(gradient, op=Average, process_set=ctx.process_set)
        return torch.split(averaged, ctx.rows)[ctx.process_set.rank()], None, None


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
) -> list[Tensor]:
    """As `allgather`, of several tensors that are gathered together.

    `tensors`: of one device, as many on every rank; each with at least one dimension, and dtype
    and all dimensions but the first equal on all ranks.

    Returns:
        The list of gathered tensors; each has the rows of all ranks, in the order of ranks.
    """
    return list(_GroupedAllgather.apply(name, process_set, *checked_group(tensors)))


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        works = engine_of(process_set).grouped_allgather(tensors, name or "", blocking=True)
        gathered = GroupHandle(works).wait()
        ctx.rows = [work.received_splits() for work in works]
        ctx.process_set = process_set
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        averaged = grouped_allreduce(gradients, op=Average, process_set=ctx.process_set)
        rank = ctx.process_set.rank()
        own = [torch.split(all_, rows)[rank] for all_, rows in zip(averaged, ctx.rows, strict=True)]
        return None, None, *own
