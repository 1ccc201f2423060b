"""The reduction of sparse tensors: their rows are gathered, and nothing is made dense."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_ring.handle import GroupHandle
from torch_ring.process_set import ProcessSet, engine_of, global_process_set
from torch_ring.reduce_op import Average, Sum

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
        A handle, which may also be called, whose result is an uncoalesced sparse tensor.

    Raises:
        ValueError: the tensor is not sparse COO, or `op` is another.
    """
    engine = engine_of(process_set)
    if tensor.layout != torch.sparse_coo:
        raise ValueError("sparse_allreduce: the tensor is not sparse (COO)")
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce: op must be Average or Sum, not {op!r}")
    shape, size = tensor.shape, process_set.size()

    def finish(gathered: list[Tensor]) -> Tensor:
        indices, values = gathered
        if op == Average:
            integer = not (values.is_floating_point() or values.is_complex())
            values = torch.div(values, size, rounding_mode="trunc" if integer else None)
        return torch.sparse_coo_tensor(indices.t(), values, shape)

    # An index is a row: what is gathered is concatenated along the first dimension.
    rows = [tensor._indices().t().contiguous(), tensor._values().detach()]
    return SparseHandle(engine.grouped_allgather(rows, name or ""), finish)
