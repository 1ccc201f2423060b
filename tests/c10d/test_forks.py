# SPDX-License-Identifier: Apache-2.0
"""Forked processes: they take no part in their parent's groups, and do not disturb them."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from on_ranks import on_ranks

from tests.support.groups import IS_TORCH_2_14, on_ring
from tests.support.pool import error_of

PATIENCE_S = 20.0


def in_child(fn: Callable[[], Any]) -> tuple[str, str]:
    """Return the error of a call in a forked process, or ("nothing", ...)."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writes, json.dumps(error_of(fn)).encode())
        os._exit(0)
    os.close(writes)
    try:
        is_done = bool(select.select([reads], [], [], PATIENCE_S)[0])
        if not is_done:
            os.kill(child, signal.SIGKILL)
        text = os.read(reads, 1 << 16).decode()
    finally:
        os.close(reads)
        os.waitpid(child, 0)
    assert is_done, "the child hangs"
    kind, message = json.loads(text)
    return kind, message


@on_ranks(2, by=on_ring, transport="tcp")
def test_a_forked_process_has_no_part_in_the_groups() -> None:
    ones, other = torch.ones(2), 1 - dist.get_rank()
    group = dist.new_group()
    dist.all_reduce(ones, group=group)
    begun = dist.all_reduce(ones, async_op=True)
    done = dist.all_reduce(ones, async_op=True)
    assert begun is not None
    assert done is not None
    done.get_future().wait()  # a thread completes it
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(ones),
        lambda: dist.all_reduce(ones, group=group),
        lambda: dist.all_reduce(ones, async_op=True),
        lambda: dist.send(ones, other),
        lambda: dist.recv(ones, other),
        begun.wait,
        begun.get_future,
    ]
    if IS_TORCH_2_14:
        calls.append(lambda: dist.monitored_barrier(timeout=timedelta(seconds=1)))
    for call in calls:
        kind, text = in_child(call)
        assert kind == "InvalidArgumentError", (kind, text)
        assert "a forked process has no part in the groups of its parent" in text
    backend = group._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    for harmless in (backend.abort, dist.destroy_process_group):
        assert in_child(harmless)[0] == "nothing"
    begun.wait()
    data = torch.utils.data.DataLoader(list(range(8)), num_workers=2)
    assert sum(batch.item() for batch in data) == 28
    for alive in (None, group):
        again = torch.ones(2)
        dist.all_reduce(again, group=alive)
        assert again.tolist() == [2, 2]


@on_ranks(2, by=on_ring)
def test_groups_are_destroyed_in_a_child_while_a_thread_uses_them() -> None:
    """A thread waits for futures while the process forks children, which inherit its locks."""
    stop = threading.Event()

    def reduce_often() -> None:
        ones = torch.ones(1)
        while ones.item() == 1:  # until a rank stops; all of them stop after the same round
            work = dist.all_reduce(torch.ones(100), async_op=True)
            assert work is not None
            work.get_future().wait()
            ones = torch.tensor(0.0 if stop.is_set() else 1.0)
            dist.all_reduce(ones, dist.ReduceOp.MIN)

    thread = threading.Thread(target=reduce_often)
    thread.start()
    try:
        for _ in range(5):
            assert in_child(dist.destroy_process_group)[0] == "nothing"
    finally:
        stop.set()
        thread.join()
