# SPDX-License-Identifier: Apache-2.0
"""allreduce: every rank gets the sum, mean or another reduction of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from torch_ring.collectives import operators
from torch_ring.collectives.handle import (
    GroupHandle,
    Handle,
    checked_group,
    empty_result_like,
    is_recorded,
    require_tensor,
    written_in_place,
)
from torch_ring.collectives.reduce_op import Max, resolve_op
from torch_ring.compression import Compression, Compressor, require_compressor
from torch_ring.world.process_set import ProcessSet, engine_of, global_process_set

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "any_rank",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """As `allreduce`, without waiting, compression or derivatives.

    Returns:
        A handle, whose result is a new tensor.
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
) -> Handle[Tensor]:
    """As `allreduce_`, without waiting.

    Returns:
        A handle, whose result is `tensor` itself.
    """
    require_tensor(tensor, "allreduce_async_")
    arguments = (resolve_op(average, op), prescale_factor, postscale_factor, process_set)
    return written_in_place(_allreduce(tensor, tensor, name, *arguments), tensor)


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
    """Reduce `tensor` over the ranks into a new tensor.

    Differentiable: the gradient is the same allreduce of the result's gradient.

    Args:
        tensor: any shape; the same shape and dtype on every rank.
        average: deprecated, use `op`. True: Average; False: Sum; None: `op` decides.
        name: matches the operation between the ranks; None: a running number.
        compression: compresses the tensor that is sent, such as ``Compression.fp16``.
        op: a :class:`ReduceOp`; None: Average. Bool tensors take no Average, Sum or Adasum.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part, this one among them; by default all.

    Returns:
        The result, with the shape and dtype of `tensor`; equal on all ranks.

    Raises:
        ValueError, TypeError: an argument is wrong on this rank; nothing was sent.
        RingError: MismatchError, PeerLostError or TimeoutError, on every rank.
    """
    require_tensor(tensor, "allreduce")
    arguments = (resolve_op(average, op), prescale_factor, postscale_factor, process_set)
    if not hasattr(compression, "compress"):
        require_compressor(compression)
    compressed, context = compression.compress(tensor)
    if is_dynamo_compiling() and operators.are_traced():
        reduced = operators.allreduce(compressed, name, *arguments)
    elif is_recorded(tensor):
        reduced = _Allreduce.apply(compressed, name, *arguments)
    else:
        reduced = _allreduce_now(compressed, None, name, *arguments)
    return compression.decompress(reduced, context)


def any_rank(condition: bool | Tensor, process_set: ProcessSet = global_process_set) -> bool:
    """Return whether a condition holds on any rank: for decisions that all ranks take alike.

    ::

        if hvd.any_rank(stopper.is_over):  # each rank has a stopper of its own
            break

    A collective of the process set, like an allreduce of one byte. A rank that has called `join`
    has no vote. ``not any_rank(not condition)`` tells whether it holds on all ranks.

    Args:
        condition: of this rank: a bool, or a tensor of one element.
        process_set: the ranks that decide together, this one among them; by default all.

    Returns:
        The same on all ranks.

    Raises:
        RingError: MismatchError, PeerLostError or TimeoutError, on every rank.
    """
    own = torch.tensor(bool(condition), device="cpu")
    return bool(allreduce(own, name="any_rank", op=Max, process_set=process_set))


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As `allreduce`, in place, without compression or derivatives.

    `tensor`: any shape; the same shape and dtype on every rank; may be a leaf that requires
    grad.

    Returns:
        `tensor` itself, with the same values on all ranks.
    """
    require_tensor(tensor, "allreduce_")
    op = resolve_op(average, op)
    if is_dynamo_compiling() and operators.are_traced():
        arguments = (op, prescale_factor, postscale_factor, process_set)
        with torch.no_grad():
            return tensor.copy_(operators.allreduce(tensor, name, *arguments))
    # Without _allreduce_now: a call of Python costs a twentieth of a small allreduce.
    engine = engine_of(process_set)
    return engine.run("allreduce", tensor, tensor, name, -1, op, prescale_factor, postscale_factor)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor, name: str | None, *arguments: Any) -> Tensor:
        return _allreduce_now(tensor, None, name, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.arguments = inputs[2:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        reduced = _Allreduce.apply(gradient, None, *ctx.arguments)
        return reduced, *[None] * (1 + len(ctx.arguments))


def _allreduce(
    tensor: Tensor,
    output: Tensor,
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Handle[Tensor]:
    engine = engine_of(process_set)
    return Handle(engine.submit("allreduce", tensor, output, name, False, op, prescale, postscale))


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
    return engine.run("allreduce", tensor, output, name, -1, op, prescale, postscale)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> GroupHandle[list[Tensor]]:
    """As `grouped_allreduce`, without waiting, compression or derivatives.

    Returns:
        A handle that is done when all are reduced; its result is the list of new tensors.
    """
    op = resolve_op(average, op)
    tensors = checked_group(tensors)
    outputs = [empty_result_like(tensor) for tensor in tensors]
    return _grouped_allreduce(
        tensors, outputs, name, op, prescale_factor, postscale_factor, process_set, blocking=False
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> GroupHandle[list[Tensor]]:
    """As `grouped_allreduce_`, without waiting.

    Returns:
        A handle that is done when all are reduced; its result is the list of `tensors`.
    """
    op = resolve_op(average, op)
    tensors = checked_group(tensors)
    handle = _grouped_allreduce(
        tensors, tensors, name, op, prescale_factor, postscale_factor, process_set, blocking=False
    )
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)
    return handle


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As `allreduce`, of several tensors that are reduced together.

    `tensors`: of one device; the same shapes and dtypes, in the same order, on every rank.

    Returns:
        The list of results, with the shapes and dtypes of `tensors`; equal on all ranks.
    """
    op = resolve_op(average, op)
    if not hasattr(compression, "compress"):
        require_compressor(compression)
    compressed = [compression.compress(tensor) for tensor in checked_group(tensors)]
    arguments = (op, prescale_factor, postscale_factor, process_set)
    reduced = _GroupedAllreduce.apply(name, arguments, *[wire for wire, _ in compressed])
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, compressed, strict=True)
    ]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As `grouped_allreduce`, in place, without compression or derivatives.

    Returns:
        The list of `tensors`, with the same values on all ranks.
    """
    result: list[Tensor] = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()
    return result


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        name: str | None, arguments: tuple[Any, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = [empty_result_like(tensor) for tensor in tensors]
        return tuple(_grouped_allreduce(tensors, outputs, name, *arguments, blocking=True).wait())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.arguments = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_GroupedAllreduce.apply(None, ctx.arguments, *gradients)


def _grouped_allreduce(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    blocking: bool,
) -> GroupHandle[list[Tensor]]:
    engine = engine_of(process_set)
    factors = (prescale, postscale)
    return GroupHandle(
        engine.submit_group("allreduce", tensors, outputs, name, blocking, op, *factors)
    )
