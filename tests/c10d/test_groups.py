# SPDX-License-Identifier: Apache-2.0
"""Groups: process sets of one world, groups with their own worlds, their start and their end."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from tests.support.groups import default_group, group_store, needs_torch_2_14, on_ring
from tests.support.logs import logged
from tests.support.pool import DEADLINE_S, error_of, eventually, expect_error, run
from tests.support.shared import NAME
from tests.support.slow import on_shm_and_slowly_on_tcp
from torch_ring.c10d import groups, registration
from torch_ring.errors import RingError
from torch_ring.world.process_set_table import ProcessSetTable


def total(group: dist.ProcessGroup | None = None) -> float:
    """Return the sum of the ranks of a group, over the group."""
    tensor = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def descriptors() -> list[str]:
    """Return the open descriptors of this process."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return names


def datagram_sockets(names: Sequence[str]) -> int:
    """Return the number of descriptors by which the default group sleeps and wakes others."""
    with open("/proc/net/unix") as table:
        lines = [line.split() for line in table]
    doorbells = {f"socket:[{line[6]}]" for line in lines[1:] if line[4] == "0002"}
    return sum(name in doorbells for name in names)


def held() -> dict[str, int]:
    """Return this process's use of limited resources.

    Excludes the sockets by which the default group sleeps and wakes others: it opens them at their
    first use.
    """
    names = descriptors()
    doorbells = datagram_sockets(names)
    with open("/proc/self/maps") as maps:
        shared = sum(NAME in line for line in maps)
    return {
        "connections": sum(name.startswith("socket:") for name in names) - doorbells,
        "descriptors": len(names) - doorbells,
        "mappings of shared memory": shared,
        "threads": len(os.listdir("/proc/self/task")),
    }


@on_ranks(2, by=on_ring)
def test_unused_groups_cost_nothing() -> None:
    total(dist.group.WORLD)
    before = held()

    def has_no_more() -> bool:  # except connections of the world, which come and go
        return all(number <= before[what] + 2 for what, number in held().items())

    groups = [dist.new_group([0, 1]) for _ in range(100)]
    assert eventually(has_no_more), (before, held())
    assert total(groups[50]) == total(groups[99]) == 1
    # Each used group has one thread.
    assert eventually(lambda: held()["threads"] <= before["threads"] + 2), (before, held())
    for group in groups:
        dist.destroy_process_group(group)


def crossing(pairs: list[list[int]], is_local: bool) -> list[float]:
    """Each rank starts in a group whose other member starts in the next group."""
    if is_local:  # one name a group, even if ranks make the groups in different orders: torch 2.13
        dist.distributed_c10d._hash_ranks_to_str = str  # type: ignore[assignment]
    rank, groups = dist.get_rank(), {}
    begun: list[tuple[Any, torch.Tensor, float]] = []

    def make(index: int) -> None:
        groups[index] = dist.new_group(
            pairs[index], use_local_synchronization=is_local, sort_ranks=False
        )

    if not is_local:
        for index in range(3):
            make(index)
    for index in (rank, (rank + 2) % 3):
        if is_local:
            make(index)
        group, other = groups[index], sum(pairs[index]) - rank
        first, second, got = torch.tensor(1.0), torch.tensor(2.0), torch.zeros(1)
        begun += [
            (dist.all_reduce(first, group=group, async_op=True), first, 2.0),
            (dist.irecv(got, other, group=group), got, float(other)),
            (dist.isend(torch.tensor([float(rank)]), other, group=group), first, 2.0),
            (dist.all_reduce(second, group=group, async_op=True), second, 4.0),
        ]
    for work, tensor, want in reversed(begun):
        work.wait()
        assert tensor.item() == want
    return [total(groups[index]) for index in sorted((rank, (rank + 2) % 3))]


@needs_torch_2_14
@pytest.mark.parametrize(
    ("pairs", "is_local", "transport"),
    [([[1, 0], [2, 1], [2, 0]], False, "tcp"), ([[0, 1], [1, 2], [0, 2]], True, "shm")],
    ids=["worlds of their own", "process sets"],
)
def test_first_operations_in_crossing_order(
    pairs: list[list[int]], is_local: bool, transport: str
) -> None:
    sums = on_ring(crossing, 3, pairs, is_local, transport=transport, is_fresh=is_local)
    assert sums == [[1.0, 2.0], [1.0, 3.0], [3.0, 2.0]]


def gather_in_another_order() -> list[float]:
    group = dist.new_group([1, 0], sort_ranks=False)
    parts = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(parts, torch.tensor([float(dist.get_rank())]), group=group)
    return [part.item() for part in parts]


@needs_torch_2_14
def test_a_group_has_the_order_of_its_ranks() -> None:
    assert on_ring(gather_in_another_order, 2) == [[1.0, 0.0]] * 2


@needs_torch_2_14
@on_ranks(2, by=on_ring)
def test_a_group_is_left_while_it_is_connected() -> None:
    """Rank 0 leaves groups that rank 1 never uses: one with a world of its own, and a part."""
    for ranks, options in (([1, 0], {"sort_ranks": False}), ([0, 1], {})):
        if dist.get_rank() == 0:
            group = dist.new_group(ranks, use_local_synchronization=True, **options)
            work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
            assert work is not None
            words = "not done within the timeout of this wait()"
            expect_error("TimeoutError", words, lambda: work.wait(timedelta(seconds=0.1)))  # noqa: B023
            dist.destroy_process_group(group)
            expect_error("RingError", "was destroyed or aborted", work.wait)
        dist.barrier()


