# SPDX-License-Identifier: Apache-2.0
"""Every operation makes progress, even if threads give up their waits, or only poll."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from pool import DEADLINE_S, eventually, run
from torch import Tensor

import torch_ring as hvd
from tests.support.groups import on_ring
from torch_ring.tracing.operations import recorded_sets
from torch_ring.world.process_set import engine_of

_Wait = Callable[[], Any]
_Poll = Callable[[], bool]


def submit_to_hvd(tensor: Tensor, name: str) -> tuple[_Wait, _Poll]:
    handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
    return lambda: hvd.synchronize(handle), lambda: hvd.poll(handle)


def submit_to_group(tensor: Tensor, name: str) -> tuple[_Wait, _Poll]:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work.wait, work.is_completed


def await_agreement(number: int) -> None:
    """Wait until the ranks have agreed on the operation with this number, which then runs."""

    def has_come() -> bool:
        [found] = recorded_sets()
        return any(r.number == number and r.sequence > 0 for r in found.records)

    assert eventually(has_come, DEADLINE_S / 3)


def last_number() -> int:
    """Return the number of this rank's last operation."""
    [found] = recorded_sets()
    return max((record.number for record in found.records), default=0)


def wait_and_poll(door: str) -> None:
    submit = submit_to_hvd if door == "hvd" else submit_to_group
    big, small = torch.ones(20_000_000), torch.ones(50_000)
    for i in range(4):
        wait, _ = submit(big.fill_(1), f"{i}")
        number = last_number()
        wait_for_last, is_last_done = submit(small.fill_(1), f"{i} last")
        await_agreement(number)  # by the engine's thread: no other thread makes progress
        wait()
        if i % 2 == (hvd.rank() if door == "hvd" else dist.get_rank()):
            assert eventually(is_last_done, DEADLINE_S / 3)
        wait_for_last()
        assert big[-1] == small[-1] == 2


@pytest.mark.parametrize(("door", "transport"), [("hvd", "shm"), ("group", "tcp")])
def test_a_program_waits_for_one_operation_and_polls_the_next(door: str, transport: str) -> None:
    if door == "hvd":
        run(wait_and_poll, 2, args=(door,), transport=transport)
    else:
        on_ring(wait_and_poll, 2, door, transport=transport)


def message_that_depends() -> None:
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    big, small, token = torch.ones(20_000_000), torch.ones(50_000), torch.zeros(1)
    for _ in range(4):
        first = dist.all_reduce(big, async_op=True)
        number = last_number()
        second = dist.all_reduce(small, async_op=True)
        assert first is not None
        assert second is not None
        await_agreement(number)
        first.wait()
        if rank == 0:  # rank 1 sends when the second operation is done
            dist.recv(token, peer)
        else:
            second.wait()
            dist.send(token, peer)
        second.wait()


def test_a_message_depends_on_an_operation_that_its_receiver_does_not_wait_for() -> None:
    on_ring(message_that_depends, 2, transport="tcp")


@on_ranks(2)
def test_a_blocking_operation_whose_caller_never_waits(tmp_path) -> None:
    done = tmp_path / "done"
    tensor = torch.full((5,), float(hvd.rank()))
    if hvd.rank() == 0:
        # As Ctrl-C does between the submission of a blocking operation and its wait.
        engine = engine_of(hvd.global_process_set)
        engine.submit("broadcast", tensor, tensor, "dropped", True, root=0)
        assert eventually(done.exists, DEADLINE_S / 3)
    else:
        hvd.broadcast_(tensor, 0, name="dropped")
        assert tensor.tolist() == [0.0] * 5
        done.touch()
    hvd.barrier()
