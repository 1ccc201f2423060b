# SPDX-License-Identifier: Apache-2.0
"""Behaviours of horovod.torch that users rely on: collectives, process sets, init().

Each function runs on the ranks of an initialised world of 2 or 3 and leaves it usable. As a program
this runs all of them in one job of any launcher. `tests/model` and `tests/optimizer` have training.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

import torch_ring as hvd


@contextmanager
def raises(kind: type[BaseException], text: str = "") -> Iterator[None]:
    """Check that the block raises an error that contains a text."""
    with pytest.raises(kind, match=re.escape(text)):
        yield


def behaviour_01_names_not_order() -> None:
    order = ["a", "b", "c"]
    names = order[hvd.rank() % 3 :] + order[: hvd.rank() % 3]
    handles = {n: hvd.allreduce_async(torch.full((3,), ord(n)), name=n) for n in names}
    for name in order:
        assert hvd.synchronize(handles[name]).tolist() == [ord(name)] * 3
    if hvd.rank() == 0:  # the other ranks have not submitted it, so it is in flight
        first = hvd.allreduce_async(torch.ones(1), name="twice")
        with raises(ValueError, "in flight"):
            hvd.allreduce_async(torch.ones(1), name="twice")
        assert not hvd.poll(first)
        hvd.allgather_object(None)
        hvd.synchronize(first)
    else:
        hvd.allgather_object(None)
        hvd.allreduce(torch.ones(1), name="twice")
    hvd.allreduce(torch.ones(1), name="twice")  # free again


def behaviour_02_asynchronous() -> None:
    late = threading.Event()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="async")
        assert not hvd.poll(handle)  # no other rank has submitted it
        hvd.barrier()
        while not hvd.poll(handle):  # done by itself, without a waiting thread
            late.wait(0.001)
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="async")
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2


def behaviour_03_mismatches() -> None:
    rank = hvd.rank()
    cases: list[Callable[[], object]] = [
        lambda: hvd.allreduce(torch.ones(2 + rank), name="shape"),
        lambda: hvd.allreduce(torch.ones(2).to([torch.int32, torch.float64][rank % 2]), name="d"),
        lambda: hvd.allreduce(torch.ones(2), op=[hvd.Min, hvd.Sum][rank % 2], name="op"),
        lambda: hvd.broadcast(torch.ones(2), rank % 2, name="root"),
        lambda: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + rank, name="factor"),
        lambda: hvd.alltoall(torch.ones(hvd.size(), 1 + rank), name="columns"),
        lambda: hvd.reducescatter(torch.ones(2 + rank), name="rows"),
    ]
    for case in cases:
        with raises(RuntimeError, "rank 1"):
            case()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    with raises(ValueError):
        hvd.alltoall(torch.ones(3), torch.tensor([9] * hvd.size()))
    with raises(ValueError):
        hvd.allgather(torch.tensor(1.0))
    with raises(ValueError):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)


def behaviour_04_arithmetic() -> None:
    size, rank = hvd.size(), hvd.rank()
    total = size * (size - 1) // 2
    for dtype in (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64):
        assert hvd.allreduce(torch.full((2,), rank, dtype=dtype), op=hvd.Sum)[0] == total
    for asked in (False, 0, np.bool_(False)):  # any false value
        assert hvd.allreduce(torch.tensor(float(rank)), average=asked) == total
    for asked in (None, True, 1):
        assert hvd.allreduce(torch.tensor(float(rank)), average=asked) == (size - 1) / 2
    negative = hvd.allreduce(torch.full((1,), -1 - (rank == 0), dtype=torch.int64))
    assert negative.item() == -1  # truncated toward zero
    scaled = hvd.allreduce(torch.tensor([3]), op=hvd.Sum, prescale_factor=0.5)
    assert scaled.item() == size  # the factor comes first, and truncates
    assert hvd.allreduce(torch.full((1,), 1.5).bfloat16()).dtype == torch.bfloat16
    image = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for strange in (image, torch.rand(4, 6).t(), torch.rand(8)[::2], torch.tensor(1.5)):
        torch.testing.assert_close(hvd.broadcast(strange, 0), hvd.broadcast(strange + 0, 0))
    assert hvd.allgather(torch.tensor([rank > 0])).tolist() == [r > 0 for r in range(size)]


def behaviour_05_roots_and_rows() -> None:
    size, rank = hvd.size(), hvd.rank()
    upper = hvd.add_process_set(list(range(1, size)))
    if upper.included():
        got = hvd.broadcast(torch.tensor([rank]), root_rank=size - 1, process_set=upper)
        assert got.item() == size - 1
        with raises(ValueError):
            hvd.broadcast(torch.ones(1), root_rank=0, process_set=upper)
    hvd.remove_process_set(upper)
    rows = hvd.reducescatter(torch.ones(size + 1, 2), op=hvd.Sum)
    assert rows.shape == (2 if rank == 0 else 1, 2)
    with raises(ValueError):
        hvd.reducescatter(torch.tensor(1.0))
    with raises(ValueError):
        hvd.reducescatter(torch.ones(2), op=hvd.Max)
    assert isinstance(hvd.alltoall(torch.ones(size)), Tensor)


def behaviour_06_gradients() -> None:
    size, rank = hvd.size(), hvd.rank()
    weights = torch.arange(1.0, size + 1)

    def gradient(function: Callable[[Tensor], Tensor], rows: int) -> Tensor:
        x = torch.ones(rows, requires_grad=True)
        (function(x).sum() * weights[rank]).backward()
        assert x.grad is not None
        return x.grad

    mean = float(weights.mean())
    assert gradient(lambda x: hvd.allreduce(x), 2).tolist() == [mean] * 2
    assert gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), 2).tolist() == [mean * size] * 2
    assert gradient(hvd.allgather, 1 + rank).tolist() == [mean] * (1 + rank)
    assert gradient(lambda x: hvd.broadcast(x, 0), 2).tolist() == [mean * (rank == 0)] * 2
    assert gradient(hvd.reducescatter, size).tolist() == weights.tolist()
    summed = gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), size)
    assert summed.tolist() == (size * weights).tolist()
    assert gradient(lambda x: hvd.alltoall(x, [1] * size)[0], size).tolist() == weights.tolist()


def behaviour_07_again_and_again() -> None:
    for _ in range(3):
        hvd.shutdown()
        assert not hvd.is_initialized()
        with raises(ValueError, "init"):
            hvd.allreduce(torch.ones(1))
        hvd.init()
        hvd.init()  # nothing
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def behaviour_08_process_sets() -> None:
    size, rank = hvd.size(), hvd.rank()
    first = hvd.add_process_set([0])
    rest = hvd.add_process_set(hvd.ProcessSet(list(range(1, size))))
    mine, other = (first, rest) if rank == 0 else (rest, first)
    assert mine.included()
    assert not other.included()
    assert hvd.global_process_set.process_set_id == 0
    assert (first.process_set_id, rest.process_set_id) == (1, 2)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=mine).item() == mine.size()
    assert hvd.allgather_object(rank, process_set=mine) == mine.ranks
    for call in (
        lambda: hvd.allreduce(torch.ones(1), process_set=other),
        lambda: hvd.barrier(process_set=other),
        lambda: hvd.add_process_set([0]),
    ):
        with raises(ValueError):
            call()
    x = torch.zeros(1, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=1.0), [("x", x)], process_set=rest)
    (x * rank).sum().backward()
    optimizer.step()
    assert -x.item() == (0 if rank == 0 else sum(range(1, size)) / (size - 1))
    assert hvd.remove_process_set(rest)
    assert hvd.remove_process_set(first)
    assert not hvd.remove_process_set(hvd.global_process_set)


BEHAVIOURS = [
    function for name, function in list(globals().items()) if name.startswith("behaviour_")
]

if __name__ == "__main__":
    hvd.init()
    for behaviour in BEHAVIOURS:
        behaviour()
    print(f"rank {hvd.rank()} of {hvd.size()}: {len(BEHAVIOURS)} behaviours", flush=True)
