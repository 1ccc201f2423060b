"""The reduction of sparse tensors: their rows are gathered, and nothing is made dense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ring.errors import MismatchError
from torch_ring.handle import GroupHandle
from torch_ring.process_set import ProcessSet, engine_of, global_process_set
from torch_ring.reduce_op import Average, ReduceOp, Sum

__all__ = ["SparseHandle", "sparse_allreduce_async"]


class SparseHandle(GroupHandle):
    """A handle that gives its result also when it is called, as Horovod's does."""

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
        name: what identifies the operation on all ranks.
        op: Average or Sum.
        process_set: the ranks that take part; this one must be among them.

    Returns:
        A handle, which may also be called, whose result is an uncoalesced sparse tensor. It raises
        MismatchError, on every rank, if the shapes or the operators differ.

    Raises:
        ValueError: the tensor is not sparse COO, or `op` is another.
    """
    engine = engine_of(process_set)
    if tensor.layout != torch.sparse_coo:
        raise ValueError("sparse_allreduce: the tensor is not sparse (COO)")
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce: op must be Average or Sum, not {op!r}")
    shape, device, ranks = tensor.shape, tensor.device, process_set.ranks or []
    # That the ranks agree on the dense dimensions is seen in the values; for the rest, what a rank
    # asks for goes before its indices.
    asked = torch.tensor([tensor.dim(), op, *shape], device=device)
    indices = torch.cat([asked, tensor._indices().flatten()])
    works = engine.grouped_allgather([indices, tensor._values().detach()], name or "")

    def finish(gathered: list[Tensor]) -> Tensor:
        parts = torch.split(gathered[0], works[0].received_splits())
        _require_same(name, [part[: 2 + int(part[0])].tolist() for part in parts], ranks)
        joined = torch.cat(
            [
                part[len(asked) :].view(tensor.sparse_dim(), rows)
                for part, rows in zip(parts, works[1].received_splits(), strict=True)
            ],
            dim=1,
        )
        values = gathered[1]
        if op == Average:
            integer = not (values.is_floating_point() or values.is_complex())
            values = torch.div(values, len(ranks), rounding_mode="trunc" if integer else None)
        return torch.sparse_coo_tensor(joined, values, shape, check_invariants=False)

    return SparseHandle(works, finish)


def _require_same(name: str | None, asked: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
    """Raise MismatchError if the ranks have asked for different things."""
    for rank, other in zip(ranks, asked, strict=True):
        if other != asked[0]:
            raise MismatchError(
                f"sparse_allreduce {name or ''!r}: the ranks disagree: "
                f"rank {ranks[0]}: {_describe(*asked[0])}; rank {rank}: {_describe(*other)}"
            )


def _describe(_: int, op: int, *shape: int) -> str:
    return f"{ReduceOp(op).name} of {list(shape)}"
