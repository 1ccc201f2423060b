"""Every operation of torch.distributed on ring, against values in closed form."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from statistics import median_low

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.groups import IS_TORCH_2_14, on_ring
from tests.support.worlds import on_both_transports, on_most_worlds

SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3, 2), (1000,), (70_000,)]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of small numbers that identify the rank and the element."""
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) * 3 + rank * 5) % 11).to(dtype).reshape(shape)


def everyone(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the values of all ranks."""
    return [values(rank, shape, dtype) for rank in range(dist.get_world_size())]


def same(got: Tensor, want: Tensor) -> None:
    """Check values, shape and dtype."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert torch.equal(got, want), (got, want)


def reduce_all() -> None:
    rank = dist.get_rank()
    for shape in SHAPES:
        for dtype in DTYPES:
            stack = torch.stack(everyone(shape, dtype))
            for op, want in (
                (dist.ReduceOp.SUM, stack.sum(0, dtype=dtype)),
                (dist.ReduceOp.MIN, stack.amin(0)),
                (dist.ReduceOp.MAX, stack.amax(0)),
            ):
                tensor = values(rank, shape, dtype)
                dist.all_reduce(tensor, op)
                same(tensor, want)
    product = values(rank, (5,), torch.int64) + 1
    dist.all_reduce(product, dist.ReduceOp.PRODUCT)
    same(product, (torch.stack(everyone((5,), torch.int64)) + 1).prod(0))
    mean = values(rank, (5,), torch.float64)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    torch.testing.assert_close(mean, torch.stack(everyone((5,), torch.float64)).mean(0))


def test_all_reduce() -> None:
    on_ring(reduce_all, 2)


@on_most_worlds
def test_all_reduce_everywhere(transport: str, size: int) -> None:
    on_ring(reduce_all, size, transport=transport)


def coalesced() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((n,), float(rank)) for n in (1, 5, 0, 300)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        same(tensor, torch.full(tensor.shape, float(size * (size - 1) // 2)))


@on_both_transports
def test_coalesced_all_reduce(transport: str) -> None:
    on_ring(coalesced, 3, transport=transport)


def sparse() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    # Ranks have different numbers of entries, and one entry in common.
    indices = torch.tensor([[0, *range(1, rank + 1)]])
    tensor = torch.sparse_coo_tensor(indices, torch.ones(rank + 1, 2), (size + 1, 2))
    dist.all_reduce(tensor)
    want = torch.zeros(size + 1, 2)
    for other in range(size):
        want[: other + 1] += 1
    same(tensor.to_dense(), want)


@on_both_transports
def test_sparse_all_reduce(transport: str) -> None:
    on_ring(sparse, 3, transport=transport)


def move() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape in SHAPES:
        own, all_values = values(rank, shape), everyone(shape)
        for root in range(size):
            tensor = own.clone()
            dist.broadcast(tensor, root)
            same(tensor, all_values[root])

            tensor = own.clone()
            dist.reduce(tensor, root)
            same(tensor, torch.stack(all_values).sum(0) if rank == root else own)

            parts = [torch.empty(shape) for _ in range(size)] if rank == root else None
            dist.gather(own, parts, root)
            for part, want in zip(parts or (), all_values, strict=rank == root):
                same(part, want)

            output = torch.empty(shape)
            given = [value + root for value in all_values] if rank == root else None
            dist.scatter(output, given, root)
            same(output, own + root)
        parts = [torch.empty(shape) for _ in range(size)]
        dist.all_gather(parts, own)
        for part, want in zip(parts, all_values, strict=True):
            same(part, want)


@on_most_worlds
def test_broadcast_reduce_gather_scatter(transport: str, size: int) -> None:
    on_ring(move, size, transport=transport)


def move_into_one_tensor() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (0, 1, 3, 50_000):
        own = values(rank, (count,))
        gathered = torch.empty(count * size)
        dist.all_gather_into_tensor(gathered, own)
        same(gathered, torch.cat(everyone((count,))))

        # The input may be its own part of the output, as FSDP has it.
        gathered = torch.full((count * size,), -1.0)
        part = gathered.narrow(0, rank * count, count).copy_(own)
        dist.all_gather_into_tensor(gathered, part)
        same(gathered, torch.cat(everyone((count,))))

        scattered = torch.empty(count)
        dist.reduce_scatter_tensor(scattered, values(rank, (count * size,)))
        want = torch.stack(everyone((count * size,))).sum(0)[rank * count : (rank + 1) * count]
        same(scattered, want)

        # The output may be a part of the input.
        joined = values(rank, (count * size,))
        part = joined.narrow(0, rank * count, count)
        dist.reduce_scatter_tensor(part, joined)
        same(part, want)

        parts = list(values(rank, (count * size,)).reshape(size, count))
        dist.reduce_scatter(scattered, parts, dist.ReduceOp.MAX)
        stack = torch.stack(everyone((count * size,)))
        same(scattered, stack.amax(0)[rank * count : (rank + 1) * count])


@on_most_worlds
def test_all_gather_and_reduce_scatter(transport: str, size: int) -> None:
    on_ring(move_into_one_tensor, size, transport=transport)


def exchange() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = torch.arange(size * 2) + 100 * rank
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    want = [100 * other + 2 * rank + i for other in range(size) for i in range(2)]
    assert received.tolist() == want

    # Rank r sends r + s rows of two to rank s.
    splits = [rank + other for other in range(size)]
    rows = torch.full((sum(splits), 2), float(rank))
    output = torch.empty(sum(splits), 2)
    dist.all_to_all_single(output, rows, splits, splits)
    want_rows = torch.cat([torch.full((rank + other, 2), float(other)) for other in range(size)])
    same(output, want_rows)

    inputs = [torch.full((rank + other, 3), float(rank)) for other in range(size)]
    outputs = [torch.empty(other + rank, 3) for other in range(size)]
    dist.all_to_all(outputs, inputs)
    for other, output in enumerate(outputs):
        same(output, torch.full((other + rank, 3), float(other)))


@on_most_worlds
def test_all_to_all(transport: str, size: int) -> None:
    on_ring(exchange, size, transport=transport)


def strided() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = values(rank, (6, 4)).t()
    dist.all_reduce(tensor)
    same(tensor, torch.stack(everyone((6, 4))).sum(0).t())
    columns = torch.empty(5, size).t()  # its rows are not contiguous
    dist.all_gather(list(columns), values(rank, (5,)))
    same(columns, torch.stack(everyone((5,))))
    wide = torch.zeros(3, 2)
    dist.reduce_scatter_tensor(wide[:, 0], values(rank, (3 * size,)))
    want = torch.stack(everyone((3 * size,))).sum(0)[rank * 3 : rank * 3 + 3]
    same(wide[:, 0], want)
    assert not wide[:, 1].any()


def test_strided_tensors() -> None:
    on_ring(strided, 3)


def messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    nxt, prev = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 100_000):
        received = torch.empty(count)
        works = [
            dist.isend(values(rank, (count,)), nxt, tag=count),
            dist.irecv(received, prev, tag=count),
        ]
        for work in works:
            assert work is not None
            work.wait()
        same(received, values(prev, (count,)))
    if rank == 0:
        got = torch.empty(2)
        sources = [dist.recv(got, tag=7) for _ in range(size - 1)]
        assert sorted(sources) == list(range(1, size))
    else:
        dist.send(torch.full((2,), float(rank)), 0, tag=7)


def test_send_and_receive() -> None:
    on_ring(messages, 3)
    on_ring(messages, 2, transport="tcp")


def sleeps_of_others() -> int:
    """Return the number of sleeps of this process's other threads so far."""
    own, count = str(threading.get_native_id()), 0
    for thread in os.listdir("/proc/self/task"):
        if thread != own:
            status = Path(f"/proc/self/task/{thread}/status").read_text()
            count += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return count


def block_often() -> int:
    """Return the number of other threads' sleeps during 20 calls: the median of several rounds."""
    tensor, found = torch.ones(256), []
    for _ in range(50):
        before = sleeps_of_others()
        for _ in range(20):
            dist.all_reduce(tensor)
        found.append(sleeps_of_others() - before)
    return median_low(found)


@on_both_transports
def test_a_blocking_call_wakes_no_other_thread(transport: str) -> None:
    # The control plane's thread wakes for other reasons, too, and more often in a round that is
    # slow on a busy machine. With async_op=True most rounds have 10 and more.
    assert max(on_ring(block_often, 2, transport=transport)) < 2


def outstanding() -> None:
    size = dist.get_world_size()
    tensors = [torch.full((3,), float(i)) for i in range(1000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        assert work is not None
        work.wait()
    for i, tensor in enumerate(tensors):
        same(tensor, torch.full((3,), float(i * size)))


def test_a_thousand_outstanding() -> None:
    on_ring(outstanding, 2)
    on_ring(outstanding, 3, transport="tcp")


def values_of_futures(backend: str) -> dict[str, list[Tensor]]:
    """Return the value of each operation's future, a flat list of tensors."""
    group = dist.new_group(backend=backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    own, wide = values(rank, (3,)), values(rank, (size,))
    parts, is_root = [torch.zeros(3) for _ in range(size)], rank == 1
    works = {
        "all_reduce": dist.all_reduce(own.clone(), group=group, async_op=True),
        "broadcast": dist.broadcast(own.clone(), 1, group=group, async_op=True),
        "reduce": dist.reduce(own.clone(), 1, group=group, async_op=True),
        "all_gather": dist.all_gather(parts, own, group=group, async_op=True),
        "gather": dist.gather(
            own, everyone((3,)) if is_root else None, 1, group=group, async_op=True
        ),
        "scatter": dist.scatter(
            torch.zeros(3), everyone((3,)) if is_root else None, 1, group=group, async_op=True
        ),
        "all_to_all": dist.all_to_all(
            [torch.zeros(1) for _ in range(size)],
            list(wide.split(1)),
            group=group,
            async_op=True,
        ),
        "all_to_all_single": dist.all_to_all_single(
            torch.zeros(size), wide, group=group, async_op=True
        ),
        "barrier": dist.barrier(group=group, async_op=True),
    }
    return {name: work.get_future().wait() for name, work in works.items()}


def compare_futures() -> None:
    got, want = values_of_futures("ring"), values_of_futures("gloo")
    if dist.get_rank() != 1:
        del got["reduce"], want["reduce"]  # gloo's has a part of the sum
    for name, tensors in want.items():
        assert isinstance(got[name], list), name
        assert len(got[name]) == len(tensors), (name, got[name])
        for one, other in zip(got[name], tensors, strict=True):
            same(one, other)


@pytest.mark.parametrize("size", [2, 3])
def test_values_of_futures(size: int) -> None:
    on_ring(compare_futures, size)


def objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": other, "text": "x" * other} for other in range(size)]
    shared = [rank, "first"] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, 0)
    assert shared == [0, "first"]


def reduce_one_tensor_often(count: int) -> None:
    """Each operation takes the result of the previous one, as on a device's stream."""
    size = dist.get_world_size()
    for tensor in (torch.ones(count), torch.ones(count, 2)[:, 0]):
        group = dist.new_group()  # the first operations come while it is connected
        for reduced in (5, 10):
            works = [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(4)]
            dist.all_reduce(tensor, group=group)
            for work in reversed(works):
                assert work is not None
                work.wait()
            same(tensor, torch.full((count,), float(size**reduced)))


@on_both_transports
@pytest.mark.parametrize("count", [1, 300_000])
def test_operations_on_one_tensor(count: int, transport: str) -> None:
    on_ring(reduce_one_tensor_often, 3, count, transport=transport)


def test_objects() -> None:
    on_ring(objects, 3)


@pytest.mark.parametrize("size", [2, 3])
def test_barriers(size: int) -> None:
    on_ring(barriers, size)


def barriers() -> None:
    dist.barrier()
    if IS_TORCH_2_14:
        dist.monitored_barrier()
    work = dist.barrier(async_op=True)
    assert work is not None
    work.wait()
