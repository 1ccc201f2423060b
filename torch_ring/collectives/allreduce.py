# SPDX-License-Identifier: Apache-2.0
"""allreduce: every rank gets the sum, mean or another reduction of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence

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
from torch_ring.collectives.recorded import recorded
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
    arguments = (resolve_op(average, op), prescale_factor, postscale_factor)
    output, engine = empty_result_like(tensor), engine_of(process_set)
    return Handle(engine.submit("allreduce", tensor, output, name, False, *arguments))


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
    arguments = (resolve_op(average, op), prescale_factor, postscale_factor)
    engine = engine_of(process_set)
    handle: Handle[Tensor] = Handle(
        engine.submit("allreduce", tensor, tensor, name, False, *arguments)
    )
    return written_in_place(handle, tensor)


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
    arguments = (resolve_op(average, op), prescale_factor, postscale_factor)
    if not hasattr(compression, "compress"):
        require_compressor(compression)
    compressed, context = compression.compress(tensor)
    if is_dynamo_compiling() and operators.are_traced():
        reduced = operators.allreduce(compressed, name, *arguments, process_set)
    elif is_recorded(tensor):

        def derivative(gradients: Sequence[Tensor], _: object) -> list[Tensor]:
            return [allreduce(gradients[0], None, None, Compression.none, *arguments, process_set)]

        engine = engine_of(process_set)
        (reduced,), _ = recorded(engine, "allreduce", [compressed], name, derivative, *arguments)
    else:
        engine = engine_of(process_set)
        reduced = engine.run("allreduce", compressed, None, name, -1, *arguments)
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
    engine = engine_of(process_set)
    return engine.run("allreduce", tensor, tensor, name, -1, op, prescale_factor, postscale_factor)


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
    arguments = (resolve_op(average, op), prescale_factor, postscale_factor)
    tensors = checked_group(tensors)
    outputs, engine = list(map(empty_result_like, tensors)), engine_of(process_set)
    return GroupHandle(engine.submit_group("allreduce", tensors, outputs, name, False, *arguments))


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
    arguments = (resolve_op(average, op), prescale_factor, postscale_factor)
    tensors, engine = checked_group(tensors), engine_of(process_set)
    works = engine.submit_group("allreduce", tensors, tensors, name, False, *arguments)
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)
    return GroupHandle(works)


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
    arguments = (resolve_op(average, op), prescale_factor, postscale_factor)
    if not hasattr(compression, "compress"):
        require_compressor(compression)
    compressed = [compression.compress(tensor) for tensor in checked_group(tensors)]

    def derivative(gradients: Sequence[Tensor], _: object) -> list[Tensor]:
        return grouped_allreduce(gradients, None, None, Compression.none, *arguments, process_set)

    wires, engine = [wire for wire, _ in compressed], engine_of(process_set)
    reduced, _ = recorded(engine, "allreduce", wires, name, derivative, *arguments, is_group=True)
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
