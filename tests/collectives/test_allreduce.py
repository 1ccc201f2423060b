"""allreduce() of every dtype, shape and operation, against a closed form."""

import pytest
import torch
from closed_form import NUMBERS, reduced, shapes_of, stacked_tensors
from pool import run
from worlds import on_all_worlds

import torch_ring as hvd


def check_allreduce() -> None:
    for dtype in NUMBERS:
        for shape in shapes_of(dtype):
            stack = stacked_tensors(shape, dtype)
            for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
                mine = stack[hvd.rank()].clone()
                want = reduced(stack, op)
                got = hvd.allreduce(mine, op=op)
                # An average in 16 bits is one rounding away from the same in 64.
                torch.testing.assert_close(got, want, msg=lambda m: f"{dtype} {shape} {op}: {m}")  # noqa: B023
                assert hvd.allreduce_(mine, op=op) is mine
                assert torch.equal(mine, got)


@on_all_worlds
def test_allreduce(transport, size):
    run(check_allreduce, size, transport=transport)


def check_booleans() -> None:
    mine = torch.tensor([True, False, hvd.rank() == 0, hvd.rank() > 0])
    alone = hvd.size() == 1
    assert hvd.allreduce(mine, op=hvd.Max).tolist() == [True, False, True, not alone]
    assert hvd.allreduce(mine, op=hvd.Min).tolist() == [True, False, alone, False]
    assert hvd.allreduce(mine, op=hvd.Product).tolist() == [True, False, alone, False]
    for op in (hvd.Sum, hvd.Average):
        with pytest.raises(ValueError, match="bool tensors take Min, Max, Product, Band"):
            hvd.allreduce(mine, op=op)


@on_all_worlds
def test_allreduce_of_booleans(transport, size):
    run(check_booleans, size, transport=transport)


def check_factors() -> None:
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
def test_prescale_and_postscale(transport, size):
    run(check_factors, size, transport=transport)


def check_factors_of_large_integers() -> None:
    """Whole factors are exact, where float64 has only every 32nd integer."""
    large, size = torch.tensor([2**57 + 1, -(2**57) - 3]), hvd.size()
    assert hvd.allreduce(large, op=hvd.Average).tolist() == large.tolist()
    for factors in ({"prescale_factor": 3.0}, {"postscale_factor": 3.0}):
        got = hvd.allreduce(large, op=hvd.Average, **factors)
        assert got.tolist() == (large * 3).tolist(), factors
        got = hvd.allreduce(large, op=hvd.Sum, **factors)
        assert got.tolist() == (large * 3 * size).tolist(), factors


@on_all_worlds
def test_factors_of_large_integers(transport, size):
    run(check_factors_of_large_integers, size, transport=transport)


def check_accumulation_in_float32() -> None:
    """2048 + 1 + 1 + 1 is 2051 in float32 and 2048 when float16 rounds every step."""
    value = 2048.0 if hvd.rank() == 0 else 1.0
    for count in (8, 100_000):
        total = hvd.allreduce(torch.full((count,), value, dtype=torch.float16), op=hvd.Sum)
        want = torch.tensor(2048.0 + hvd.size() - 1).to(torch.float16)
        assert torch.equal(total, want.expand(count))


@on_all_worlds
def test_16_bit_sums_accumulate_in_float32(transport, size):
    run(check_accumulation_in_float32, size, transport=transport)


def check_reproducibility() -> None:
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
def test_results_have_the_same_bits_on_all_ranks_and_every_time(transport, size):
    run(check_reproducibility, size, transport=transport)


def check_compression() -> None:
    exact = torch.arange(100.0) + hvd.rank()
    want = torch.arange(100.0) + (hvd.size() - 1) / 2
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        got = hvd.allreduce(exact, compression=compression)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)


def test_allreduce_with_compression():
    run(check_compression, 2)
