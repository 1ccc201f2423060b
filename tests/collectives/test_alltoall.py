"""Alltoall and reducescatter: over shared memory and over TCP."""

from __future__ import annotations

import pytest
import torch
from pool import run

import torch_ring as hvd

on_all_worlds = pytest.mark.parametrize(
    ("transport", "size"),
    [("shm", 1), ("shm", 2), ("shm", 3), ("tcp", 2), ("tcp", 3)],
)
DTYPES = [torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.bool]


def exchanges() -> None:
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


@on_all_worlds
def test_alltoall(transport, size):
    run(exchanges, size, transport=transport)


def refuses_splits() -> None:
    tensor = torch.ones(5, 2)
    for wrong, why in (
        ([1], "1 splits for 2 ranks"),
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
    for op in (hvd.alltoall, hvd.reducescatter, hvd.allgather):
        with pytest.raises(ValueError, match="scalar"):
            op(torch.tensor(1.0))
    for op in (hvd.Min, hvd.Product):
        with pytest.raises(ValueError, match="Sum or Average"):
            hvd.reducescatter(tensor, op=op)
    with pytest.raises(ValueError, match="bool"):
        hvd.reducescatter(tensor > 0, op=hvd.Sum)
    with pytest.raises(hvd.MismatchError):
        hvd.alltoall(torch.ones(2, 1 + hvd.rank()))
    assert hvd.allreduce(tensor).sum() == 10


def test_what_cannot_be_scattered_is_refused_before_anything_is_sent():
    run(refuses_splits, 2)


def scatters() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float32):
        for rows in (0, 1, size, 2 * size + 1):
            for width in (3, 7_001):
                tensor = (torch.arange(rows * width) % 7 + rank).view(rows, width).to(dtype)
                total = sum((torch.arange(rows * width) % 7 + r) for r in range(size))
                share = torch.tensor_split(total.view(rows, width), size)[rank]
                got = hvd.reducescatter(tensor, op=hvd.Sum)
                assert got.dtype == dtype
                assert torch.equal(got, share.to(dtype))
    average = hvd.synchronize(hvd.reducescatter_async(torch.full((size,), float(rank))))
    assert average.tolist() == [(size - 1) / 2]
    scaled = hvd.reducescatter(
        torch.ones(size),
        "n",
        hvd.Compression.fp16,
        hvd.Sum,
        prescale_factor=0.5,
        postscale_factor=3,
    )
    assert scaled.tolist() == [1.5 * size]
    many = hvd.grouped_reducescatter([torch.ones(size), torch.ones(2 * size, 2)], op=hvd.Sum)
    assert [tuple(t.shape) for t in many] == [(1,), (2, 2)]
    assert all((t == size).all() for t in many)


@on_all_worlds
def test_reducescatter(transport, size):
    run(scatters, size, transport=transport)


def has_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = torch.ones(2 * size + 1, requires_grad=True)
    received = hvd.alltoall(x, [2] * size)[0]
    (received * torch.arange(2 * size)).sum().backward()
    # What went to rank r as rows 2 rank, 2 rank + 1 comes back.
    assert x.grad is not None
    assert x.grad.tolist() == [2.0 * rank, 2.0 * rank + 1] * size + [0.0]

    for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):
        y = torch.ones(size, 2, requires_grad=True)
        z = torch.ones(size, 3, requires_grad=True)
        one = hvd.reducescatter(y, op=op)
        two = hvd.grouped_reducescatter([y, z], op=op)
        ((rank + 1) * (one.sum() + sum(t.sum() for t in two))).backward()
        assert y.grad is not None
        assert z.grad is not None
        assert y.grad[:, 0].tolist() == [2.0 * factor * (r + 1) for r in range(size)]
        assert z.grad[:, 0].tolist() == [1.0 * factor * (r + 1) for r in range(size)]


@on_all_worlds
def test_gradients_go_back_the_way_that_the_rows_came(transport, size):
    run(has_gradients, size, transport=transport)
