# SPDX-License-Identifier: Apache-2.0
"""broadcast: every rank gets the root's tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from torch_ring import world
from torch_ring.collectives import operators
from torch_ring.collectives.allreduce import allreduce
from torch_ring.collectives.handle import (
    Handle,
    empty_result_like,
    needs_function,
    require_tensor,
    written_in_place,
)
from torch_ring.collectives.recorded import recorded
from torch_ring.collectives.reduce_op import Average
from torch_ring.world.process_set import ProcessSet, engine_of, global_process_set, root_in

__all__ = ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """As `broadcast`, without waiting or derivatives.

    Returns:
        A handle, whose result is a new tensor.
    """
    require_tensor(tensor, "broadcast_async")
    output, root = empty_result_like(tensor), root_in(process_set, root_rank)
    return Handle(engine_of(process_set).submit("broadcast", tensor, output, name, root=root))


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """As `broadcast_`, without waiting.

    Returns:
        A handle, whose result is `tensor` itself.
    """
    require_tensor(tensor, "broadcast_async_")
    engine, root = engine_of(process_set), root_in(process_set, root_rank)
    handle: Handle[Tensor] = Handle(engine.submit("broadcast", tensor, tensor, name, root=root))
    return written_in_place(handle, tensor)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Copy the root's `tensor` into a new tensor on every rank.

    Differentiable: the root's gradient is the average over ranks, as in Horovod (not the sum);
    the others' is zero.

    Args:
        tensor: the same shape and dtype on every rank; its values matter on the root only.
        root_rank: the global rank, even in a process set, whose values all ranks get.
        name: matches the operation between the ranks; None: a running number.
        process_set: the ranks that take part, this one and the root among them; by default all.

    Returns:
        A new tensor with the shape and dtype of `tensor`, and the root's values.

    Raises:
        ValueError, TypeError: an argument is wrong on this rank; nothing was sent.
        RingError: MismatchError, PeerLostError or TimeoutError, on every rank.
    """
    require_tensor(tensor, "broadcast")
    if is_dynamo_compiling() and operators.are_traced():
        return operators.broadcast(tensor, root_rank, name, process_set)
    engine, root = engine_of(process_set), root_in(process_set, root_rank)
    if not needs_function(tensor):
        return engine.run("broadcast", tensor, empty_result_like(tensor), name, root)

    def derivative(gradients: Sequence[Tensor], _: object) -> list[Tensor]:
        averaged = allreduce(gradients[0], op=Average, process_set=process_set)
        return [operators.of_root(averaged, is_root=world.rank() == root_rank)]

    (result,), _ = recorded(engine, "broadcast", [tensor], name, derivative, root=root)
    return result


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As `broadcast`, in place, without derivatives.

    `tensor`: the same shape and dtype on every rank; overwritten on all but the root.

    Returns:
        `tensor` itself, with the root's values.
    """
    require_tensor(tensor, "broadcast_")
    if is_dynamo_compiling() and operators.are_traced():
        with torch.no_grad():
            return tensor.copy_(operators.broadcast(tensor, root_rank, name, process_set))
    engine = engine_of(process_set)
    return engine.run("broadcast", tensor, tensor, name, root_in(process_set, root_rank))
