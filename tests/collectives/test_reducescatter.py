"""reducescatter(): each rank gets its rows of the sum."""

from __future__ import annotations

import pytest
import torch
from pool import run
from worlds import on_most_worlds

import torch_ring as hvd


def check_reducescatter() -> None:
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


@on_most_worlds
def test_reducescatter(transport, size):
    run(check_reducescatter, size, transport=transport)


def check_refusals() -> None:
    tensor = torch.ones(5, 2)
    for op in (hvd.reducescatter, hvd.allgather):
        with pytest.raises(ValueError, match="scalar"):
            op(torch.tensor(1.0))
    for op in (hvd.Min, hvd.Product):
        with pytest.raises(ValueError, match=r"hvd\.Average or hvd\.Sum; got hvd"):
            hvd.reducescatter(tensor, op=op)
    with pytest.raises(ValueError, match="bool"):
        hvd.reducescatter(tensor > 0, op=hvd.Sum)
    assert hvd.allreduce(tensor).sum() == 10


def test_wrong_arguments_are_refused_before_anything_is_sent():
    run(check_refusals, 2)


def check_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
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


@on_most_worlds
def test_gradients_return_to_all_ranks(transport, size):
    run(check_gradients, size, transport=transport)
