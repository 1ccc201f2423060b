"""Groups of torch.distributed with tensors on a device, called as device_operations are.

Each function is called on every rank of a default group whose backend is ring, for the CPU and for
the device's type.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from device_double import DEVICE
from device_operations import busy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.groups import default_group
from tests.support.pool import all_have_passed, error_of

SHAPES: list[tuple[int, ...]] = [(), (0,), (3,), (7, 11), (30_011,)]
DTYPES = [torch.float32, torch.float16, torch.int64, torch.uint8]


@contextmanager
def group_on(device: str) -> Iterator[None]:
    """Have a default group for the CPU and the device. Ring does not claim a stand-in."""
    with default_group(f"cpu:ring,{DEVICE}:ring" if device == DEVICE else "ring"):
        yield


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return small numbers, on the host, that identify the rank and the element."""
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) * 3 + rank * 5) % 11).to(dtype).reshape(shape)


def everyone(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [values(rank, shape, dtype) for rank in range(dist.get_world_size())]


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


def reduce_in_a_group(device: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape in SHAPES:
        for dtype in DTYPES:
            stack = torch.stack(everyone(shape, dtype))
            for op, want in (
                (dist.ReduceOp.SUM, stack.sum(0, dtype=dtype)),
                (dist.ReduceOp.MIN, stack.amin(0)),
                (dist.ReduceOp.MAX, stack.amax(0)),
            ):
                tensor = values(rank, shape, dtype).to(device)
                dist.all_reduce(tensor, op)
                same(tensor, want)
    mean = values(rank, (7,)).to(device) * size
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    same(mean, torch.stack(everyone((7,))).sum(0))
    bits = values(rank, (5,), torch.int32).to(device)
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    same(bits, functools.reduce(Tensor.bitwise_or, everyone((5,), torch.int32)))
    halved = torch.full((4,), 2.0, device=device)
    dist.all_reduce(halved, dist._make_nccl_premul_sum(0.5))
    same(halved, torch.full((4,), float(size)))
    tensors = [torch.full((n,), float(rank), device=device) for n in (1, 5, 0, 300)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        same(tensor, torch.full(tensor.shape, float(size * (size - 1) // 2)))


def move_in_a_group(device: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    own, all_values = values(rank, (5000,)).to(device), everyone((5000,))
    total, last = torch.stack(all_values).sum(0), size - 1
    parts = [torch.empty_like(own) for _ in range(size)]

    tensor = own.clone()
    dist.broadcast(tensor, last)
    same(tensor, all_values[last])
    tensor = own.clone()
    dist.reduce(tensor, last)
    same(tensor, total if rank == last else all_values[rank])
    dist.gather(own, parts if rank == last else None, last)
    if rank == last:
        for part, want in zip(parts, all_values, strict=True):
            same(part, want)
    output = torch.empty_like(own)
    dist.scatter(output, [v.to(device) for v in all_values] if rank == last else None, last)
    same(output, all_values[rank])
    dist.all_gather(parts, own)
    for part, want in zip(parts, all_values, strict=True):
        same(part, want)
    gathered = torch.full((5000 * size,), -1.0, device=device)
    place = gathered.narrow(0, rank * 5000, 5000).copy_(own)
    dist.all_gather_into_tensor(gathered, place)
    same(gathered, torch.cat(all_values))

    stack = torch.stack(everyone((size, 3)))
    joined, scattered = values(rank, (size, 3)).to(device), torch.empty(3, device=device)
    dist.reduce_scatter_tensor(scattered, joined.flatten())
    same(scattered, stack.sum(0)[rank])
    dist.reduce_scatter(scattered, list(joined), dist.ReduceOp.MAX)
    same(scattered, stack.amax(0)[rank])

    sent = (torch.arange(size * 2) + 100 * rank).to(device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    want = [100 * other + 2 * rank + i for other in range(size) for i in range(2)]
    assert received.tolist() == want
    splits = [rank + other for other in range(size)]
    inputs = [torch.full((n, 3), float(rank), device=device) for n in splits]
    outputs = [torch.empty(n, 3, device=device) for n in splits]
    dist.all_to_all(outputs, inputs)
    rows = torch.empty(sum(splits), 3, device=device)
    dist.all_to_all_single(rows, torch.cat(inputs), splits, splits)
    for other, part in enumerate(outputs):
        same(part, torch.full((splits[other], 3), float(other)))
    assert torch.equal(rows, torch.cat(outputs))


def follow_streams_in_a_group(device: str) -> None:
    """An operation reads after earlier work of its stream; wait() does not block the host."""
    size, count = dist.get_world_size(), 5000
    dist.all_reduce(torch.ones(count, device=device))  # NCCL starts
    for i in range(4):
        source = torch.full((count,), float(i + dist.get_rank())).to(device)
        own, other = torch.Stream(device), torch.Stream(device)
        want = torch.full((count,), i * size + size * (size - 1) / 2)
        with own:
            busy(device, 200)
            mine = torch.zeros(count, device=device)
            mine.copy_(source)
            work = dist.all_reduce(mine, async_op=True)
        assert work is not None
        with other:
            work.wait()
            assert not own.query(), "the host has waited for the device"
            result = mine.clone()
        with other:
            same(result, want)
        with own:  # a blocking one, too: the stream waits for its end
            busy(device, 200)
            mine.copy_(source)
            dist.all_reduce(mine)
            assert not own.query(), "the host has waited for the device"
            same(mine, want)


def gather_from_a_busy_stream(device: str) -> None:
    """Ranks without an output of theirs are followed and waited for, too."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(1, device=device))  # NCCL starts
    sources = [torch.full((5000,), base + rank).to(device) for base in (1.0, 11.0)]
    parts = [torch.zeros_like(sources[0]) for _ in range(size)] if rank == 0 else None
    torch.accelerator.synchronize()
    with torch.Stream(device):
        for source, base in zip(sources, (1.0, 11.0), strict=True):
            busy(device, 200)
            mine = torch.zeros_like(source)
            mine.copy_(source)
            work = dist.gather(mine, parts, 0, async_op=base > 1)
            if work is not None:
                work.wait()
            mine.fill_(-1.0)
            for other, part in enumerate(parts or ()):
                same(part, torch.full((5000,), base + other))
        torch.accelerator.synchronize()


def use_futures_in_a_group(device: str) -> None:
    size = dist.get_world_size()
    dist.all_reduce(torch.ones(1, device=device))
    busy(device, 50)
    mine = torch.full((1000,), 2.0, device=device)
    work = dist.all_reduce(mine, async_op=True)
    assert work is not None
    halved = work.get_future().then(lambda future: future.value()[0] / 2)
    same(halved.wait(), torch.full((1000,), float(size)))

    def reduce_again(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        again = dist.all_reduce(future.value()[0], async_op=True)
        assert again is not None
        result: Tensor = again.get_future().wait()[0]
        return result

    busy(device, 50)
    work = dist.all_reduce(torch.ones(3, device=device), async_op=True)
    assert work is not None
    same(work.get_future().then(reduce_again).wait(), torch.full((3,), float(size * size)))


def mix_places_in_a_group(device: str) -> None:
    """Tensors of the host and of the device, in one group and in one of some ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    there = torch.ones(3, device=device)
    work = dist.all_reduce(there, async_op=True)
    here = torch.ones(3)
    dist.all_reduce(here)
    assert work is not None
    work.wait()
    same(here, torch.full((3,), float(size)))
    same(there, torch.full((3,), float(size)))
    dist.barrier()
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))
    members = sorted({0, size - 1})
    some = dist.new_group(members)
    if rank in members:
        tensor = torch.ones(2, device=device)
        dist.all_reduce(tensor, group=some)
        same(tensor, torch.full((2,), float(len(members))))


def fail_in_a_group(device: str) -> None:
    """Ranks that differ get an error; the group works afterwards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(1, device=device))  # from here on this process drives this device
    if size > 1:
        kind, text = error_of(lambda: dist.send(torch.ones(1, device=device), (rank + 1) % size))
        assert kind == "InvalidArgumentError", text
        place = device if rank else "cpu"
        kind, text = error_of(lambda: dist.all_reduce(torch.ones(3, device=place)))
        assert kind == "MismatchError", text
        assert "rank 0: all_reduce" in text
        kind, text = error_of(lambda: dist.all_reduce(torch.ones(1 + rank, device=device)))
        assert kind == "MismatchError", text
        work = dist.broadcast(torch.ones(1, device=device), rank, async_op=True)
        assert work is not None
        assert error_of(work.wait)[0] == "MismatchError"
    kind, text = error_of(
        lambda: dist.all_gather_into_tensor(torch.empty(size), torch.ones(1, device=device))
    )
    assert kind == "InvalidArgumentError", text
    if torch.accelerator.device_count() > 1:
        other = torch.ones(1, device=f"{device}:{1 - torch.accelerator.current_device_index()}")
        kind, text = error_of(lambda: dist.all_reduce(other))
        assert kind == "InvalidArgumentError", text
        assert "one process drives one device" in text
    tensor = torch.ones(3, device=device)
    dist.all_reduce(tensor)
    same(tensor, torch.full((3,), float(size)))


def train_in_a_group(device: str) -> None:
    """DDP of a model on the device ends where it does on the host."""

    def trained(place: str) -> list[Tensor]:
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(place)
        model = DistributedDataParallel(layers, bucket_cap_mb=0.0005)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
            batch = torch.randn(6, 8, generator=generator).to(place)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return [weight.detach().cpu() for weight in model.parameters()]

    for got, want in zip(trained(device), trained("cpu"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def lose_a_rank_of_a_group(passed: Path, device: str) -> str:
    """Kill rank 1 while other ranks' streams run a collective; return their error."""
    mine = torch.ones(100_000, device=device)
    dist.all_reduce(mine)
    if dist.get_rank() == 1:
        busy(device, 5000)  # its stream comes late
    dist.all_reduce(mine)
    assert not torch.accelerator.current_stream().query()
    all_have_passed(passed, dist.get_world_size())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.accelerator.synchronize()  # the collective never completes: it must be aborted
    kind, text = error_of(lambda: dist.all_reduce(mine))
    assert kind == "PeerLostError", text
    return text


GROUPS: list[Callable[[str], None]] = [
    reduce_in_a_group,
    move_in_a_group,
    follow_streams_in_a_group,
    gather_from_a_busy_stream,
    use_futures_in_a_group,
    mix_places_in_a_group,
    fail_in_a_group,
    train_in_a_group,
]
