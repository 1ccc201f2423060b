"""Results of the engine's reduce, gather and scatter in any world."""

from __future__ import annotations

import torch
from closed_form import NUMBERS, reduced, shapes_of, stacked_tensors, tensor_of

import torch_ring as hvd
from torch_ring.world.current import engine


def check_reduce() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in NUMBERS:
        for number, shape in enumerate(shapes_of(dtype)):
            root = number % size
            mine = tensor_of(rank, shape, dtype, size)
            for op in (hvd.Sum, hvd.Average, hvd.Max):
                got = engine().submit("reduce", mine, None, None, False, op, root=root).wait()
                if rank == root:
                    assert torch.equal(got, reduced(stacked_tensors(shape, dtype), op))
                else:
                    assert got is None
                assert torch.equal(mine, tensor_of(rank, shape, dtype, size))
    for root in range(size):  # in place, strided, scaled, and the bits of an allreduce
        grid = torch.rand(40, 60).t()
        want = hvd.allreduce(grid, op=hvd.Sum, prescale_factor=0.3)
        before = grid.clone()
        engine().submit("reduce", grid, grid, "r", True, hvd.Sum, 0.3, root=root).wait()
        assert torch.equal(grid, want if rank == root else before)


def check_gather() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in [*NUMBERS, torch.bool, torch.complex64]:
        for number, shape in enumerate(shapes_of(dtype)):
            root = number % size
            mine = tensor_of(rank, shape, dtype, size)
            got = engine().submit("gather", mine, root=root).wait()
            if rank == root:
                assert torch.equal(got, stacked_tensors(shape, dtype))
            else:
                assert got is None
    rows = torch.empty(50, size).t() if rank == size - 1 else None  # an output with strides
    engine().submit("gather", torch.full((50,), float(rank)), rows, "g", root=size - 1).wait()
    if rows is not None:
        assert torch.equal(rows, torch.arange(float(size)).view(size, 1).expand(size, 50))


def check_scatter() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in [*NUMBERS, torch.bool, torch.complex64]:
        for number, shape in enumerate(shapes_of(dtype)):
            root = number % size
            parts = stacked_tensors(shape, dtype) if rank == root else None
            mine = torch.empty(shape, dtype=dtype)
            assert engine().submit("scatter", parts, mine, root=root).wait() is mine
            assert torch.equal(mine, tensor_of(rank, shape, dtype, size))
    strided = torch.zeros(9, 4).t()
    parts = torch.rand(size, 4, 9, generator=torch.Generator().manual_seed(1))
    engine().submit("scatter", parts.mT.contiguous().mT, strided, "s", root=0).wait()
    assert torch.equal(strided, parts[rank])


def check_every_root() -> None:
    """All three to and from every root, short and long."""
    rank, size = hvd.rank(), hvd.size()
    for root in range(size):
        for count in (3, 90_001):
            mine = torch.arange(count, dtype=torch.float32) * size + rank
            every = [torch.arange(count, dtype=torch.float32) * size + r for r in range(size)]
            total = engine().submit("reduce", mine, root=root).wait()
            together = engine().submit("gather", mine, root=root).wait()
            back = torch.empty(count)
            engine().submit("scatter", together, back, root=root).wait()
            assert torch.equal(back, mine)
            if rank == root:
                assert torch.equal(total, sum(every))
                assert torch.equal(together, torch.stack(every))
