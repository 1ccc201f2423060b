"""Every operation, on every transport, world size and dtype, against a closed form.

Element i on rank r is i * size + r, as far as the dtype holds it.
"""

from collections.abc import Callable

import pytest
import torch
from pool import run
from torch import Tensor

import torch_ring as hvd

TRANSPORTS = ["shm", "tcp"]
SIZES = [1, 2, 3, 4]
NUMBERS = [
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3,), (5, 0, 2), (7, 11), (4099,), (300_007,)]

on_all_worlds = pytest.mark.parametrize(
    ("transport", "size"), [(t, s) for t in TRANSPORTS for s in SIZES]
)


def element(rank: int, shape: tuple[int, ...], dtype: torch.dtype, size: int) -> Tensor:
    """Return rank's tensor: small enough that sums and products of four are exact."""
    numel = torch.Size(shape).numel()
    values = (torch.arange(numel) % 5) * size + rank
    return (values % (3 if dtype in (torch.int8, torch.uint8) else 8)).to(dtype).reshape(shape)


def all_ranks(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = hvd.size()
    return torch.stack([element(r, shape, dtype, size) for r in range(size)])


def expected(stack: Tensor, op: int) -> Tensor:
    """Return the reduction over dimension 0, in the dtype of the ranks' tensors."""
    wide = stack.to(torch.float64)
    reduced: dict[int, Callable[[], Tensor]] = {
        hvd.Sum: lambda: wide.sum(0),
        hvd.Average: lambda: wide.sum(0) / len(stack),
        hvd.Min: lambda: wide.amin(0),
        hvd.Max: lambda: wide.amax(0),
        hvd.Product: lambda: wide.prod(0),
    }
    result = reduced[op]()
    return result.to(stack.dtype) if stack.is_floating_point() else result.trunc().to(stack.dtype)


def shapes(dtype: torch.dtype) -> list[tuple[int, ...]]:
    """Return what a dtype is tried with: that a tensor is sent in pieces concerns two of them."""
    return SHAPES if dtype in (torch.float32, torch.bfloat16) else SHAPES[:-1]


def allreduces_everything() -> None:
    for dtype in NUMBERS:
        for shape in shapes(dtype):
            stack = all_ranks(shape, dtype)
            for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
                mine = stack[hvd.rank()].clone()
                want = expected(stack, op)
                got = hvd.allreduce(mine, op=op)
                # An average in 16 bits is one rounding away from the same in 64.
                torch.testing.assert_close(got, want, msg=lambda m: f"{dtype} {shape} {op}: {m}")  # noqa: B023
                assert hvd.allreduce_(mine, op=op) is mine
                assert torch.equal(mine, got)


@on_all_worlds
def test_allreduce(transport, size):
    run(allreduces_everything, size, transport=transport)


def reduces_booleans() -> None:
    mine = torch.tensor([True, False, hvd.rank() == 0, hvd.rank() > 0])
    alone = hvd.size() == 1
    assert hvd.allreduce(mine, op=hvd.Max).tolist() == [True, False, True, not alone]
    assert hvd.allreduce(mine, op=hvd.Min).tolist() == [True, False, alone, False]
    assert hvd.allreduce(mine, op=hvd.Product).tolist() == [True, False, alone, False]
    for op in (hvd.Sum, hvd.Average):
        with pytest.raises(ValueError, match="bool tensors take Min, Max and Product"):
            hvd.allreduce(mine, op=op)


@on_all_worlds
def test_allreduce_of_bool(transport, size):
    run(reduces_booleans, size, transport=transport)


def scales() -> None:
    size, rank = hvd.size(), hvd.rank()
    ones = torch.full((5,), float(rank + 1))
    total = size * (size + 1) / 2
    scaled = hvd.allreduce(ones, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert scaled.tolist() == [total * 1.5] * 5
    half = hvd.allreduce(torch.full((5,), 0.1, dtype=torch.float16), op=hvd.Average)
    assert torch.equal(half, torch.full((5,), 0.1, dtype=torch.float16))
    # The prescale is applied before the sum, and truncates integers.
    whole = hvd.allreduce(torch.tensor([3, -3]), op=hvd.Sum, prescale_factor=0.5)
    assert whole.tolist() == [size, -size]
    averaged = hvd.allreduce(torch.tensor([-3 * size - 1, 7 * size + 1]), op=hvd.Average)
    assert averaged.tolist() == [-3 * size - 1, 7 * size + 1]
    if size > 1:
        uneven = hvd.allreduce(torch.tensor([-1 if rank == 0 else 0]), op=hvd.Average)
        assert uneven.tolist() == [0]


@on_all_worlds
def test_factors(transport, size):
    run(scales, size, transport=transport)


def accumulates_in_float32() -> None:
    """2048 + 1 + 1 + 1 is 2051 in float32 and 2048 when float16 rounds every step."""
    value = 2048.0 if hvd.rank() == 0 else 1.0
    for count in (8, 100_000):
        total = hvd.allreduce(torch.full((count,), value, dtype=torch.float16), op=hvd.Sum)
        want = torch.tensor(2048.0 + hvd.size() - 1).to(torch.float16)
        assert torch.equal(total, want.expand(count))


@on_all_worlds
def test_sixteen_bits_are_summed_in_32(transport, size):
    run(accumulates_in_float32, size, transport=transport)


def gives_the_same_bits() -> None:
    for count in (100, 5_000, 700_001):
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(hvd.rank())
            mine = torch.randn(count, generator=generator).to(dtype)
            first = hvd.allreduce(mine)
            again = hvd.allreduce(mine)
            assert torch.equal(first, again)
            everyone = hvd.allgather(first.reshape(1, -1))
            assert all(torch.equal(first, other) for other in everyone)


@on_all_worlds
def test_same_bits_everywhere_and_every_time(transport, size):
    run(gives_the_same_bits, size, transport=transport)


def takes_odd_layouts() -> None:
    size, rank = hvd.size(), hvd.rank()
    base = torch.arange(24.0).reshape(4, 6) + rank
    mean = torch.arange(24.0).reshape(4, 6) + (size - 1) / 2
    for view in (lambda t: t.t(), lambda t: t[::2, 1::2], lambda t: t[1].expand(3, 6)):
        torch.testing.assert_close(hvd.allreduce(view(base)), view(mean))
    inplace = base.clone()
    hvd.allreduce_(inplace.t())
    torch.testing.assert_close(inplace, mean)
    part = base.clone()
    hvd.broadcast_(part[:, ::2], root_rank=size - 1)
    torch.testing.assert_close(part[:, ::2], (base - rank + size - 1)[:, ::2])
    assert torch.equal(part[:, 1::2], base[:, 1::2])
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    same = hvd.broadcast(image, root_rank=0)
    torch.testing.assert_close(hvd.allreduce(same), same)
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    assert hvd.broadcast_(parameter, root_rank=0) is parameter
    assert parameter.tolist() == [0.0] * 3
    assert parameter.requires_grad


@on_all_worlds
def test_layouts(transport, size):
    run(takes_odd_layouts, size, transport=transport)


def broadcasts_everything() -> None:
    for dtype in [*NUMBERS, torch.bool]:
        for shape in shapes(dtype):
            for root in range(hvd.size()):
                mine = element(hvd.rank(), shape, dtype, hvd.size())
                want = element(root, shape, dtype, hvd.size())
                assert torch.equal(hvd.broadcast(mine, root), want)
                assert torch.equal(mine, element(hvd.rank(), shape, dtype, hvd.size()))
                assert hvd.broadcast_(mine, root) is mine
                assert torch.equal(mine, want)


def noted_only() -> None:
    """A tensor may be the negative of its memory, or all zero without any."""
    size, numbers = hvd.size(), torch.arange(1.0, 3.0)
    conjugate = torch.tensor([2 + 3j]).conj()
    for tensor, expected in [
        (conjugate.imag, [-3.0]),
        (torch._neg_view(numbers), [-1.0, -2.0]),
        (torch._neg_view(numbers.repeat_interleave(2)[::2]), [-1.0, -2.0]),
        (torch._efficientzerotensor((2,)), [0.0, 0.0]),
    ]:
        rows = torch._neg_view(-torch.tensor(expected).repeat(size))
        for result, times in [
            (hvd.allreduce(tensor, op=hvd.Max), 1),
            (hvd.grouped_allreduce([tensor])[0], 1),
            (hvd.broadcast(tensor, 0), 1),
            (hvd.allgather(tensor), size),
            (hvd.alltoall(rows), size),
            (hvd.reducescatter(rows), 1),
        ]:
            assert result.tolist() == expected * times
    negative = torch._neg_view(torch.arange(3.0) + hvd.rank())
    assert hvd.allreduce_(negative, op=hvd.Max).tolist() == [0.0, -1.0, -2.0]


@on_all_worlds
def test_values_that_are_only_noted(transport, size):
    run(noted_only, size, transport=transport)


@on_all_worlds
def test_broadcast(transport, size):
    run(broadcasts_everything, size, transport=transport)


def gathers_everything() -> None:
    size = hvd.size()
    for dtype in [*NUMBERS, torch.bool]:
        for rest in [(), (3,), (2, 0), (257, 5)]:
            for rows in ([1] * size, list(range(size)), [0] * size, [700, *[3] * (size - 1)]):
                parts = [element(r, (rows[r], *rest), dtype, size) for r in range(size)]
                assert torch.equal(hvd.allgather(parts[hvd.rank()]), torch.cat(parts))


@on_all_worlds
def test_allgather(transport, size):
    run(gathers_everything, size, transport=transport)


def gathers_much() -> None:
    """Results of 32 MiB and more, for which huge pages are asked, and of no round size."""
    rows = torch.arange(5_000_001, dtype=torch.float32)
    gathered = hvd.allgather(rows)
    assert gathered.nbytes > 32 << 20
    assert all(torch.equal(part, rows) for part in gathered.view(hvd.size(), -1))
    doubled = torch.cat([rows, rows])
    assert torch.equal(hvd.allreduce(doubled), doubled)


def test_large_results():
    run(gathers_much, 2)


def runs_many_at_once() -> None:
    size = hvd.size()
    tensors = [torch.full((i * 7 % 50,), float(i)) for i in range(500)]
    order = range(500) if hvd.rank() == 0 else reversed(range(500))
    handles = {i: hvd.allreduce_async(tensors[i], name=f"t{i}", op=hvd.Sum) for i in order}
    for i, tensor in enumerate(tensors):
        assert torch.equal(hvd.synchronize(handles[i]), tensor * size)
        assert hvd.synchronize(handles[i]) is None
    handle = hvd.allreduce_async_(tensors[9], name="t9")
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle) is tensors[9]
    with pytest.raises(ValueError, match="is not a handle"):
        hvd.poll(17)  # type: ignore[arg-type]
    hvd.barrier()


@on_all_worlds
def test_asynchronous_in_any_order(transport, size):
    run(runs_many_at_once, size, transport=transport)


def differentiates() -> None:
    size, rank = hvd.size(), hvd.rank()
    x = torch.full((3,), float(rank + 1), requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum).mul(rank + 1.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [size * (size + 1) / 2] * 3

    y = torch.ones(2, requires_grad=True)
    hvd.broadcast(y, root_rank=0).mul(rank + 1.0).sum().backward()
    assert y.grad is not None
    assert y.grad.tolist() == [(size + 1) / 2 if rank == 0 else 0.0] * 2

    z = torch.ones(rank + 1, 2, requires_grad=True)
    gathered = hvd.allgather(z)
    weights = torch.arange(float(gathered.numel())).reshape(gathered.shape)
    (gathered * weights * (rank + 1.0)).sum().backward()
    begin = rank * (rank + 1) // 2
    assert z.grad is not None
    torch.testing.assert_close(z.grad, weights[begin : begin + rank + 1] * (size + 1) / 2)


@on_all_worlds
def test_gradients(transport, size):
    run(differentiates, size, transport=transport)


def compresses() -> None:
    exact = torch.arange(100.0) + hvd.rank()
    want = torch.arange(100.0) + (hvd.size() - 1) / 2
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        got = hvd.allreduce(exact, compression=compression)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)


def test_compression():
    run(compresses, 2)


def bumps_the_version() -> None:
    """A tensor that autograd has saved must not change behind its back."""
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    square = y * y
    hvd.allreduce_(y.detach(), op=hvd.Sum)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_in_place_is_seen_by_autograd():
    run(bumps_the_version, 2)
