# SPDX-License-Identifier: Apache-2.0
"""Every operation of torch.distributed on ring, with every dtype and operator of its docs."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from closed_form import MOVED, same, tensor_of
from group_operations import MOVES, OPERATORS, REDUCTIONS, Draw, Group, premul
from on_ranks import on_ranks
from torch import Tensor

from tests.support.groups import group_store, on_ring
from tests.support.pool import error_of
from tests.support.worlds import on_both_transports


def values(rank: int, shape: tuple[int, ...]) -> Tensor:
    return tensor_of(rank, shape, torch.float32, dist.get_world_size())


def everyone(shape: tuple[int, ...]) -> Tensor:
    """Return the values of all ranks, one after the other in dimension 0."""
    return torch.stack([values(rank, shape) for rank in range(dist.get_world_size())])


def check(got: Tensor, want: Tensor, what: str = "") -> None:
    assert same(got, want), f"{what}: {got}, not {want}"


def do_everything() -> None:
    """Do each operation with each dtype, operator and shape, drawing the rest."""
    group = Group(list(range(dist.get_world_size())), dist.group.WORLD, dist.get_rank())
    cases = [
        (begin, operator, dtype)
        for operator, (_, _, dtypes) in OPERATORS.items()
        for dtype in dtypes
        for begin in REDUCTIONS
    ]
    cases += [(begin, "", dtype) for dtype in MOVED for begin in MOVES]
    own = random.Random(dist.get_rank())
    for number, (begin, operator, dtype) in enumerate(cases):
        long = [(70_000,)] if dtype == torch.float32 else []
        shapes = [[(), (4099,)], [(0,), (5,)]][number // 3 % 2]  # of each three operations in turn
        for turn, shape in enumerate([*shapes, *long]):
            seed = 10 * number + turn
            draw = Draw(seed, number, own, operator=operator, dtype=dtype, shape=shape)
            for pending in begin(draw, group):
                pending.wait()
                try:
                    pending.check()
                except AssertionError as error:
                    what = f"{pending.what} {operator} of {dtype} {shape}, seed {seed}"
                    raise AssertionError(f"{what}: {error}") from error


@pytest.mark.parametrize(("transport", "size"), [("shm", 1), ("shm", 3), ("tcp", 2)])
def test_every_operation(transport: str, size: int) -> None:
    on_ring(do_everything, size, transport=transport)


def share_memory(count: int) -> None:
    """Inputs and outputs overlap: an input is a part of the output, as FSDP has it, and so on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stack = everyone((count * size,))
    gathered = torch.full((count * size * size,), -1.0)
    part = gathered.narrow(0, rank * count * size, count * size).copy_(stack[rank])
    dist.all_gather_into_tensor(gathered, part)
    check(gathered, stack.flatten(), f"all_gather_into_tensor of a part: {count}")
    other = (rank + 1) % size
    part = gathered.narrow(0, other * count * size, count * size).copy_(stack[rank])
    dist.all_gather_into_tensor(gathered, part)
    check(gathered, stack.flatten(), f"all_gather_into_tensor of another's part: {count}")
    swapped = stack[rank].clone()
    dist.all_to_all_single(swapped, swapped)
    want = stack.view(size, size, count)[:, rank].flatten()
    check(swapped, want, f"all_to_all_single in place: {count}")
    joined = stack[rank].clone()
    part = joined.narrow(0, rank * count, count)
    dist.reduce_scatter_tensor(part, joined)
    total = stack.sum(0)[count * rank : count * (rank + 1)]
    check(part, total, f"reduce_scatter_tensor to a part: {count}")


