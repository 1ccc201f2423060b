# SPDX-License-Identifier: Apache-2.0
"""Operations that must work on any accelerator.

test_device_programs.py runs them on a stand-in, tests/gpu on GPUs. Each function is called on every
rank with the name of a device's type; the rank uses the current device of that type. A stand-in's
stream waits on request; a GPU's stream waits because it has much to do.
"""

from __future__ import annotations

from collections.abc import Callable

import dtype_checks
import pytest
import torch
from training import assert_same_on_all_ranks

import torch_ring as hvd


def busy(device: str, milliseconds: int = 50) -> None:
    """Keep the current stream busy for about that long, on a GPU at 2 GHz."""
    if device == "cuda":
        torch.cuda._sleep(milliseconds * 2_000_000)
    else:
        torch.ops.ringdouble.delay(milliseconds)


def check_reproducibility(device: str) -> None:
    for count in (1, 1000, 70_001):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            generator = torch.Generator().manual_seed(hvd.rank())
            mine = torch.randn(count, generator=generator).to(dtype).to(device)
            first = hvd.allreduce(mine)
            assert_same_on_all_ranks(first.cpu())
            reference = hvd.allreduce(mine.cpu().double())
            torch.testing.assert_close(
                first.cpu().double(), reference, rtol=0, atol=4 * torch.finfo(dtype).eps
            )


def fuse_requests(device: str) -> None:
    """Submit requests of random sizes, on every rank in another order."""
    counts = torch.randint(0, 5000, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    dtypes = [torch.float32, torch.float16, torch.int64]
    order = torch.randperm(len(counts), generator=torch.Generator().manual_seed(hvd.rank()))
    handles = {}
    for index in order.tolist():
        mine = torch.full((counts[index],), hvd.rank() + index % 7, dtype=dtypes[index % 3])
        handles[index] = hvd.allreduce_async(mine.to(device), name=f"t{index}", op=hvd.Sum)
    size = hvd.size()
    for index, handle in handles.items():
        result = hvd.synchronize(handle).cpu()
        total = size * (size - 1) // 2 + size * (index % 7)
        assert torch.equal(result, torch.full_like(result, total))


def reduce_with_gaps(device: str) -> None:
    """Reduce columns of a matrix; what lies between them stays."""
    matrix = torch.arange(20.0).reshape(4, 5).to(device)
    columns = matrix[:, ::2]
    want = columns.cpu() * hvd.size()
    assert torch.equal(hvd.allreduce(columns, op=hvd.Sum).cpu(), want)
    hvd.allreduce_(columns, op=hvd.Sum)
    assert torch.equal(columns.cpu(), want)
    assert torch.equal(matrix[:, 1::2].cpu(), torch.arange(20.0).reshape(4, 5)[:, 1::2])


def follow_streams(device: str) -> None:
    """A collective reads after earlier work of its stream, and later work reads its result."""
    count, size = 5000, hvd.size()
    sources = [torch.full((count,), float(i + hvd.rank())).to(device) for i in range(5)]
    hvd.allreduce(sources[0])  # NCCL starts
    for i, source in enumerate(sources):
        own, other = torch.Stream(device), torch.Stream(device)
        with own:
            busy(device)
            mine = torch.zeros(count, device=device)
            mine.copy_(source)
            handle = hvd.allreduce_async(mine, op=hvd.Sum, name=f"s{i}")
        with other:
            result = hvd.synchronize(handle).clone().cpu()
        assert torch.equal(result, torch.full((count,), i * size + size * (size - 1) / 2))


def drop_tensors_early(device: str) -> None:
    """The caller may drop tensors that a collective has not read yet."""
    hvd.allreduce(torch.ones(1, device=device))
    handles = []
    for i in range(4):
        busy(device, 30)
        mine = torch.ones(1000 + i, device=device)
        handles.append(hvd.allreduce_async(mine, op=hvd.Sum, name=f"dropped{i}"))
        del mine
        for _ in range(3):
            torch.full((1000 + i,), float("nan"), device=device)
    for handle in handles:
        assert (hvd.synchronize(handle).cpu() == hvd.size()).all()


def poll_handles(device: str) -> None:
    hvd.allreduce(torch.ones(1, device=device))
    busy(device, 300)
    mine = torch.ones(10, device=device)
    handle = hvd.allreduce_async(mine, name="polled")
    early = hvd.poll(handle)
    result = hvd.synchronize(handle)  # the host has not waited
    assert not early
    assert result.cpu().tolist() == [1.0] * 10
    handle = hvd.allreduce_async(mine, name="polled")
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).cpu().tolist() == [1.0] * 10


def mix_host_and_device(device: str) -> None:
    """Use tensors on the host and on the device; and Adasum, for a power of two of ranks."""
    size, rank = hvd.size(), hvd.rank()
    there = hvd.allreduce_async(torch.ones(3, device=device), op=hvd.Sum, name="x")
    here = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="y")
    assert hvd.synchronize(here).tolist() == [size] * 3
    assert hvd.synchronize(there).tolist() == [size] * 3
    if size > 1:
        mixed = torch.ones(3, device="cpu" if rank == 0 else device)
        with pytest.raises(
            hvd.MismatchError, match=r"rank 0: allreduce 'm' float32 \[3\] Average;"
        ):
            hvd.allreduce(mixed, name="m")
    if size & (size - 1) == 0:
        mine = torch.randn(50, generator=torch.Generator().manual_seed(rank))
        wanted = hvd.allreduce(mine, op=hvd.Adasum)
        assert torch.equal(hvd.allreduce(mine.to(device), op=hvd.Adasum).cpu(), wanted)
        holes = torch.zeros(50, 2, device=device)
        holes[:, 0] = mine.to(device)
        hvd.allreduce_(holes[:, 0], op=hvd.Adasum)
        assert torch.equal(holes[:, 0].cpu(), wanted)


def shut_down_with_work_left(device: str) -> None:
    """shutdown() waits for pending work of the stream; later waits get its results."""
    size = hvd.size()
    hvd.allreduce(torch.ones(1, device=device))
    handle = hvd.allreduce_async(torch.ones(1000, device=device), op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    busy(device, 200)
    result = hvd.allreduce(torch.ones(1000, device=device), op=hvd.Sum)
    hvd.shutdown()
    assert (result.cpu() == size).all()
    assert (hvd.synchronize(handle).cpu() == size).all()


def check_every_collective(device: str) -> None:
    """Check also the dtypes that NCCL lacks, and sums that would wrap around in it."""
    dtype_checks.check_results(device, shapes=[(), (0,), (7, 11), (4099,)])
    dtype_checks.check_factors_of_integers(device)
    dtype_checks.check_gradients(device)
    dtype_checks.check_a_joined_rank(device)


OPERATIONS: list[Callable[[str], None]] = [
    check_every_collective,
    check_reproducibility,
    fuse_requests,
    reduce_with_gaps,
    follow_streams,
    drop_tensors_early,
    poll_handles,
    mix_host_and_device,
    shut_down_with_work_left,
]
