# SPDX-License-Identifier: Apache-2.0
"""reducescatter: every rank gets some rows of the reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from torch_ring.collectives import operators
from torch_ring.collectives.allgather import allgather, grouped_allgather
from torch_ring.collectives.handle import (
    GroupHandle,
    Handle,
    checked_group,
    needs_function,
    require_tensor,
)
from torch_ring.collectives.reduce_op import Average, Sum, checked_op
from torch_ring.compression import Compression, Compressor, require_compressor
from torch_ring.world.process_set import ProcessSet, engine_of, global_process_set

__all__ = [
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """As `reducescatter`, without waiting, compression or derivatives.

    Returns:
        A handle, whose result is this rank's rows of the reduction.
    """
    require_tensor(tensor, "reducescatter_async")
    op = checked_op(op, (Average, Sum))
    arguments = (False, op, prescale_factor, postscale_factor)
    return Handle(engine_of(process_set).submit("reducescatter", tensor, None, name, *arguments))


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce `tensor` over the ranks and give each rank some rows of the result.

    Rows are dealt out in the order of ranks; if they do not divide evenly, the first ranks get one
    more each.

    Differentiable: the gradient is the allgather of the ranks' gradients, times both factors and,
    for Sum, the number of ranks, as in Horovod.

    Args:
        tensor: at least one dimension; the same shape and dtype on every rank.
        name: matches the operation between the ranks; None: a running number.
        compression: compresses the tensor that is sent, such as ``Compression.fp16``.
        op: Average or Sum.
        process_set: the ranks that take part, this one among them; by default all.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        This rank's rows of the reduction, in the dtype of `tensor`.

    Raises:
        ValueError, TypeError: an argument is wrong on this rank; nothing was sent.
        RingError: MismatchError, PeerLostError or TimeoutError, on every rank.
    """
    require_tensor(tensor, "reducescatter")
    if not hasattr(compression, "compress"):
        require_compressor(compression)
    compressed, context = compression.compress(tensor)
    if is_dynamo_compiling() and operators.are_traced():
        op = checked_op(op, (Average, Sum))
        reduced = operators.reducescatter(
            compressed, name, op, prescale_factor, postscale_factor, process_set
        )
        return compression.decompress(reduced, context)
    reducescatter_now = _Reducescatter.apply if needs_function(compressed) else _reducescatter_now
    reduced = reducescatter_now(
        compressed, name, op, prescale_factor, postscale_factor, process_set
    )
    return compression.decompress(reduced, context)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor, name: str | None, *arguments: Any) -> Tensor:
        return _reducescatter_now(tensor, name, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.arguments = inputs[2:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gathered = allgather(gradient, process_set=ctx.arguments[-1])
        return gathered * _gradient_factor(*ctx.arguments), *[None] * 5


def _reducescatter_now(tensor: Tensor, name: str | None, *arguments: Any) -> Tensor:
    op, prescale, postscale, process_set = arguments
    op = checked_op(op, (Average, Sum))
    engine = engine_of(process_set)
    return engine.run("reducescatter", tensor, None, name, -1, op, prescale, postscale)


def _gradient_factor(op: int, prescale: float, postscale: float, process_set: ProcessSet) -> float:
    """Return the factor of a reducescatter's gathered gradients, as in Horovod."""
    return prescale * postscale * (process_set.size() if op == Sum else 1)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> GroupHandle[list[Tensor]]:
    """As `grouped_reducescatter`, without waiting, compression or derivatives.

    Returns:
        A handle that is done when all are reduced; its result is the list of this rank's rows of
        each reduction.
    """
    return _grouped_reducescatter(
        checked_group(tensors),
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        blocking=False,
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """As `reducescatter`, of several tensors that are reduced together.

    `tensors`: of one device, each with at least one dimension; the same shapes and dtypes, in
    the same order, on every rank.

    Returns:
        The list of this rank's rows of each reduction, in the dtypes of `tensors`.
    """
    if not hasattr(compression, "compress"):
        require_compressor(compression)
    compressed = [compression.compress(tensor) for tensor in checked_group(tensors)]
    arguments = (op, prescale_factor, postscale_factor, process_set)
    reduced = _GroupedReducescatter.apply(name, arguments, *[wire for wire, _ in compressed])
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, compressed, strict=True)
    ]


class _GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        name: str | None, arguments: tuple[Any, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(_grouped_reducescatter(tensors, name, *arguments, blocking=True).wait())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.arguments = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        factor = _gradient_factor(*ctx.arguments)
        gathered = grouped_allgather(gradients, process_set=ctx.arguments[-1])
        return None, None, *[gradient * factor for gradient in gathered]


def _grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    blocking: bool,
) -> GroupHandle[list[Tensor]]:
    op = checked_op(op, (Average, Sum))
    engine = engine_of(process_set)
    arguments = (name, blocking, op, prescale, postscale)
    return GroupHandle(engine.submit_group("reducescatter", tensors, (), *arguments))
