# SPDX-License-Identifier: Apache-2.0
"""The remaining ranks make a new group in place of the old one; parts of a group."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from tests.support.groups import TIMEOUT_S, group_store, needs_torch_2_14, on_ring
from tests.support.pool import all_have_passed, error_of, expect_error, run
from torch_ring.c10d import registration
from torch_ring.c10d.reconfiguration import ReconfigureHandle, in_order


def total() -> float:
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    return tensor[0].item()


def exchange(store: dist.Store, name: str, rank: int, ranks: list[int]) -> list[str]:
    """Return the handles of some ranks, as a program's own coordinator would."""
    store.set(f"{name}/{rank}", dist.distributed_c10d._get_reconfigure_handle())
    return [store.get(f"{name}/{other}").decode() for other in ranks]


def reconfigure(uuid: int, handles: list[str] | set[str]) -> None:
    work = dist.distributed_c10d._reconfigure(uuid=uuid, handles=handles)
    work.wait()


def survive(passed: Path) -> tuple[int, int, float]:
    rank = dist.get_rank()
    assert dist.distributed_c10d._supports_reconfigure()
    assert total() == 3
    all_have_passed(passed, 3)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    expect_error("PeerLostError", "", total)
    store = dist.PrefixStore("coordinator", group_store())
    # In another order than before.
    reconfigure(1, exchange(store, "after", rank, [2, 1]))
    assert total() == 2
    return dist.get_rank(), dist.get_world_size(), total()


@needs_torch_2_14
def test_after_a_lost_rank(tmp_path: Path) -> None:
    outcomes = on_ring(survive, 3, tmp_path, transport="tcp", may_die=[0])
    assert outcomes == [None, (1, 2, 2.0), (0, 2, 2.0)]


@needs_torch_2_14
@on_ranks(2, by=on_ring)
def test_in_place_of_a_group_in_use() -> None:
    """A signal handler makes another group while this thread waits in the old one."""
    rank, store = dist.get_rank(), dist.PrefixStore("coordinator", group_store())
    reconfigure(1, exchange(store, "first", rank, [0, 1]))  # from then on it owns its engine
    sums = [total()]

    def again(*_: object) -> None:
        reconfigure(2, exchange(store, "again", rank, [0, 1]))
        sums.append(total())

    if rank == 0:
        signal.signal(signal.SIGALRM, again)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        assert error_of(total)[0] == "RingError"
    else:
        again()
    assert sums == [2.0, 2.0]


def begin_without_ranks() -> list[float]:
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "ring", store=group_store(), rank=rank, world_size=2, enable_reconfigure=True
    )
    expect_error("RingError", "call reconfigure() first", total)
    store = dist.PrefixStore("coordinator", group_store())
    sums = []
    for uuid in (1, 2):
        reconfigure(uuid, set(exchange(store, f"round {uuid}", rank, [0, 1])))
        sums.append(total())
    own = dist.distributed_c10d._get_reconfigure_handle()
    for handles, reason in ((["nonsense"], "is no handle"), ([own, own], "none twice")):
        expect_error("InvalidArgumentError", reason, lambda h=handles: reconfigure(3, h))
    dist.destroy_process_group()
    return sums


@needs_torch_2_14
def test_a_group_that_begins_without_ranks() -> None:
    assert run(begin_without_ranks, 2, initialized=False) == [[2.0, 2.0]] * 2


def test_the_ranks_of_a_set_of_handles_have_the_order_of_their_texts() -> None:
    texts = {ReconfigureHandle(f"{n:x}", "10.0.0.7", 5000 + n).text() for n in range(16)}
    assert [each.text() for each in in_order(texts)] == sorted(texts)


def abort_and_begin_anew() -> list[float]:
    """As torchft does: a group is aborted, whether or not it was used, before the next one."""
    store = dist.PrefixStore("coordinator", group_store())
    rank = dist.get_rank()
    sums = [total()]
    for uuid in (1, 2, 3):
        exchange(store, f"used {uuid}", rank, [0, 1])  # an abort may overtake the others' sums
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()  # type: ignore[union-attr]
        kind, _ = error_of(total)
        assert kind in ("RingError", "PeerLostError")
        reconfigure(uuid, exchange(store, f"round {uuid}", rank, [0, 1]))
        if uuid != 2:  # the third abort meets an unused group
            sums.append(total())
    return sums


@needs_torch_2_14
def test_a_group_begins_anew_after_abort() -> None:
    assert on_ring(abort_and_begin_anew, 2) == [[2.0, 2.0, 2.0]] * 2


def split() -> tuple[int, float] | None:
    part = dist.split_group(split_ranks=[[3, 1], [0]])
    if dist.get_rank() == 2:
        return None
    tensor = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(tensor, group=part)
    return dist.get_rank(part), tensor.item()


def parts() -> tuple[int, int] | None:
    """As torch 2.15 splits a group of CPUs."""
    group = registration._default_group()
    assert group is not None
    if group.rank not in (1, 3):
        return None
    part = group.among([3, 1], dist.PrefixStore("part", group_store()), TIMEOUT_S)
    part.connect()
    part.leave()
    return part.rank, part.size


def test_a_part_of_a_group_has_the_order_given() -> None:
    assert on_ring(parts, 4) == [None, (1, 2), None, (0, 2)]


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15), reason="of CPU groups: torch 2.15"
)
def test_split_group() -> None:
    assert on_ring(split, 4) == [(0, 0.0), (1, 4.0), None, (0, 4.0)]
