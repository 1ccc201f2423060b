"""Operations on lists of tensors, which are submitted, and complete, together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ring.compression import Compression, Compressor
from torch_ring.handle import GroupHandle, empty_result_like
from torch_ring.process_set import ProcessSet, engine_of, global_process_set
from torch_ring.reduce_op import Average, resolve_op
from torch_ring.scattering import gradient_factor, scattered

__all__ = [
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
]


def _checked(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the group as a list.

    Raises:
        ValueError: it is no sequence of tensors, or they are on several devices.
    """
    is_group = isinstance(tensors, Iterable) and not isinstance(tensors, Tensor)
    group = list(tensors) if is_group else []
    if not is_group or not all(isinstance(tensor, Tensor) for tensor in group):
        raise ValueError("a group is a list of tensors")
    devices = {str(tensor.device) for tensor in group}
    if len(devices) > 1:
        raise ValueError(f"the tensors of a group are on several devices: {sorted(devices)}")
    return group


def _allreduce(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    awaited: bool,
) -> GroupHandle:
    engine = engine_of(process_set)
    return GroupHandle(
        engine.grouped_allreduce(
            tensors, outputs, name or "", op, prescale, postscale, awaited=awaited
        )
    )


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> GroupHandle:
    """Start to reduce each of `tensors` over the ranks; see :func:`allreduce_async`.

    Returns:
        A handle that is done when all are, and whose result is the list of reduced tensors.

    Raises:
        ValueError: a tensor cannot be reduced, or they are on several devices; nothing is sent.
    """
    op = resolve_op(average, op)
    tensors = _checked(tensors)
    outputs = [empty_result_like(tensor) for tensor in tensors]
    return _allreduce(
        tensors, outputs, name, op, prescale_factor, postscale_factor, process_set, awaited=False
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> GroupHandle:
    """Start to reduce each of `tensors` in place; see :func:`grouped_allreduce_async`."""
    op = resolve_op(average, op)
    tensors = _checked(tensors)
    handle = _allreduce(
        tensors, tensors, name, op, prescale_factor, postscale_factor, process_set, awaited=False
    )
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)
    return handle


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, arguments: tuple[Any, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = arguments
        outputs = [empty_result_like(tensor) for tensor in tensors]
        return tuple(_allreduce(tensors, outputs, name, *arguments, awaited=True).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_GroupedAllreduce.apply(None, ctx.arguments, *gradients)


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
    """Reduce each of `tensors` over the ranks; differentiable, see :func:`allreduce`."""
    op = resolve_op(average, op)
    compressed = [compression.compress(tensor) for tensor in _checked(tensors)]
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
    """Reduce each of `tensors` in place and return them."""
    result: list[Tensor] = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()
    return result


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> GroupHandle:
    """Start to gather each of `tensors` from the ranks; see :func:`allgather_async`."""
    tensors = _checked(tensors)
    return GroupHandle(engine_of(process_set).grouped_allgather(tensors, name or ""))


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        works = engine_of(process_set).grouped_allgather(tensors, name or "", awaited=True)
        gathered = GroupHandle(works).wait()
        ctx.rows = [work.received_splits() for work in works]
        ctx.process_set = process_set
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        averaged = grouped_allreduce(gradients, op=Average, process_set=ctx.process_set)
        rank = ctx.process_set.rank()
        own = [torch.split(all_, rows)[rank] for all_, rows in zip(averaged, ctx.rows, strict=True)]
        return None, None, *own


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Gather each of `tensors` from the ranks; differentiable, see :func:`allgather`."""
    return list(_GroupedAllgather.apply(name, process_set, *_checked(tensors)))


def _reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    awaited: bool,
) -> GroupHandle:
    engine = engine_of(process_set)
    outputs = [scattered(tensor, process_set) for tensor in tensors]
    return GroupHandle(
        engine.grouped_reducescatter(
            tensors, outputs, name or "", op, prescale, postscale, awaited=awaited
        )
    )


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> GroupHandle:
    """Start to reduce and scatter each of `tensors`; see :func:`reducescatter_async`."""
    return _reducescatter(
        _checked(tensors), name, op, prescale_factor, postscale_factor, process_set, awaited=False
    )


class _GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, arguments: tuple[Any, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = arguments
        return tuple(_reducescatter(tensors, name, *arguments, awaited=True).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        factor = gradient_factor(*ctx.arguments)
        gathered = grouped_allgather(gradients, process_set=ctx.arguments[-1])
        return None, None, *[gradient * factor for gradient in gathered]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce and scatter each of `tensors`; differentiable, see :func:`reducescatter`."""
    compressed = [compression.compress(tensor) for tensor in _checked(tensors)]
    arguments = (op, prescale_factor, postscale_factor, process_set)
    reduced = _GroupedReducescatter.apply(name, arguments, *[wire for wire, _ in compressed])
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, compressed, strict=True)
    ]
