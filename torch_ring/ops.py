"""Collective operations on tensors.

Every rank calls the same operations. Operations with a name may be submitted in any order; those
without are numbered, so their order must be the same on all ranks. Tensors are dense and on the
CPU; their dtype is uint8, int8, int32, int64, float16, bfloat16, float32, float64 or bool.

Raised by all of them, on every rank:

* :class:`NotInitializedError` before :func:`torch_ring.init`;
* ``ValueError`` for what is wrong on this rank alone, before anything is sent;
* :class:`MismatchError` when the ranks ask for different things; the job may go on;
* :class:`PeerLostError`, :class:`TimeoutError` when a rank is gone or silent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_ring import world
from torch_ring.compression import Compression, Compressor
from torch_ring.handle import Handle
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
]


def _allreduce(
    tensor: Tensor,
    output: Tensor,
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    awaited: bool,
) -> Handle:
    work = world.engine().allreduce(
        tensor, output, name or "", op, prescale, postscale, awaited=awaited
    )
    return Handle(work)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start to reduce `tensor` over all ranks into a new tensor.

    Args:
        tensor: any shape; the same shape and dtype on every rank.
        average: deprecated, use `op`.
        name: what identifies the operation on all ranks.
        op: Average (the default), Sum, Min, Max or Product; Min, Max or Product for bool.
        prescale_factor: multiplies the tensor before it is reduced.
        postscale_factor: multiplies the result.

    Returns:
        A handle whose result has the shape and dtype of `tensor`.
    """
    op = resolve_op(average, op)
    output = torch.empty_like(tensor, requires_grad=False)
    return _allreduce(tensor, output, name, op, prescale_factor, postscale_factor, False)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start to reduce `tensor` over all ranks in place; see :func:`allreduce_async`.

    `tensor` may be a leaf that requires grad. Its handle's result is `tensor` itself.
    """
    op = resolve_op(average, op)
    return _in_place(
        _allreduce(tensor, tensor, name, op, prescale_factor, postscale_factor, False), tensor
    )


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, name: str | None, op: int, prescale: float, postscale: float
    ) -> Tensor:
        ctx.arguments = (op, prescale, postscale)
        output = torch.empty_like(tensor)
        _allreduce(tensor, output, name, op, prescale, postscale, True).wait()
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        op, prescale, postscale = ctx.arguments
        return _Allreduce.apply(gradient, None, op, prescale, postscale), None, None, None, None


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce `tensor` over all ranks and return the result; see :func:`allreduce_async`.

    Differentiable: the gradient is the same allreduce of the result's gradient.

    `compression` is what travels in place of `tensor`, such as ``Compression.fp16``.
    """
    op = resolve_op(average, op)
    compressed, context = compression.compress(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        reduced = _Allreduce.apply(compressed, name, op, prescale_factor, postscale_factor)
    else:
        reduced = torch.empty_like(compressed, requires_grad=False)
        _allreduce(compressed, reduced, name, op, prescale_factor, postscale_factor, True).wait()
    return compression.decompress(reduced, context)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce `tensor` over all ranks in place and return it; see :func:`allreduce_async_`."""
    op = resolve_op(average, op)
    handle = _allreduce(tensor, tensor, name, op, prescale_factor, postscale_factor, True)
    result: Tensor = _in_place(handle, tensor).wait()
    return result


def _in_place(handle: Handle, tensor: Tensor) -> Handle:
    """Tell autograd that `tensor` changes, so that a stale saved copy is an error, not a lie."""
    torch.autograd.graph.increment_version(tensor)
    return handle


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start to copy the root's `tensor` into a new tensor on every rank.

    Args:
        tensor: the same shape and dtype on every rank; its values matter on the root only.
        root_rank: the rank whose values all get.
        name: what identifies the operation on all ranks.
    """
    output = torch.empty_like(tensor, requires_grad=False)
    return Handle(world.engine().broadcast(tensor, output, root_rank, name or ""))


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start to overwrite `tensor` with the root's; see :func:`broadcast_async`."""
    work = world.engine().broadcast(tensor, tensor, root_rank, name or "")
    return _in_place(Handle(work), tensor)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None) -> Tensor:
        ctx.root_rank = root_rank
        output = torch.empty_like(tensor)
        world.engine().broadcast(tensor, output, root_rank, name or "", awaited=True).wait()
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        averaged = allreduce(gradient, op=Average)
        if world.rank() != ctx.root_rank:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Return the root's `tensor` on every rank; see :func:`broadcast_async`.

    Differentiable: the root's gradient is the average over ranks, as in Horovod (not the sum);
    the others' is zero.
    """
    result: Tensor = _Broadcast.apply(tensor, root_rank, name)
    return result


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Overwrite `tensor` with the root's and return it; see :func:`broadcast_async`."""
    work = world.engine().broadcast(tensor, tensor, root_rank, name or "", awaited=True)
    result: Tensor = _in_place(Handle(work), tensor).wait()
    return result


def allgather_async(tensor: Tensor, name: str | None = None) -> Handle:
    """Start to concatenate the ranks' tensors along their first dimension.

    Args:
        tensor: at least one dimension; all but the first are equal on all ranks.
        name: what identifies the operation on all ranks.

    Returns:
        A handle whose result has as many rows as all tensors together, in the order of ranks.
    """
    return Handle(world.engine().allgather(tensor, name or ""))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None) -> Tensor:
        ctx.rows = tensor.shape[0] if tensor.dim() > 0 else 0
        return world.engine().allgather(tensor, name or "", awaited=True).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        averaged = allreduce(gradient, op=Average)
        rows = allgather_async(torch.tensor([ctx.rows])).wait().tolist()
        begin = sum(rows[: world.rank()])
        return averaged[begin : begin + ctx.rows], None


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Return the ranks' tensors, concatenated along the first dimension.

    Differentiable: a rank's gradient is its rows of the gradient's average over ranks, as in
    Horovod. See :func:`allgather_async`.
    """
    result: Tensor = _Allgather.apply(tensor, name)
    return result


def barrier() -> None:
    """Block until every rank has called it."""
    world.engine().barrier("", awaited=True).wait()
