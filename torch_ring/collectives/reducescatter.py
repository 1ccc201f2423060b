"""Operations whose result is another one on each rank: alltoall and reducescatter."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ring import _C
from torch_ring.compression import Compression, Compressor
from torch_ring.handle import Handle, needs_function, require_tensor
from torch_ring.ops import allgather
from torch_ring.process_set import ProcessSet, engine_of, global_process_set
from torch_ring.reduce_op import Average, Sum

__all__ = [
    "alltoall",
    "alltoall_async",
    "gradient_factor",
    "reducescatter",
    "reducescatter_async",
    "scattered",
]


def _splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> list[int]:
    """Return how many rows go to each rank."""
    if splits is None:
        rows = tensor.shape[0] if tensor.dim() > 0 else 0
        if rows % size:
            raise ValueError(f"alltoall: {rows} rows do not divide among {size} ranks: give splits")
        return [rows // size] * size
    try:
        counts: Any = splits.tolist() if isinstance(splits, Tensor) else splits
        return [operator.index(count) for count in counts]
    except TypeError:
        raise ValueError("alltoall: splits must be integers, one for each rank") from None


def _received(work: _C.Work) -> Tensor:
    return torch.tensor(work.received_splits(), dtype=torch.int32)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to send some rows of `tensor` to each rank, and to receive some from each.

    Args:
        tensor: at least one dimension; all but the first are equal on all ranks.
        splits: integers, shape [ranks]: rows for rank 0, 1, ..., together at most those of
            `tensor`; None: the same number for each.
        name: what identifies the operation on all ranks.
        process_set: the ranks that take part; this one must be among them.

    Returns:
        A handle whose result is the received rows in the order of ranks, with `splits` a pair of
        them and how many came from each (int32, shape [ranks]).

    Raises:
        ValueError: the splits do not fit; a scalar.
    """
    require_tensor(tensor, "alltoall_async")
    engine = engine_of(process_set)
    work = engine.alltoall(tensor, _splits(tensor, splits, process_set.size()), name or "")
    return Handle(work, None if splits is None else lambda result: (result, _received(work)))


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: list[int], name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        work = engine_of(process_set).alltoall(tensor, splits, name or "", awaited=True)
        result = work.wait()
        received = _received(work)
        ctx.mark_non_differentiable(received)
        ctx.received = received.tolist()
        ctx.unsent = tensor.shape[0] - sum(splits)
        ctx.process_set = process_set
        return result, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        back, _ = _Alltoall.apply(gradient, ctx.received, None, ctx.process_set)
        if ctx.unsent:
            back = torch.cat([back, back.new_zeros(ctx.unsent, *back.shape[1:])])
        return back, None, None, None


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send some rows of `tensor` to each rank; return those received, see :func:`alltoall_async`.

    Differentiable: the gradient goes back the way that the rows came.
    """
    require_tensor(tensor, "alltoall")
    engine = engine_of(process_set)  # before anything else is looked at
    rows = _splits(tensor, splits, process_set.size())
    if needs_function(tensor):
        result, received = _Alltoall.apply(tensor, rows, name, process_set)
        return result if splits is None else (result, received)
    work = engine.alltoall(tensor, rows, name or "", True)
    result = work.wait()
    return result if splits is None else (result, _received(work))


def scattered(tensor: Tensor, process_set: ProcessSet) -> Tensor:
    """Return an uninitialised tensor for this rank's part of a reducescatter of `tensor`."""
    if tensor.dim() == 0:
        raise ValueError("reducescatter: a scalar has no first dimension to scatter")
    share, more = divmod(tensor.shape[0], process_set.size())
    rows = share + (process_set.rank() < more)
    return _C.empty_result(tensor, [rows, *tensor.shape[1:]])


def _reducescatter(
    tensor: Tensor,
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    awaited: bool,
) -> Handle:
    engine = engine_of(process_set)
    output = scattered(tensor, process_set)
    return Handle(
        engine.reducescatter(tensor, output, name or "", op, prescale, postscale, awaited)
    )


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start to reduce `tensor` over the ranks and to give each rank some rows of the result.

    Args:
        tensor: at least one dimension; the same shape and dtype on every rank.
        name: what identifies the operation on all ranks.
        op: Average or Sum.
        process_set: the ranks that take part; this one must be among them.
        prescale_factor: multiplies the tensor before it is reduced.
        postscale_factor: multiplies the result.

    Returns:
        A handle whose result is this rank's rows. They are dealt out in the order of ranks; if they
        do not divide evenly, the first ranks get one more.
    """
    require_tensor(tensor, "reducescatter_async")
    return _reducescatter(
        tensor, name, op, prescale_factor, postscale_factor, process_set, awaited=False
    )


def gradient_factor(op: int, prescale: float, postscale: float, process_set: ProcessSet) -> float:
    """Return what multiplies the gathered gradients of a reducescatter, as in Horovod."""
    return prescale * postscale * (process_set.size() if op == Sum else 1)


def _reducescatter_now(tensor: Tensor, name: str | None, *arguments: Any) -> Tensor:
    result: Tensor = _reducescatter(tensor, name, *arguments, awaited=True).wait()
    return result


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, *arguments: Any) -> Tensor:
        ctx.arguments = arguments
        return _reducescatter_now(tensor, name, *arguments)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gathered = allgather(gradient, process_set=ctx.arguments[-1])
        return gathered * gradient_factor(*ctx.arguments), *[None] * 5


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the reduction; see :func:`reducescatter_async`.

    Differentiable: the gradient is the allgather of the ranks' gradients, for Sum times the number
    of ranks, as in Horovod.
    """
    require_tensor(tensor, "reducescatter")
    compressed, context = compression.compress(tensor)
    reducescatter_now = _Reducescatter.apply if needs_function(compressed) else _reducescatter_now
    reduced = reducescatter_now(
        compressed, name, op, prescale_factor, postscale_factor, process_set
    )
    return compression.decompress(reduced, context)
