"""alltoall(): every rank sends rows to every rank."""

from __future__ import annotations

import pytest
import torch
from pool import run
from worlds import on_most_worlds

import torch_ring as hvd

DTYPES = [torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.bool]


def check_alltoall() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        for width in (1, 5_000):
            # Rank s sends s + r rows to rank r, filled with 10 s + r.
            splits = [rank + to for to in range(size)]
            rows = [torch.full((n, width), 10 * rank + to) for to, n in enumerate(splits)]
            rows.append(torch.zeros(2, width, dtype=torch.int64))  # more than the splits: kept
            tensor = torch.cat(rows).to(dtype)
            want = torch.cat([torch.full((s + rank, width), 10 * s + rank) for s in range(size)])
            for form in (splits, torch.tensor(splits), torch.tensor(splits, dtype=torch.int32)):
                got, received = hvd.alltoall(tensor, form)
                assert torch.equal(got, want.to(dtype))
                assert received.dtype == torch.int32
                assert received.tolist() == [s + rank for s in range(size)]
    even = torch.arange(2 * size) + 100 * rank
    got = hvd.alltoall(even.view(-1, 1).expand(-1, 3).t().contiguous().t())  # not contiguous
    assert got[:, 1].tolist() == [100 * s + 2 * rank + i for s in range(size) for i in range(2)]
    result, received = hvd.synchronize(hvd.alltoall_async(even, [2] * size, name="a"))
    assert len(result) == 2 * size
    assert received.tolist() == [2] * size
    assert hvd.alltoall(torch.empty(0, 3)).shape == (0, 3)


@on_most_worlds
def test_alltoall(transport, size):
    run(check_alltoall, size, transport=transport)


def check_refusals() -> None:
    tensor = torch.ones(5, 2)
    for wrong, why in (
        ([1], "1 splits for 2 ranks"),
        ([], "0 splits for 2 ranks"),
        ([-1, 2], "negative"),
        ([3, 3], "more rows"),
        (torch.tensor([0.5, 0.5]), "integers"),
        ([1.0, 1.0], "integers"),
        (["1", "1"], "integers"),
        (torch.tensor([[1, 1]]), "integers"),
        (2, "integers"),
        (None, "5 rows do not divide"),
    ):
        with pytest.raises(ValueError, match=why):
            hvd.alltoall(tensor, wrong)
        with pytest.raises(ValueError, match=why):
            hvd.alltoall_async(tensor, wrong)
    with pytest.raises(ValueError, match="scalar"):
        hvd.alltoall(torch.tensor(1.0))
    with pytest.raises(hvd.MismatchError):
        hvd.alltoall(torch.ones(2, 1 + hvd.rank()))
    assert hvd.allreduce(tensor).sum() == 10


def test_wrong_splits_are_refused_before_anything_is_sent():
    run(check_refusals, 2)


def check_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = torch.ones(2 * size + 1, requires_grad=True)
    received = hvd.alltoall(x, [2] * size)[0]
    (received * torch.arange(2 * size)).sum().backward()
    # The rows 2 rank, 2 rank + 1 that went to rank r come back.
    assert x.grad is not None
    assert x.grad.tolist() == [2.0 * rank, 2.0 * rank + 1] * size + [0.0]


@on_most_worlds
def test_gradients_return_to_the_rank_of_their_rows(transport, size):
    run(check_gradients, size, transport=transport)
