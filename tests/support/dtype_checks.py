"""Collectives of every dtype: functions that each rank calls, with the name of a device's type."""

from __future__ import annotations

import torch
from closed_form import NUMBERS
from torch import Tensor

import torch_ring as hvd

FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
MOVED_ONLY = [torch.uint16, torch.uint32, torch.uint64, torch.complex32, *FLOAT8]
COMPLEX = [torch.complex64, torch.complex128]
MOVED = [*NUMBERS, torch.bool, *COMPLEX, *MOVED_ONLY]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3, 2), (5, 0, 2), (4099,)]
_PERIOD = 97


def patterned(rank: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return a tensor whose bytes differ by rank and by place, including NaNs of all kinds."""
    count = torch.Size(shape).numel() * dtype.itemsize
    octets = (torch.arange(count) * 7 + 31 * rank) % (2 if dtype == torch.bool else 251)
    return octets.to(torch.uint8).view(dtype).view(shape).to(device)


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def same(got: Tensor, want: Tensor) -> bool:
    is_alike = (got.dtype, got.shape) == (want.dtype, want.shape)
    return is_alike and torch.equal(bits(got), bits(want))


def check_moves(device: str = "cpu") -> None:
    """Check broadcast, allgather and alltoall of every dtype, in all their forms."""
    size, rank = hvd.size(), hvd.rank()
    for dtype in MOVED:
        for shape in SHAPES:
            root = len(shape) % size
            mine, want = patterned(rank, shape, dtype, device), patterned(root, shape, dtype, "cpu")
            assert same(hvd.broadcast(mine, root), want), (dtype, shape)
            assert same(hvd.synchronize(hvd.broadcast_async(mine, root)), want)
            assert hvd.broadcast_(mine, root) is mine
            assert same(mine, want)
            if not shape:
                continue
            shapes = [((1 + r) * shape[0], *shape[1:]) for r in range(size)]
            parts = [patterned(r, shapes[r], dtype, "cpu") for r in range(size)]
            mine = parts[rank].to(device)
            joined = torch.cat([bits(part) for part in parts])
            assert same(hvd.allgather(mine).cpu().view(-1), joined.view(dtype)), (dtype, shape)
            for gathered in hvd.grouped_allgather([mine, mine]):
                assert same(gathered.cpu().view(-1), joined.view(dtype))
            splits = [0] * size
            splits[(rank + 1) % size] = mine.shape[0]
            received, counts = hvd.alltoall(mine, splits)
            assert same(received, parts[rank - 1]), (dtype, shape)
            assert counts.sum() == len(parts[rank - 1])
        holes = patterned(rank, (6, 4), dtype, device)[:, ::2]
        want = patterned(0, (6, 4), dtype, "cpu")[:, ::2]
        assert same(hvd.broadcast(holes, 0), want), dtype
        assert same(hvd.broadcast_(holes, 0), want), dtype


def integers_of(rank: int, dtype: torch.dtype) -> list[int]:
    """Return integers of the whole range of the dtype, including its ends."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    step = (high - low) // (_PERIOD - 1)
    values = [low + (i * 41 + rank * 7) % _PERIOD * step for i in range(_PERIOD)]
    return [low, high, high - rank, low + rank, *values][:_PERIOD]


def averages(ranks: int, dtype: torch.dtype, size: int) -> list[int]:
    """Return the averages over the first `ranks` of `size` ranks, truncated toward zero."""
    of_ranks = [integers_of(rank, dtype) for rank in range(ranks)]
    sums = [sum(values) for values in zip(*of_ranks, strict=True)]
    return [abs(total) // size * (1 if total >= 0 else -1) for total in sums]


def repeated(values: list[int], count: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype).repeat(-(-count // len(values)))[:count]


def check_integer_averages(device: str = "cpu") -> None:
    """Check that the sum of an Average does not wrap around, in all forms and on all paths."""
    size, rank = hvd.size(), hvd.rank()
    for dtype in INTEGERS:
        many = (300_007,) if dtype in (torch.int8, torch.int64) else ()
        for count in (0, 1, 97, 12_289, *many):  # inline, gathered, and in chunks
            mine = repeated(integers_of(rank, dtype), count, dtype).to(device)
            want = repeated(averages(size, dtype, size), count, dtype)
            what = f"{dtype}, {count} elements"
            assert same(hvd.allreduce(mine), want), what
            handles = [hvd.allreduce_async(mine, name=f"a{i}") for i in range(3)]  # fused
            assert all(same(hvd.synchronize(handle), want) for handle in handles), what
            assert all(same(each, want) for each in hvd.grouped_allreduce([mine, mine])), what
            own = torch.tensor_split(want, size)[rank]
            assert same(hvd.reducescatter(mine), own), what
            (share,) = hvd.grouped_reducescatter([mine])
            assert same(share, own), what
            if device == "cpu":
                shared = hvd.empty_shared(count, dtype=dtype)
                shared.copy_(mine)
                assert same(hvd.allreduce_(shared), want), what
            assert same(hvd.allreduce_(mine), want), what


def check_averages_with_a_joined_rank(device: str = "cpu") -> None:
    """Check that a rank which has joined counts as zeros."""
    size, rank = hvd.size(), hvd.rank()
    if rank < size - 1:
        for dtype in INTEGERS:
            mine = repeated(integers_of(rank, dtype), 500, dtype).to(device)
            want = repeated(averages(size - 1, dtype, size), 500, dtype)
            assert same(hvd.allreduce(mine), want), dtype
        pair = torch.full((3,), 1 + 2j, device=device)
        assert hvd.allreduce(pair, op=hvd.Sum).tolist() == [(size - 1) * (1 + 2j)] * 3
    hvd.join()


def check_factors_of_integers(device: str = "cpu") -> None:
    """Check that factors clamp: the same on every transport and device."""
    size = hvd.size()
    for dtype in INTEGERS:
        high, low = torch.iinfo(dtype).max, torch.iinfo(dtype).min
        mine = torch.tensor([high, low, 8, 5], dtype=dtype, device=device)
        for factors in ({"prescale_factor": 4.0}, {"postscale_factor": 4.0}):
            got = hvd.allreduce(mine, **factors).tolist()
            assert got == [high, low, 32, 20], (dtype, factors)
        got = hvd.allreduce(mine[2:], op=hvd.Sum, prescale_factor=0.3, postscale_factor=2.0)
        assert got.tolist() == [2 * size * 2, size * 1 * 2], dtype


def check_complex(device: str = "cpu") -> None:
    """Check that a complex number is reduced as its two parts, in all forms and gradients."""
    size, rank = hvd.size(), hvd.rank()
    for dtype in COMPLEX:
        for shape in [(), (0,), (1,), (7, 3), (50_021,)]:
            numel = torch.Size(shape).numel()
            parts = (torch.arange(2.0 * numel, dtype=dtype.to_real()) % 89).view(*shape, 2)
            mine = torch.view_as_complex((parts + rank).contiguous()).to(device)
            sums = torch.view_as_complex((parts * size + size * (size - 1) / 2).contiguous())
            for op, want in ((hvd.Sum, sums), (hvd.Average, sums / size)):
                torch.testing.assert_close(hvd.allreduce(mine, op=op).cpu(), want)
                twice = hvd.allreduce(mine, op=op, postscale_factor=2.0)
                torch.testing.assert_close(twice.cpu(), 2 * want)
                (grouped,) = hvd.grouped_allreduce([mine], op=op)
                torch.testing.assert_close(grouped.cpu(), want)
                if shape:
                    own = torch.tensor_split(want, size)[rank]
                    torch.testing.assert_close(hvd.reducescatter(mine, op=op).cpu(), own)
                inplace = mine.clone()
                assert hvd.allreduce_(inplace, op=op) is inplace
                torch.testing.assert_close(inplace.cpu(), want)
                if device != "cpu":  # the stand-in for a device has no conjugated views
                    continue
                flagged = mine.clone().conj()
                torch.testing.assert_close(hvd.allreduce(flagged, op=op), want.conj())
                hvd.allreduce_(flagged, op=op)
                torch.testing.assert_close(flagged, want.conj())
                assert same(hvd.broadcast(flagged, 0), want.conj().resolve_conj())


def check_complex_gradients(device: str = "cpu") -> None:
    """Check that the gradients of complex tensors are those of their real and imaginary parts."""
    size = hvd.size()
    operations = [
        lambda x: hvd.allreduce(x, op=hvd.Sum),
        hvd.allreduce,
        hvd.allgather,
        lambda x: hvd.grouped_allgather([x])[0],
        lambda x: hvd.broadcast(x, size - 1),
        hvd.alltoall,
        lambda x: hvd.reducescatter(x, op=hvd.Sum),
        hvd.reducescatter,
    ]
    for dtype in COMPLEX:
        for operation in operations:
            parts = torch.arange(4.0 * size, dtype=dtype.to_real()).view(2 * size, 2)
            whole = torch.view_as_complex(parts + hvd.rank()).to(device).requires_grad_()
            halves = (parts + hvd.rank()).to(device).requires_grad_()
            got, want = torch.view_as_real(operation(whole)), operation(halves)
            torch.testing.assert_close(got, want)
            weights = torch.arange(want.numel(), dtype=want.dtype, device=device).view_as(want)
            (got * weights).sum().backward()
            (want * weights).sum().backward()
            assert whole.grad is not None
            torch.testing.assert_close(torch.view_as_real(whole.grad), halves.grad)
