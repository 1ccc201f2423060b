"""Collective operations on tensors.

Every rank of the process set calls the same operations. Operations with a name may be submitted in
any order; those without are numbered, so their order must be the same on all ranks. Tensors are
dense and on the CPU; their dtype is uint8, int8, int32, int64, float16, bfloat16, float32, float64
or bool.

Raised by all of them, on every rank:

* :class:`NotInitializedError` before :func:`torch_ring.init`;
* ``ValueError`` for what is wrong on this rank alone, before anything is sent;
* :class:`MismatchError` when the ranks ask for different things, or some have called
  :func:`join` and the operation needs them; the job may go on;
* :class:`PeerLostError`, :class:`TimeoutError` when a rank is gone or silent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_ring import passes, world
from torch_ring.compression import Compression, Compressor
from torch_ring.handle import (
    Handle,
    empty_result_like,
    is_recorded,
    needs_function,
    require_tensor,
)
from torch_ring.process_set import ProcessSet, engine_of, global_process_set, root_in
from torch_ring.reduce_op import Average, resolve_op

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "join",
]


def _allreduce(
    tensor: Tensor,
    output: Tensor,
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Handle:
    engine = engine_of(process_set)
    return Handle(engine.allreduce(tensor, output, name or "", op, prescale, postscale))


def _allreduce_now(
    tensor: Tensor,
    output: Tensor | None,
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Tensor:
    engine = engine_of(process_set)
    return engine.allreduce_and_wait(tensor, output, name or "", op, prescale, postscale)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce `tensor` over all ranks into a new tensor.

    Args:
        tensor: any shape; the same shape and dtype on every rank.
        average: deprecated, use `op`.
        name: what identifies the operation on all ranks.
        op: Average (the default), Sum, Min, Max, Product or Adasum; Min, Max or Product for bool,
            Adasum for floating point on a power of two of ranks.
        prescale_factor: multiplies the tensor before it is reduced.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part; this one must be among them.

    Returns:
        A handle whose result has the shape and dtype of `tensor`.
    """
    require_tensor(tensor, "allreduce_async")
    arguments = (resolve_op(average, op), prescale_factor, postscale_factor, process_set)
    output = empty_result_like(tensor)
    return _allreduce(tensor, output, name, *arguments)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce `tensor` over all ranks in place; see :func:`allreduce_async`.

    `tensor` may be a leaf that requires grad. Its handle's result is `tensor` itself.
    """
    require_tensor(tensor, "allreduce_async_")
    arguments = (resolve_op(average, op), prescale_factor, postscale_factor, process_set)
    return _in_place(_allreduce(tensor, tensor, name, *arguments), tensor)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, *arguments: Any) -> Tensor:
        ctx.arguments = arguments
        return _allreduce_now(tensor, None, name, *arguments)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        reduced = _Allreduce.apply(gradient, None, *ctx.arguments)
        return reduced, *[None] * (1 + len(ctx.arguments))


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce `tensor` over all ranks and return the result; see :func:`allreduce_async`.

    Differentiable: the gradient is the same allreduce of the result's gradient.

    `compression` is what travels in place of `tensor`, such as ``Compression.fp16``.
    """
    require_tensor(tensor, "allreduce")
    arguments = (resolve_op(average, op), prescale_factor, postscale_factor, process_set)
    compressed, context = compression.compress(tensor)
    if is_recorded(tensor):
        reduced = _Allreduce.apply(compressed, name, *arguments)
    else:
        reduced = _allreduce_now(compressed, None, name, *arguments)
    return compression.decompress(reduced, context)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce `tensor` over all ranks in place and return it; see :func:`allreduce_async_`."""
    require_tensor(tensor, "allreduce_")
    op = resolve_op(average, op)
    return _allreduce_now(tensor, tensor, name, op, prescale_factor, postscale_factor, process_set)


def _in_place(handle: Handle, tensor: Tensor) -> Handle:
    """Tell autograd that `tensor` changes, so that a stale saved copy is an error, not a lie."""
    torch.autograd.graph.increment_version(tensor)
    return handle


def _broadcast(
    tensor: Tensor,
    output: Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    awaited: bool,
) -> Handle:
    engine = engine_of(process_set)
    root = root_in(process_set, root_rank)
    return Handle(engine.broadcast(tensor, output, root, name or "", awaited))


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to copy the root's `tensor` into a new tensor on every rank.

    Args:
        tensor: the same shape and dtype on every rank; its values matter on the root only.
        root_rank: the rank whose values all get: its global rank, also in a process set.
        name: what identifies the operation on all ranks.
        process_set: the ranks that take part; this one and the root must be among them.
    """
    require_tensor(tensor, "broadcast_async")
    output = empty_result_like(tensor)
    return _broadcast(tensor, output, root_rank, name, process_set, awaited=False)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to overwrite `tensor` with the root's; see :func:`broadcast_async`."""
    require_tensor(tensor, "broadcast_async_")
    return _in_place(
        _broadcast(tensor, tensor, root_rank, name, process_set, awaited=False), tensor
    )


