"""sparse_allreduce_async: sums of sparse tensors, whose rows are gathered and never made dense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ring._C import Engine, in_words
from torch_ring.collectives.handle import GroupHandle, require_tensor
from torch_ring.collectives.reduce_op import Average, ReduceOp, Sum, checked_op
from torch_ring.errors import InvalidArgumentError, MismatchError
from torch_ring.world.process_set import ProcessSet, engine_of, global_process_set

__all__ = ["SparseHandle", "sparse_allreduce_async", "start_sparse_sum"]


class SparseHandle(GroupHandle):
    """The handle of a sparse sum; calling it waits, as in Horovod."""

    __slots__ = ()

    def __call__(self) -> Any:
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
    """Start to sum the ranks' sparse tensors.

    One allgather is of headers with indices, int64 [sparse_dim, nnz, op, dim, *shape, *indices],
    one of values. A rank without a tensor, or one that has joined, gives nothing.

    Args:
        engine: the engine of the ranks that take part.
        ranks: their ranks in the world, for errors.
        name: the operation's name on all ranks; empty: a running number.
        op: Average, which divides by the number of ranks, or Sum.
        like: a tensor with the shape, dtype and device of the sum.
        own: this rank's tensor; None if it has none.
        joinable: whether ranks may have joined.
        is_coalesced: of the sum; None: as torch finds.
    """
    header = torch.empty(0, dtype=torch.int64, device=like.device)
    values = torch.empty(0, dtype=like.dtype, device=like.device)
    if own is not None:
        indices, values = own._indices(), own._values().detach().flatten()
        request = [*indices.shape, op, own.dim(), *own.shape]
        header = torch.cat([torch.tensor(request, device=like.device), indices.flatten()])
    works = engine.grouped_allgather([header, values], name, joinable=joinable)

    def combine(gathered: list[Tensor]) -> Tensor:
        headers = torch.split(gathered[0], works[0].received_splits())
        parts = [
            _Part.of(rank, part) for rank, part in zip(ranks, headers, strict=True) if len(part)
        ]
        _require_same(name, parts)
        values = gathered[1]
        if op == Average:
            integer = not (values.is_floating_point() or values.is_complex())
            values = torch.div(values, len(ranks), rounding_mode="trunc" if integer else None)
        joined = torch.cat([part.indices for part in parts], dim=1)
        values = values.view(joined.shape[1], *like.shape[joined.shape[0] :])
        return torch.sparse_coo_tensor(
            joined,
            values,
            like.shape,
            device=values.device,
            check_invariants=False,
            is_coalesced=is_coalesced,
        )

    return SparseHandle(works, combine)


class _Part:
    """The header and the indices that one rank has sent."""

    def __init__(self, rank: int, op: int, shape: Sequence[int], indices: Tensor) -> None:
        self.rank = rank
        self.request = f"{ReduceOp(op).name} of {list(shape)}"
        self.indices = indices  # [sparse_dim, nnz]

    @classmethod
    def of(cls, rank: int, sent: Tensor) -> _Part:
        sparse_dim, nnz, op, dim = sent[:4].tolist()
        indices = sent[4 + dim :].view(sparse_dim, nnz)
        return cls(rank, op, sent[4 : 4 + dim].tolist(), indices)

    @property
    def sparse_dim(self) -> str:
        return f"sparse_dim {len(self.indices)}"


def _require_same(name: str, parts: Sequence[_Part]) -> None:
    """Raise MismatchError if the ranks' shapes or operators differ."""
    what = in_words(f"{name}.0") or f"sparse_allreduce {name!r}"
    first = parts[0]
    for part in parts:
        for asked, other in ((first.request, part.request), (first.sparse_dim, part.sparse_dim)):
            if asked != other:
                raise MismatchError(
                    f"{what}: the ranks disagree: rank {first.rank}: {asked}; "
                    f"rank {part.rank}: {other}"
                )
