# SPDX-License-Identifier: Apache-2.0
"""allgather: every rank gets the rows of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from torch_ring.collectives import operators
from torch_ring.collectives.allreduce import allreduce, grouped_allreduce
from torch_ring.collectives.handle import (
    GroupHandle,
    Handle,
    checked_group,
    needs_function,
    require_tensor,
)
from torch_ring.collectives.recorded import recorded
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

    def derivative(gradients: Sequence[Tensor], rows: Sequence[list[int]]) -> list[Tensor]:
        reduced = allreduce(gradients[0], op=grad_op, process_set=process_set)
        return _own_rows([reduced], rows, process_set)

    (gathered,), _ = recorded(engine_of(process_set), "allgather", [tensor], name, derivative)
    return gathered


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

    def derivative(gradients: Sequence[Tensor], rows: Sequence[list[int]]) -> list[Tensor]:
        reduced = grouped_allreduce(gradients, op=grad_op, process_set=process_set)
        return _own_rows(reduced, rows, process_set)

    engine = engine_of(process_set)
    gathered, _ = recorded(engine, "allgather", tensors, name, derivative, is_group=True)
    return gathered


def _own_rows(
    reduced: Sequence[Tensor], rows: Sequence[list[int]], process_set: ProcessSet
) -> list[Tensor]:
    rank = process_set.rank()
    return [torch.split(each, own)[rank] for each, own in zip(reduced, rows, strict=True)]
