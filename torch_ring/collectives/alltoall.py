# SPDX-License-Identifier: Apache-2.0
"""alltoall: every rank sends some rows to each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from torch_ring._C import Work
from torch_ring.collectives import operators
from torch_ring.collectives.handle import Handle, needs_function, require_tensor
from torch_ring.collectives.recorded import recorded
from torch_ring.world.process_set import ProcessSet, engine_of, global_process_set

__all__ = ["alltoall", "alltoall_async"]


@overload
def alltoall_async(
    tensor: Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]: ...
@overload
def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[Tensor, Tensor]]: ...
def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """As `alltoall`, without waiting or derivatives.

    Returns:
        A handle, whose result is that of `alltoall`.
    """
    require_tensor(tensor, "alltoall_async")
    engine = engine_of(process_set)
    rows = operators.rows_for_each(tensor, splits, process_set.size())
    work = engine.submit("alltoall", tensor, None, name, splits=rows)
    return Handle(work, None if splits is None else lambda result: (result, _received(work)))


@overload
def alltoall(
    tensor: Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor: ...
@overload
def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, Tensor]: ...
def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send some rows of `tensor` to each rank, and receive some from each.

    Differentiable: each row's gradient goes back to the rank that sent the row.

    Args:
        tensor: at least one dimension; dtype and all dimensions but the first are equal on all
            ranks.
        splits: integers, shape [ranks]: the number of rows for rank 0, 1, ..., together at most
            those of `tensor`; None: the same number for each.
        name: matches the operation between the ranks; None: a running number.
        process_set: the ranks that take part, this one among them; by default all.

    Returns:
        The received rows in the order of ranks. With `splits`, a pair of these rows and the number
        of rows from each rank (int32, shape [ranks]).

    Raises:
        TypeError: `tensor` is no tensor.
        ValueError: `splits` do not fit `tensor`, or `tensor` is a scalar; nothing was sent.
        RingError: MismatchError, PeerLostError or TimeoutError, on every rank.
    """
    require_tensor(tensor, "alltoall")
    if is_dynamo_compiling() and operators.are_traced():
        return operators.alltoall(tensor, splits, name, process_set)
    engine = engine_of(process_set)  # first, to report a wrong process set
    rows = operators.rows_for_each(tensor, splits, process_set.size())
    if needs_function(tensor):
        (result,), (received,) = _alltoall(tensor, rows, name, process_set)
        return result if splits is None else (result, received.to(torch.int32))
    if splits is None:
        return engine.run("alltoall", tensor, None, name)
    work = engine.submit("alltoall", tensor, None, name, True, splits=rows)
    return work.wait(), _received(work)


def _alltoall(
    tensor: Tensor, rows: list[int], name: str | None, process_set: ProcessSet
) -> tuple[list[Tensor], list[Tensor]]:
    unsent = (tensor.shape[0] if tensor.dim() else 0) - sum(rows)

    def derivative(gradients: Sequence[Tensor], received: Sequence[list[int]]) -> list[Tensor]:
        (back,), _ = _alltoall(gradients[0], received[0], None, process_set)
        return [torch.cat([back, back.new_zeros(unsent, *back.shape[1:])]) if unsent else back]

    engine = engine_of(process_set)
    return recorded(engine, "alltoall", [tensor], name, derivative, splits=rows)


def _received(work: Work) -> Tensor:
    return torch.tensor(work.received_splits(), dtype=torch.int32, device="cpu")
