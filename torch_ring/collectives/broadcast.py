# SPDX-License-Identifier: Apache-2.0
"""broadcast: every rank gets the root's tensor."""

from __future__ import annotations

from typing import Any

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
    return _broadcast(tensor, empty_result_like(tensor), root_rank, name, process_set)


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
    handle = _broadcast(tensor, tensor, root_rank, name, process_set)
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
    broadcast_now = _Broadcast.apply if needs_function(tensor) else _broadcast_now
    result: Tensor = broadcast_now(tensor, root_rank, name, process_set)
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


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        return _broadcast_now(tensor, root_rank, name, process_set)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        _, ctx.root_rank, _, ctx.process_set = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        averaged = allreduce(gradient, op=Average, process_set=ctx.process_set)
        is_root = world.rank() == ctx.root_rank
        return operators.of_root(averaged, is_root=is_root), None, None, None


def _broadcast_now(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> Tensor:
    output, root = empty_result_like(tensor), root_in(process_set, root_rank)
    return engine_of(process_set).run("broadcast", tensor, output, name, root)


def _broadcast(
    tensor: Tensor,
    output: Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> Handle[Tensor]:
    engine = engine_of(process_set)
    root = root_in(process_set, root_rank)
    return Handle(engine.submit("broadcast", tensor, output, name, root=root))