@on_ranks(3, initialized=False, kind="c10d")
def test_groups_of_a_gloo_program() -> None:
    with default_group("gloo"):
        group = dist.new_group(backend="ring")
        assert total(group) == 3
        pair = dist.new_group([1, 2], backend="ring")
        if dist.get_rank() > 0:
            assert total(pair) == 3


def next_life(backend: str) -> float:
    """Rank 0 still has the world of its last default group; rank 1 has none."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("ring", store=group_store(), rank=rank, world_size=2)
    dist.barrier()
    kept = dist.group.WORLD
    if rank == 0:
        dist.distributed_c10d._abort_process_group()
    else:
        del kept
        dist.destroy_process_group()
    with default_group(backend):
        return total(dist.new_group([0, 1], backend="ring"))


@needs_torch_2_14
@pytest.mark.parametrize("backend", ["gloo", "ring"])
def test_a_group_is_part_of_the_present_default_group(backend: str) -> None:
    assert run(next_life, 2, args=(backend,), initialized=False, kind="c10d") == [1.0, 1.0]


def group_without_memory() -> tuple[str, str]:
    """Rank 2 has no memory for a group of ranks 1 and 2; a later group has it again."""

    def fail(*_: Any) -> NoReturn:
        raise RingError("no more memory")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:
            patch.setattr(ProcessSetTable, "reserve_slot", fail)
        group = dist.new_group([1, 2])
    again = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return "", ""
    error = error_of(lambda: total(group))
    assert total(again) == 3
    return error


def test_a_member_that_cannot_make_the_group() -> None:
    text = "rank 2 could not make the group [1, 2]: no more memory"
    assert on_ring(group_without_memory, 3)[1:] == [("RingError", text)] * 2


@on_ranks(3, by=on_ring)
def test_a_member_that_does_not_come() -> None:
    """The timeout of the group counts, not TORCH_RING_INIT_TIMEOUT; a warning comes before."""
    os.environ |= {"TORCH_RING_INIT_TIMEOUT": "0.2", "TORCH_RING_STALL_WARNING": "0.5"}
    if dist.get_rank() != 0:
        return
    options = {"use_local_synchronization": True, "timeout": timedelta(seconds=0.8)}
    group = dist.new_group([0, 2], **options)
    words = "rank 0: the ranks 2 of the group [0, 2] have not made it within "
    with logged() as lines:
        expect_error("TimeoutError", f"{words}0.8 s", lambda: total(group))
    assert lines == [f"{words}0.5 s"]


@on_ranks(2, by=on_ring)
def test_groups_in_threads() -> None:
    def sum_often(group: dist.ProcessGroup) -> list[float]:
        return [total(group) for _ in range(50)]

    groups = [dist.new_group([0, 1]) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(sum_often, groups)) == [[1.0] * 50] * 4


def _use_and_destroy(ranks: list[int]) -> None:
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        assert total(group) == sum(ranks)
        dist.destroy_process_group(group)


def shared_world() -> groups._SharedWorld:
    default = registration._default_group()
    assert default is not None
    assert default._home is not None
    return default._home


def held_by_groups() -> dict[str, int]:
    """Return `held()`, and the resources that groups leave in this process."""
    shared = shared_world()
    gc.collect()
    assert datagram_sockets(descriptors()) <= 2
    return held() | {
        "bytes of shared memory": shared.world.process_sets.shared_bytes(),
        "groups that have been left": len(shared.left),
        "objects": sum(type(each).__module__.startswith("torch_ring") for each in gc.get_objects()),
    }


def all_have_left() -> bool:
    """Return whether this rank holds nothing for groups that it has left."""
    shared = shared_world()
    shared.let_go()
    return not shared.left


@on_ranks(2, by=on_ring)
def test_a_group_that_all_have_left_has_no_keys_in_the_store() -> None:
    before = set(groups._groups)
    made = dist.new_group([0, 1])
    total(made)
    (group,) = groups._groups - before
    key = f"member/{dist.get_rank()}"
    assert group._store.check([key])
    dist.destroy_process_group(made)
    assert eventually(all_have_left)
    assert not group._store.check([key])


@on_ranks(2, initialized=False, kind="c10d")
def test_a_world_ends_with_its_last_group() -> None:
    found = []
    for _ in range(3):
        with default_group():
            total()
        found.append(held())
    assert found == found[:1] * 3


def many_groups(count: int, look_at: list[int]) -> list[dict[str, int]]:
    everyone = list(range(dist.get_world_size()))
    found = []
    for made in range(1, count + 1):
        _use_and_destroy(everyone)
        _use_and_destroy(everyone[:-1])  # one that a rank is not in
        if made % 5 == 0:  # an unused group, and one with a world of its own
            dist.destroy_process_group(dist.new_group(everyone))
            _use_and_destroy([0])
        if made in look_at:
            # A group that all have left is freed when the next one is made, if the news has
            # arrived.
            dist.barrier()
            assert eventually(all_have_left, DEADLINE_S / 3)
            last = dist.new_group(everyone)
            found.append(held_by_groups())
            dist.barrier()
            dist.destroy_process_group(last)
    return found


@on_shm_and_slowly_on_tcp
def test_groups_leave_nothing_behind(transport: str) -> None:
    # A kept group holds 1.2 MiB a rank: memory ran out at group 2,250.
    for before, after in on_ring(many_groups, 3, 60, [30, 60], transport=transport):
        assert before == after
