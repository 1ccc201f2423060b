# SPDX-License-Identifier: Apache-2.0
"""reducescatter: every rank gets some rows of the reduction."""

from __future__ import annotations

from collections.abc import Sequence

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
from torch_ring.collectives.recorded import recorded
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
    arguments = (checked_op(op, (Average, Sum)), prescale_factor, postscale_factor)
    if is_dynamo_compiling() and operators.are_traced():
        reduced = operators.reducescatter(compressed, name, *arguments, process_set)
    elif needs_function(compressed):

        def derivative(gradients: Sequence[Tensor], _: object) -> list[Tensor]:
            gathered = allgather(gradients[0], process_set=process_set)
            return [gathered * _gradient_factor(*arguments, process_set)]

        engine = engine_of(process_set)
        (reduced,), _ = recorded(
            engine, "reducescatter", [compressed], name, derivative, *arguments
        )
    else:
        engine = engine_of(process_set)
        reduced = engine.run("reducescatter", compressed, None, name, -1, *arguments)
    return compression.decompress(reduced, context)


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
    arguments = (checked_op(op, (Average, Sum)), prescale_factor, postscale_factor)
    tensors, engine = checked_group(tensors), engine_of(process_set)
    return GroupHandle(engine.submit_group("reducescatter", tensors, (), name, False, *arguments))


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
    arguments = (checked_op(op, (Average, Sum)), prescale_factor, postscale_factor)

    def derivative(gradients: Sequence[Tensor], _: object) -> list[Tensor]:
        factor = _gradient_factor(*arguments, process_set)
        return [each * factor for each in grouped_allgather(gradients, process_set=process_set)]

    wires, engine = [wire for wire, _ in compressed], engine_of(process_set)
    reduced, _ = recorded(
        engine, "reducescatter", wires, name, derivative, *arguments, is_group=True
    )
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, compressed, strict=True)
    ]
