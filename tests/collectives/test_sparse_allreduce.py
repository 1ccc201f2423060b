# SPDX-License-Identifier: Apache-2.0
"""sparse_allreduce_async(): the sum of the rows of all ranks."""

from __future__ import annotations

import pytest
import torch
from on_ranks import on_ranks
from worlds import on_most_worlds

import torch_ring as hvd


@on_most_worlds
@on_ranks()
def test_sparse_allreduce(transport, size) -> None:
    rank = hvd.rank()
    # Every rank has row 0 and one of its own; the last has none at all.
    indices = [[0, rank + 1]] if rank < size - 1 else [[]]
    values = torch.full((len(indices[0]), 2), float(rank + 1))
    mine = torch.sparse_coo_tensor(torch.tensor(indices, dtype=torch.int64), values, (size + 1, 2))
    dense = hvd.allreduce(mine.to_dense())
    handle = hvd.sparse_allreduce_async(mine, name="embedding", op=hvd.Average)
    assert callable(handle)
    result = hvd.synchronize(handle)
    assert result.is_sparse
    assert not result.is_coalesced() or size == 1
    torch.testing.assert_close(result.to_dense(), dense)
    summed = hvd.sparse_allreduce_async(mine, "embedding", hvd.Sum)()
    torch.testing.assert_close(summed.to_dense(), dense * size)


@on_ranks(2)
def test_dtypes_of_sparse_tensors() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.float64, torch.int64, torch.complex64, torch.bfloat16):
        values = torch.full((1, 3), rank + 1, dtype=dtype)
        mine = torch.sparse_coo_tensor(torch.tensor([[rank]]), values, (size, 3))
        summed = hvd.sparse_allreduce_async(mine, op=hvd.Sum)()
        assert summed.dtype == dtype
        assert summed.to_dense()[:, 0].tolist() == list(range(1, size + 1)), dtype
        mean = hvd.sparse_allreduce_async(mine, op=hvd.Average)().to_dense()[:, 0]
        exact = [(other + 1) / size for other in range(size)]
        assert mean.tolist() == ([0, 1] if dtype == torch.int64 else exact), dtype


@on_ranks(2)
def test_a_refused_tensor_leaves_nothing_in_flight() -> None:
    """A dtype that cannot be sent is refused whole: nothing of the operation is in flight."""
    rank = hvd.rank()
    for name in ("rows", None):
        for dtype in (torch.bits8, torch.uint8):
            values = torch.tensor([[2 + rank]], dtype=torch.uint8).view(dtype)
            mine = torch.sparse_coo_tensor(torch.tensor([[0]]), values, (2, 1))
            if dtype == torch.bits8:
                with pytest.raises(ValueError, match="bits8"):
                    hvd.sparse_allreduce_async(mine, name, hvd.Sum)
            else:
                summed = hvd.sparse_allreduce_async(mine, name, hvd.Sum)()
                assert summed.to_dense().tolist() == [[5], [0]]
    one = torch.sparse_coo_tensor(torch.zeros(1, 1 - rank, dtype=torch.long), [1.0][rank:], (2,))
    assert hvd.sparse_allreduce_async(one, op=hvd.Sum)().is_coalesced()  # as torch finds: one row


@on_ranks(3)
def test_sparse_tensors_that_differ_are_refused_on_all_ranks() -> None:
    rank = hvd.rank()
    row = torch.tensor([[0]])
    ends = hvd.add_process_set([0, 2])
    if not ends.included():
        return
    for op, shape, sparse_dim, text in (
        (hvd.Sum, (2 + rank, 3), 1, "rank 0: Sum of [2, 3]; rank 2: Sum of [4, 3]"),
        (rank // 2, (2, 3), 1, "rank 0: Average of [2, 3]; rank 2: Sum of [2, 3]"),
        (hvd.Sum, (2, 3), 1 + rank // 2, "rank 0: sparse_dim 1; rank 2: sparse_dim 2"),
        (hvd.Sum, (2, 3, 4)[rank // 2 :], 2 - rank // 2, "rank 0: Sum of [2, 3, 4]; rank 2: Sum"),
    ):
        values = torch.ones(1, *shape[sparse_dim:])
        mine = torch.sparse_coo_tensor(row.expand(sparse_dim, 1), values, shape)
        handle = hvd.sparse_allreduce_async(mine, "rows", op, ends)
        with pytest.raises(hvd.MismatchError) as error:
            handle()
        assert text in str(error.value)
    same = torch.sparse_coo_tensor(row, torch.ones(1), (1,))
    assert hvd.sparse_allreduce_async(same, "rows", hvd.Sum, ends)().to_dense().tolist() == [2.0]
