# SPDX-License-Identifier: Apache-2.0
"""Forked children know their parent's rank, and disturb neither it nor the other ranks."""

import json
import os
import threading
import traceback
from pathlib import Path

import pytest
import torch
from on_ranks import on_ranks
from pool import FORKS
from process_set_use import check_process_set
from shared import NAME, is_shared
from torch import nn
from torch.optim import SGD
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.setup import connect


@on_both_transports
@on_ranks(3, env={"TORCH_RING_TLS": "1"})
def test_a_forked_child_can_ask_but_not_communicate(transport) -> None:
    pair = hvd.add_process_set([0, 1])
    expected = facts_of(pair)
    child = os.fork()
    if child == 0:
        try:
            check_child(pair, expected)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    check_process_set(pair, [0, 1])
    assert hvd.allreduce(torch.ones(100_000), op=hvd.Sum).eq(hvd.size()).all()


def facts_of(pair: hvd.ProcessSet) -> list[object]:
    ranks = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size(), hvd.is_homogeneous()
    member = pair.included() and pair.rank()
    sets = hvd._basics._get_process_set_ids_and_ranks()
    return [*ranks, pair.process_set_id, pair.ranks, member, hvd.global_process_set.ranks, sets]


def check_child(pair: hvd.ProcessSet, expected: list[object]) -> None:
    """A worker of a DataLoader shards its data by its parent's rank, even within a set."""
    hvd.init()  # there is a world
    assert facts_of(pair) == expected
    for operation in (
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.broadcast_object(1, root_rank=0),
        lambda: hvd.add_process_set([1, 2]),
        lambda: hvd.remove_process_set(pair),
        hvd.join,
        hvd.barrier,
    ):
        with pytest.raises(hvd.NotInitializedError, match=f"forked from rank {expected[0]}"):
            operation()
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert pair.process_set_id is None
    with pytest.raises(hvd.NotInitializedError, match="call init"):
        hvd.rank()


def open_sockets() -> set[str]:
    """Return the sockets and the shared memory that this process has open."""
    with os.scandir("/proc/self/fd") as listing:
        names = {os.readlink(entry.path) for entry in listing}
    return {name for name in names if name.startswith(("socket:", "/memfd:torch_ring"))}


@pytest.mark.parametrize(
    ("stage", "transport"),
    [("_share_memory", "shm"), ("_wait_for_neighbours", "tcp")],
)
@on_ranks(3, initialized=False)
def test_a_child_that_is_forked_during_init_holds_nothing(transport, stage: str) -> None:
    """Another thread forks, as a program's data loader may, while this one is in init()."""
    before = open_sockets()
    held: list[set[str]] = []

    def fork() -> None:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, json.dumps(list(open_sockets() - before)).encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as report:
            held.append(set(json.load(report)))
        assert os.waitpid(child, 0)[1] == 0

    go_on = getattr(connect, stage)

    def fork_first(*arguments: object) -> object:
        assert open_sockets() - before, "there is nothing to inherit"
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        return go_on(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connect, stage, fork_first)
        hvd.init()
    assert held == [set()]
    assert hvd.allreduce(torch.ones(1000), op=hvd.Sum).eq(hvd.size()).all()
    hvd.shutdown()


# --- the memory of their parent's host


def holds_memory(pid: int | str) -> bool:
    """Return whether a process has mapped the memory of a host, or has its descriptor."""
    process = Path(f"/proc/{pid}")
    opened = [os.readlink(fd) for fd in (process / "fd").iterdir() if fd.is_symlink()]
    return NAME in (process / "maps").read_text() or any(NAME in name for name in opened)


@on_ranks(2, kind=FORKS)
def test_a_child_has_none_of_its_parents_shared_memory() -> None:
    """A child reads zeros in its parent's shared memory, and writes to a copy of its own."""
    weight = nn.Parameter(torch.zeros(100_000))
    optimizer = hvd.DistributedOptimizer(SGD([weight], lr=0.1))
    (weight * 3).sum().backward()
    shared = hvd.empty_shared(1000).fill_(5.0)
    assert is_shared(weight.grad)
    assert is_shared(shared)
    assert holds_memory("self")
    child = os.fork()
    if child == 0:
        passed = not holds_memory("self")
        for tensor in (weight.grad, shared):
            passed = passed and bool(tensor.eq(0).all())
            tensor.fill_(7.0)
            passed = passed and bool(tensor.eq(7).all())
        weight.grad = None
        (weight * 2).sum().backward()
        optimizer.zero_grad()
        passed = passed and not holds_memory("self")
        os._exit(0 if passed else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert weight.grad.eq(3).all()
    assert shared.eq(5).all()
    optimizer.step()
    optimizer.zero_grad()
    (weight * 4).sum().backward()
    assert weight.grad.eq(4).all()
