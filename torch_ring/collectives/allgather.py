# SPDX-License-Identifier: Apache-2.0
"""allgather: every rank gets the rows of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from torch_ring._C import Work
from torch_ring.collectives import operators
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
) -> Handle[Tensor]:
    """As `allgather`, without waiting or derivatives.

    Returns:
        A handle, whose result has the rows of all tensors, in the order of ranks.
    """
    require_tensor(tensor, "allgather_async")
    return Handle(engine_of(process_set).submit("allgather", tensor, None, name))


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
    if is_dynamo_compiling() and operators.are_traced():
        return operators.allgather(tensor, name, process_set, grad_op)
    if not needs_function(tensor):
        return engine_of(process_set).run("allgather", tensor, None, name)
    result: Tensor
    result, _ = _Allgather.apply(tensor, name, process_set, grad_op)
    return result


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        tensor: Tensor, name: str | None, process_set: ProcessSet, _: int
    ) -> tuple[Tensor, Tensor]:
        work = engine_of(process_set).submit("allgather", tensor, None, name, True)
        gathered = work.wait()
        return gathered, _rows(work)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, _, ctx.process_set, ctx.grad_op = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        reduced = allreduce(gradient, op=ctx.grad_op, process_set=ctx.process_set)
        rows: list[int] = ctx.saved_tensors[0].tolist()
        return torch.split(reduced, rows)[ctx.process_set.rank()], None, None, None


def _rows(work: Work) -> Tensor:
    """Return the number of rows of each rank."""
    return torch.tensor(work.received_splits(), dtype=torch.int64, device="cpu")


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> GroupHandle[list[Tensor]]:
    """As `grouped_allgather`, without waiting or derivatives.

    Returns:
        A handle that is done when all are gathered; its result is the list of gathered tensors.
    """
    tensors = checked_group(tensors)
    return GroupHandle(engine_of(process_set).submit_group("allgather", tensors, (), name))


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
    tensors = checked_group(tensors)
    return list(_GroupedAllgather.apply(name, process_set, grad_op, *tensors)[: len(tensors)])


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(
        name: str | None, process_set: ProcessSet, _: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        engine = engine_of(process_set)
        works = engine.submit_group("allgather", tensors, (), name, True)
        return *GroupHandle(works).wait(), *map(_rows, works)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.process_set, ctx.grad_op, *tensors = inputs
        rows = output[len(tensors) :]
        ctx.mark_non_differentiable(*rows)
        ctx.save_for_backward(*rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows = [each.tolist() for each in ctx.saved_tensors]
        reduced = grouped_allreduce(
            gradients[: len(rows)], op=ctx.grad_op, process_set=ctx.process_set
        )
        rank = ctx.process_set.rank()
        own = [torch.split(all_, each)[rank] for all_, each in zip(reduced, rows, strict=True)]
        return None, None, None, *own