def _broadcast_now(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> Tensor:
    output = empty_result_like(tensor)
    _broadcast(tensor, output, root_rank, name, process_set, awaited=True).wait()
    return output


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        ctx.root_rank = root_rank
        ctx.process_set = process_set
        return _broadcast_now(tensor, root_rank, name, process_set)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        averaged = allreduce(gradient, op=Average, process_set=ctx.process_set)
        if world.rank() != ctx.root_rank:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None, None


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the root's `tensor` on every rank; see :func:`broadcast_async`.

    Differentiable: the root's gradient is the average over ranks, as in Horovod (not the sum);
    the others' is zero.
    """
    require_tensor(tensor, "broadcast")
    broadcast_now = _Broadcast.apply if needs_function(tensor) else _broadcast_now
    result: Tensor = broadcast_now(tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Overwrite `tensor` with the root's and return it; see :func:`broadcast_async`."""
    require_tensor(tensor, "broadcast_")
    handle = _broadcast(tensor, tensor, root_rank, name, process_set, awaited=True)
    result: Tensor = _in_place(handle, tensor).wait()
    return result


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to concatenate the ranks' tensors along their first dimension.

    Args:
        tensor: at least one dimension; all but the first are equal on all ranks.
        name: what identifies the operation on all ranks.
        process_set: the ranks that take part; this one must be among them.

    Returns:
        A handle whose result has as many rows as all tensors together, in the order of ranks.
    """
    require_tensor(tensor, "allgather_async")
    return Handle(engine_of(process_set).allgather(tensor, name or ""))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        work = engine_of(process_set).allgather(tensor, name or "", awaited=True)
        gathered = work.wait()
        ctx.rows = work.received_splits()
        ctx.process_set = process_set
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        averaged = allreduce(gradient, op=Average, process_set=ctx.process_set)
        return torch.split(averaged, ctx.rows)[ctx.process_set.rank()], None, None


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the ranks' tensors, concatenated along the first dimension.

    Differentiable: a rank's gradient is its rows of the gradient's average over ranks, as in
    Horovod. See :func:`allgather_async`.
    """
    require_tensor(tensor, "allgather")
    if not needs_function(tensor):
        return engine_of(process_set).allgather(tensor, name or "", True).wait()
    result: Tensor = _Allgather.apply(tensor, name, process_set)
    return result


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the set has called it.

    Ranks that have submitted different numbers of operations without a name are in step after it.
    """
    engine_of(process_set).barrier("", awaited=True).wait()


def join(device: int = -1) -> int:  # noqa: ARG001
    """Take part no more, until every rank has called it: for ranks that run out of data first.

    Meanwhile this rank gives zeros to the others' sums, and ones, or an end of the dtype's range,
    to their products, minima and maxima; an Average still divides by all ranks. Operations that
    need every rank are a MismatchError on the ranks that call them. Of the global process set.

    Args:
        device: ignored; Horovod has it.

    Returns:
        The last rank that joined.
    """
    last = int(world.engine().join().wait())
    passes.rejoin()
    return last