def use_unusual_tensors() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (0, 1, 3, 50_000):
        share_memory(count)

    tensor = values(rank, (6, 4)).t()
    dist.all_reduce(tensor)
    check(tensor, everyone((6, 4)).sum(0).t(), "all_reduce of a transposed tensor")
    columns = torch.empty(5, size).t()  # its rows are not contiguous
    dist.all_gather(list(columns), values(rank, (5,)))
    check(columns, everyone((5,)), "all_gather to columns")
    wide = torch.zeros(3, 2)
    dist.reduce_scatter_tensor(wide[:, 0], values(rank, (3 * size,)))
    total = everyone((3 * size,)).sum(0)[3 * rank : 3 * rank + 3]
    check(wide[:, 0], total, "reduce_scatter_tensor to a column")
    assert not wide[:, 1].any()

    tensors = [torch.full((n,), float(rank)) for n in (1, 5, 0, 300)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        check(tensor, torch.full(tensor.shape, float(size * (size - 1) // 2)), "coalesced")

    # Ranks have different numbers of entries, and one entry in common.
    indices = torch.tensor([[0, *range(1, rank + 1)]])
    tensor = torch.sparse_coo_tensor(indices, torch.ones(rank + 1, 2), (size + 1, 2))
    dist.all_reduce(tensor)
    want = torch.zeros(size + 1, 2)
    for other in range(size):
        want[: other + 1] += 1
    check(tensor.to_dense(), want, "sparse")

    pairs = torch.full((3,), 1 + 2j, dtype=torch.complex64).to(torch.complex32)
    dist.all_reduce(pairs)
    assert torch.view_as_real(pairs).tolist() == [[size, 2 * size]] * 3

    if rank == 0:
        got = torch.empty(2)
        sources = [dist.recv(got, tag=7) for _ in range(size - 1)]
        assert sorted(sources) == list(range(1, size)), "a message from any rank"
    else:
        dist.send(torch.full((2,), float(rank)), 0, tag=7)
    if rank == 0:
        dist.send(torch.arange(3.0), 1)
    elif rank == 1:
        longer = torch.full((5, 2), 9.0)[:, 0]  # strided, and longer than the message
        version = longer._version
        dist.recv(longer, 0)
        assert longer.tolist() == [0, 1, 2, 9, 9]
        assert longer._version > version
    shared = [rank, "first"] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, 0)
    assert shared == [0, "first"]


@on_both_transports
def test_unusual_tensors(transport: str) -> None:
    on_ring(use_unusual_tensors, 3, transport=transport)


@on_ranks(2, by=on_ring)
def test_large_integers() -> None:
    """Between 2^60 and 2^61, float64 has only every 256th integer."""
    rank, size = dist.get_rank(), dist.get_world_size()
    large = [2**60 + 1, -(2**60) - 3, 2**53 + 1]
    totals = [sum(value + r for r in range(size)) for value in large]
    for factor in (1.0, 2.0, -3.0, torch.tensor(1), torch.tensor(2.0)):
        tensor = torch.tensor(large) + rank
        dist.all_reduce(tensor, premul(factor))
        assert tensor.tolist() == [total * int(factor) for total in totals], factor
    tensor = torch.tensor(large) + rank
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.tolist() == [math.trunc(Fraction(total, size)) for total in totals]
    too_large = premul(torch.tensor(2**60 + 1))
    assert error_of(lambda: dist.all_reduce(tensor, too_large))[0] == "InvalidArgumentError"


def refused() -> list[str]:
    """Return the cases that succeed although the documentation calls them errors."""
    found = []
    for name, (make, _, dtypes) in OPERATORS.items():
        for dtype in MOVED:
            if dtype in dtypes:
                continue
            tensor = torch.zeros(3, dtype=torch.float32).to(dtype)
            kind, _ = error_of(lambda: dist.reduce(tensor, 0, make(0)))  # noqa: B023
            if kind not in ("InvalidArgumentError", "ValueError"):
                found.append(f"{name} of {dtype}: {kind}")
    return found


def test_everything_else_is_refused() -> None:
    assert on_ring(refused, 2) == [[], []]


@on_ranks(2, by=on_ring)
def test_a_barrier_does_not_number_later_operations_anew() -> None:
    """Rank 0 begins an operation before the barrier in front of it is decided, rank 1 after it."""
    first, second = torch.ones(1), torch.ones(1)
    if dist.get_rank() == 0:
        works = [
            dist.all_reduce(first, async_op=True),
            dist.barrier(async_op=True),
            dist.all_reduce(second, async_op=True),
        ]
        group_store().set("begun", "")
        for work in works:
            assert work is not None
            work.wait()
    else:
        group_store().wait(["begun"])
        dist.all_reduce(first)
        dist.barrier()
        dist.all_reduce(second)
    assert first.item() == second.item() == 2


def have_many_outstanding() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((3,), float(i)) for i in range(1000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works += [dist.barrier(async_op=True) for _ in range(3)]
    messages = [torch.zeros(300) for _ in tensors]
    previous, following = (rank - 1) % size, (rank + 1) % size
    works += [dist.irecv(into, previous, tag=tag) for tag, into in enumerate(messages)]
    sent = [torch.full((300,), float(tag)) for tag in range(1000)]
    works += [dist.isend(sent[tag], following, tag=tag) for tag in reversed(range(1000))]
    works += [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    threads = len(os.listdir("/proc/self/task"))
    futures = [work.get_future() for work in works if work is not None]
    assert len(os.listdir("/proc/self/task")) <= threads + 30, "a thread for each future"
    futures[0].wait()
    for work in reversed(works):
        assert work is not None
        work.wait()
    for i, tensor in enumerate(tensors):
        check(tensor, torch.full((3,), float(i * size * size)))
        check(messages[i], sent[i])


@on_both_transports
def test_thousands_outstanding(transport: str) -> None:
    on_ring(have_many_outstanding, 3, transport=transport)


def values_of_futures(backend: str) -> dict[str, list[Tensor]]:
    """Return the value of each operation's future, a flat list of tensors."""
    group = dist.new_group(backend=backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    own, wide = values(rank, (3,)), values(rank, (size,))
    parts = [torch.zeros(3) for _ in range(size)]
    given = list(everyone((3,))) if rank == 1 else None
    begin: dict[str, Callable[..., Any]] = {
        "all_reduce": lambda **o: dist.all_reduce(own.clone(), **o),
        "broadcast": lambda **o: dist.broadcast(own.clone(), 1, **o),
        "reduce": lambda **o: dist.reduce(own.clone(), 1, **o),
        "all_gather": lambda **o: dist.all_gather(parts, own, **o),
        "gather": lambda **o: dist.gather(own, given, 1, **o),
        "scatter": lambda **o: dist.scatter(torch.zeros(3), given, 1, **o),
        "all_to_all": lambda **o: dist.all_to_all(
            [torch.zeros(1) for _ in range(size)], list(wide.split(1)), **o
        ),
        "all_to_all_single": lambda **o: dist.all_to_all_single(torch.zeros(size), wide, **o),
        "barrier": lambda **o: dist.barrier(**o),
    }
    works = {name: call(group=group, async_op=True) for name, call in begin.items()}
    return {name: work.get_future().wait() for name, work in works.items()}


@on_ranks(3, by=on_ring)
def test_values_of_futures() -> None:
    got, want = values_of_futures("ring"), values_of_futures("gloo")
    if dist.get_rank() != 1:
        del got["reduce"], want["reduce"]  # gloo's has a part of the sum
    for name, tensors in want.items():
        assert isinstance(got[name], list), name
        assert len(got[name]) == len(tensors), (name, got[name])
        for one, other in zip(got[name], tensors, strict=True):
            check(one, other, name)


@on_ranks(3, by=on_ring)
def test_operations_on_one_tensor() -> None:
    """Each operation takes the result of the previous one, as on a device's stream."""
    size = dist.get_world_size()
    for count in (1, 300_000):
        for tensor in (torch.ones(count), torch.ones(count, 2)[:, 0]):
            group = dist.new_group()  # the first operations come while it is connected
            for power in (5, 10):
                works = [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(4)]
                dist.all_reduce(tensor, group=group)
                for work in reversed(works):
                    assert work is not None
                    work.wait()
                check(tensor, torch.full((count,), float(size**power)))
