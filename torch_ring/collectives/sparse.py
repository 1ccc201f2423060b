# SPDX-License-Identifier: Apache-2.0
"""sparse_allreduce_async: sums sparse tensors by gathering their rows, never as dense tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ring._C import Engine, in_words, sparse_message, sparse_sum
from torch_ring.collectives.handle import GroupHandle, require_tensor
from torch_ring.collectives.reduce_op import Average, Sum, checked_op
from torch_ring.errors import InvalidArgumentError
from torch_ring.world.process_set import ProcessSet, engine_of, global_process_set

__all__ = ["SparseHandle", "sparse_allreduce_async", "start_sparse_sum"]


class SparseHandle(GroupHandle[Tensor]):
    """The handle of a sparse sum; calling it waits, as in Horovod."""

    __slots__ = ()

    def __call__(self) -> Tensor:
        """Block until the operation is done and return its result."""
        return self.wait()


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
) -> SparseHandle:
    """Start to sum sparse tensors over the ranks, by two allgathers: of indices and of values.

    Args:
        tensor: sparse COO; the same shape, dtype and number of sparse dimensions on every rank.
        name: matches the operation between the ranks; None: a running number.
        op: Average or Sum.
        process_set: the ranks that take part, this one among them; by default all.

    Returns:
        A handle, which may also be called. Its result is an uncoalesced sparse COO tensor; it
        raises MismatchError, on every rank, if the shapes or the operators differ.

    Raises:
        ValueError: `tensor` is not sparse COO, or `op` is neither Average nor Sum.
    """
    engine = engine_of(process_set)
    require_tensor(tensor, "sparse_allreduce_async")
    if tensor.layout != torch.sparse_coo:
        raise InvalidArgumentError(
            "sparse_allreduce_async takes a sparse COO tensor: a dense one goes to allreduce_async"
        )
    op = checked_op(op, (Average, Sum))
    return start_sparse_sum(engine, process_set.ranks or [], name or "", op, tensor, tensor)


def start_sparse_sum(
    engine: Engine,
    ranks: Sequence[int],
    name: str,
    op: int,
    like: Tensor,
    own: Tensor | None,
    *,
    joinable: bool = False,
    is_coalesced: bool | None = None,
) -> SparseHandle:
    """Start to sum the ranks' sparse tensors, as csrc/bindings/sparse_sum.h does for both APIs.

    A rank without a tensor, or one that has joined, contributes nothing.

    Args:
        engine: the engine of the ranks that take part.
        ranks: their ranks in the world, for errors.
        name: the operation's name on all ranks; empty: a running number.
        op: Average, which divides by the number of ranks, or Sum.
        like: a tensor with the shape, dtype and device of the sum.
        own: this rank's tensor; None if it has none.
        joinable: whether ranks may have joined.
        is_coalesced: whether to mark the sum as coalesced; None: torch decides.
    """
    message = [*sparse_message(own, like, op)]
    works = engine.submit_group("allgather", message, (), name, joinable=joinable)

    def combine(gathered: list[Tensor]) -> Tensor:
        what = in_words(f"{name}.0") or f"sparse_allreduce {name!r}"
        headers, values = gathered
        lengths = works[0].received_splits()
        return sparse_sum(what, op, like, ranks, headers, lengths, values, is_coalesced)

    return SparseHandle(works, combine)
