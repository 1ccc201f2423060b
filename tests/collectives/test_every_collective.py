# SPDX-License-Identifier: Apache-2.0
"""Every collective against its definition: dtypes, shapes, layouts, forms, sets, gradients."""

from __future__ import annotations

import pytest
import torch
from dtype_checks import (
    check_a_joined_rank,
    check_factors_of_integers,
    check_gradients,
    check_layouts,
    check_results,
)
from on_ranks import on_ranks
from pool import run
from slow import slow
from worlds import on_all_worlds, on_most_worlds

import torch_ring as hvd


@on_all_worlds
def test_results(transport, size):
    run(check_results, size, transport=transport)


@on_most_worlds
def test_layouts(transport, size):
    run(check_layouts, size, transport=transport)


@on_most_worlds
def test_gradients(transport, size):
    run(check_gradients, size, transport=transport)


def test_reductions_with_a_joined_rank():
    run(check_a_joined_rank, 3)


@pytest.mark.parametrize(("transport", "size"), [("shm", 3), slow("tcp", 4)])
@on_ranks()
def test_members_of_a_set(transport, size) -> None:
    """The first and the last rank are not neighbours in the world."""
    ends, rank, last = hvd.add_process_set([hvd.size() - 1, 0]), hvd.rank(), hvd.size() - 1
    if not ends.included():
        return
    dtypes = [torch.float32, torch.int32, torch.uint16]
    check_results(process_set=ends, dtypes=dtypes)
    check_gradients(process_set=ends)
    for root in (0, last):  # as the world counts
        assert hvd.broadcast_object(rank, root, process_set=ends) == root
        tensor = torch.tensor([rank])
        hvd.broadcast_parameters({"t": tensor}, root, process_set=ends)
        assert tensor.item() == root
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=float(1 + rank))
        hvd.broadcast_optimizer_state(optimizer, root, process_set=ends)
        assert optimizer.param_groups[0]["lr"] == 1 + root
    assert hvd.allgather_object(rank, process_set=ends) == [0, last]
    row = torch.sparse_coo_tensor([[ends.rank()]], [2.0], (2,))
    assert hvd.sparse_allreduce_async(row, process_set=ends)().to_dense().tolist() == [1.0, 1.0]
    hvd.barrier(process_set=ends)


@on_most_worlds
@on_ranks()
def test_alltoall_tells_the_rows_from_each_rank(transport, size) -> None:
    rank = hvd.rank()
    splits = [rank + to for to in range(size)]
    for form in (splits, torch.tensor(splits), torch.tensor(splits, dtype=torch.int32)):
        got, received = hvd.alltoall(torch.full((sum(splits) + 1,), rank), form)
        assert received.dtype == torch.int32
        assert received.tolist() == [source + rank for source in range(size)]
        assert got.tolist() == [source for source in range(size) for _ in range(source + rank)]


def check_factors() -> None:
    size, rank = hvd.size(), hvd.rank()
    ones = torch.full((5,), float(rank + 1))
    factors = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0}
    assert hvd.allreduce(ones, **factors).tolist() == [size * (size + 1) / 2 * 1.5] * 5
    assert hvd.reducescatter(torch.ones(size), "n", hvd.Compression.fp16, **factors).item() == (
        1.5 * size
    )
    leaf = torch.ones(2, requires_grad=True)
    hvd.allreduce(leaf, **factors).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1.5 * size] * 2
    half = torch.full((5,), 0.1, dtype=torch.float16)
    assert torch.equal(hvd.allreduce(half), half)
    # The prescale is applied before the sum, and truncates integers.
    whole = hvd.allreduce(torch.tensor([3, -3]), op=hvd.Sum, prescale_factor=0.5)
    assert whole.tolist() == [size, -size]
    # Whole factors are exact, where float64 has only every 32nd integer.
    large = torch.tensor([2**57 + 1, -(2**57) - 3])
    for factors in ({"prescale_factor": 3.0}, {"postscale_factor": 3.0}):
        got = hvd.allreduce(large, op=hvd.Average, **factors)
        assert got.tolist() == (large * 3).tolist(), factors
        got = hvd.allreduce(large, op=hvd.Sum, **factors)
        assert got.tolist() == (large * 3 * size).tolist(), factors
    check_factors_of_integers()


@on_most_worlds
def test_factors(transport, size):
    run(check_factors, size, transport=transport)


@on_all_worlds
@on_ranks()
def test_rounding(transport, size) -> None:
    """2048 + 1 + 1 + 1 is 2051 in float32 and 2048 when float16 rounds every step."""
    value = 2048.0 if hvd.rank() == 0 else 1.0
    for count in (8, 100_000):
        total = hvd.allreduce(torch.full((count,), value, dtype=torch.float16), op=hvd.Sum)
        want = torch.tensor(2048.0 + hvd.size() - 1).to(torch.float16)
        assert torch.equal(total, want.expand(count)), "16-bit sums accumulate in float32"
    for count in (100, 5_000, 700_001):
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(hvd.rank())
            mine = torch.randn(count, generator=generator).to(dtype)
            first = hvd.allreduce(mine)
            assert torch.equal(first, hvd.allreduce(mine)), "the same bits every time"
            everyone = hvd.allgather(first.reshape(1, -1))
            assert all(torch.equal(first, other) for other in everyone), "and on all ranks"


@on_ranks(2)
def test_allreduce_with_compression() -> None:
    exact = torch.arange(100.0) + hvd.rank()
    want = torch.arange(100.0) + (hvd.size() - 1) / 2
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        got = hvd.allreduce(exact, compression=compression)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)


@on_ranks(2)
def test_autograd_notices_operations_in_place() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    square = y * y
    hvd.allreduce_(y.detach(), op=hvd.Sum)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()
    parameter = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
    for begin in (hvd.allreduce_async_, lambda each: hvd.broadcast_async_(each, 0)):
        version = parameter._version
        handle = begin(parameter.detach())
        assert parameter._version > version  # at once: it may change at any time from now on
        hvd.synchronize(handle)
    version = parameter._version
    assert hvd.allreduce_(parameter, op=hvd.Max) is parameter
    assert parameter._version > version
    assert hvd.broadcast_(parameter, root_rank=0) is parameter
    assert parameter.tolist() == [(hvd.size() - 1) / 2] * 3
    assert parameter.requires_grad
