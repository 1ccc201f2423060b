# SPDX-License-Identifier: Apache-2.0
"""Groups of torch.distributed with tensors on a device, called as device_operations are.

Each function is called on every rank of a default group whose backend is ring, for the CPU and for
the device's type.
"""

from __future__ import annotations

import os
import random
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

from tests.c10d.group_operations import MOVES, OPERATORS, REDUCTIONS, Draw, Group, shift
from tests.support.groups import default_group
from tests.support.pool import all_have_passed, error_of

DTYPES = [torch.float32, torch.float16, torch.int64, torch.uint8]


@contextmanager
def group_on(device: str) -> Iterator[None]:
    """Have a default group for the CPU and the device. Ring does not claim a stand-in."""
    with default_group(f"cpu:ring,{DEVICE}:ring" if device == DEVICE else "ring"):
        yield


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


def do_everything_in_a_group(device: str) -> None:
    """Do each operation but messages with some dtypes, each operator and some shapes."""
    group = Group(list(range(dist.get_world_size())), dist.group.WORLD, dist.get_rank())
    cases = [
        (begin, operator, dtype)
        for operator, (_, _, dtypes) in OPERATORS.items()
        for dtype in DTYPES
        for begin in (REDUCTIONS if dtype in dtypes and operator != "AVG" else [])
    ]
    moves = [move for move in MOVES if move is not shift]
    cases += [(begin, "", dtype) for dtype in DTYPES for begin in moves]
    own = random.Random(group.rank)
    for number, (begin, operator, dtype) in enumerate(cases):
        for turn, shape in enumerate([(), (0,), (30_011,)]):
            options = {"operator": operator, "dtype": dtype, "shape": shape, "device": device}
            draw = Draw(10 * number + turn, number, own, **options)
            for pending in begin(draw, group):
                pending.wait()
                try:
                    pending.check()
                except AssertionError as error:
                    raise AssertionError(f"{pending.what} {options}: {error}") from error


def share_memory_and_join_calls_in_a_group(device: str) -> None:
    """A part of the output is the input, as FSDP has it; a mean; coalesced operations."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = torch.full((5000 * size,), -1.0, device=device)
    part = gathered.narrow(0, rank * 5000, 5000).fill_(rank)
    dist.all_gather_into_tensor(gathered, part)
    same(gathered, torch.arange(float(size)).repeat_interleave(5000))
    mean = torch.full((7,), float(size * rank), device=device)  # others a device may round
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    same(mean, torch.full((7,), size * (size - 1) / 2))
    tensors = [torch.full((n,), float(rank), device=device) for n in (1, 5, 0, 300)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        same(tensor, torch.full(tensor.shape, float(size * (size - 1) // 2)))


def follow_streams_in_a_group(device: str) -> None:
    """An operation reads after earlier work of its stream; wait() does not block the host."""
    size, count = dist.get_world_size(), 5000
    dist.all_reduce(torch.ones(count, device=device))  # NCCL starts
    for i in range(2):
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
    do_everything_in_a_group,
    share_memory_and_join_calls_in_a_group,
    follow_streams_in_a_group,
    gather_from_a_busy_stream,
    use_futures_in_a_group,
    mix_places_in_a_group,
    fail_in_a_group,
    train_in_a_group,
]
