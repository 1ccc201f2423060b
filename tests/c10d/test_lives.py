# SPDX-License-Identifier: Apache-2.0
"""A store outlives its groups, and torch reuses their names."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from on_ranks import on_ranks

from tests.support.groups import default_group, group_store, needs_torch_2_14, on_ring
from tests.support.pool import eventually, expect_error, run


def total(value: float, group: Any = None) -> float:
    """Return the sum of the ranks' values over a group."""
    tensor = torch.tensor(value)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


class _Looking:
    """A group's store that reports once that its rank has looked for the others.

    If they seem to be there, it first reads what they have left.
    """

    def __init__(self, store: Any) -> None:
        self._store, self._has_told = store, False

    def _tell(self) -> None:
        if not self._has_told:
            self._has_told = True
            group_store().set("looked", "")

    def check(self, keys: list[str]) -> bool:
        found: bool = self._store.check(keys)
        if not found:
            self._tell()
        return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._store.multi_get(keys)
        self._tell()
        return values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def tell_of_look(name: str) -> None:
    """Make `store.wait(["looked"])` of other ranks return when this one looks for its members."""
    from torch_ring.c10d import groups

    (group,) = (group for group in groups._groups if group.name == name)
    group._store = _Looking(group._store)  # type: ignore[assignment]


def groups_of_two_lives() -> list[float]:
    rank = int(os.environ["RANK"])
    with default_group():
        first, second = dist.new_group([1, 2]), dist.new_group([0, 1])
        if rank > 0:
            total(1.0, first)
        if rank < 2:
            total(1.0, second)
        dist.barrier()
    with default_group():
        if rank == 0:  # it is late: rank 1 has looked for its groups
            group_store().wait(["looked"], timedelta(seconds=20))
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        if rank == 0:
            tensors = [torch.tensor(300.0), torch.tensor(400.0)]
            works = [
                dist.all_reduce(tensor, group=group, async_op=True)
                for tensor, group in zip(tensors, (first, second), strict=True)
            ]
            for work in works:
                work.wait()  # type: ignore[union-attr]
            return [tensor.item() for tensor in tensors]
        if rank == 1:
            tell_of_look(first.group_name)  # type: ignore[union-attr]
            return [total(1.0, first), total(1.0, second)]
    return []


def test_a_group_is_not_taken_for_one_of_an_earlier_life() -> None:
    sums = run(groups_of_two_lives, 3, transport="tcp", initialized=False, kind="c10d")
    assert sums == [[301.0, 401.0], [301.0, 401.0], []]


def made_again() -> list[float]:
    """A group is made again under its name; rank 0 comes late."""
    # torch 2.13 calls a group by the hash of its ranks, which is the same each time.
    dist.distributed_c10d._hash_ranks_to_str = lambda ranks: f"of {ranks}"  # type: ignore[assignment]
    rank, sums = dist.get_rank(), []
    for turn in range(3):
        if rank == 0 and turn > 0:
            group_store().wait(["looked"], timedelta(seconds=20))
            group_store().delete_key("looked")
        group = dist.new_group([0, 1], use_local_synchronization=True)
        if rank == 1 and turn > 0:
            tell_of_look(group.group_name)  # type: ignore[union-attr]
        sums.append(total(10.0**turn, group))
        dist.destroy_process_group(group)
    dist.barrier()
    return sums


def test_a_group_is_made_again_under_its_name() -> None:
    assert on_ring(made_again, 2, is_fresh=True) == [[2.0, 20.0, 200.0]] * 2


def own_worlds() -> list[float]:
    """Groups with worlds of their own, of different sizes and ranks under the same name."""
    rank, sums = int(os.environ["RANK"]), []
    for ranks in ([1, 0], [2, 1, 0], [2, 1], [1, 0]):
        with default_group():
            group = dist.new_group(ranks, sort_ranks=False)
            if rank in ranks:
                sums.append(total(float(rank + 1), group))
            dist.barrier()
    return sums


@needs_torch_2_14
def test_worlds_of_their_own_in_four_lives() -> None:
    sums = run(own_worlds, 3, initialized=False, kind="c10d")
    assert sums == [[3.0, 6.0, 3.0], [3.0, 6.0, 5.0, 3.0], [6.0, 5.0]]


@needs_torch_2_14
@on_ranks(3, initialized=False, kind="c10d")
def test_monitored_barriers() -> None:
    rank = int(os.environ["RANK"])
    with default_group():
        store, counts = dist.distributed_c10d._get_default_store(), []
        for barriers in (1, 10):
            for _ in range(barriers):
                dist.monitored_barrier()
            dist.barrier()
            counts.append(store.num_keys())
            dist.barrier()
        assert counts[0] == counts[1], "they leave something in the store"
    with default_group():
        if rank != 1:  # rank 1 does not come
            words = [
                "Rank 1 failed to pass monitoredBarrier in 1000 ms",
                "rank 0's error names it",
            ][rank > 0]
            barrier = partial(dist.monitored_barrier, timeout=timedelta(seconds=1))
            expect_error("TimeoutError", words, barrier)
        dist.barrier()


class Late(dist.Store):
    """A store that is asked for the answer to a barrier only after rank 0 has gone on.

    A rank waits half a second for rank 0 to go on; it does not if it waits for that rank.
    """

    def __init__(self, port: int) -> None:
        super().__init__()
        self._real = dist.TCPStore("127.0.0.1", port, is_master=False)
        self._others = group_store()

    def check(self, keys: list[str]) -> bool:
        if "monitored_barrier" in keys[0] and "answer" in keys[0]:
            eventually(lambda: self._others.check(["gone"]), 0.5)
        return self._real.check(keys)

    def get(self, key: str) -> bytes:
        return self._real.get(key)

    def set(self, key: str, value: Any) -> None:
        self._real.set(key, value)


@on_ranks(3, initialized=False)
def test_a_monitored_barrier_is_the_last_statement() -> None:
    """Rank 0 serves the store, which ends with it."""
    from torch_ring._C import RingBackend

    rank, store = int(os.environ["RANK"]), None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        group_store().set("port", str(store.port))
    here = store or Late(int(group_store().get("port")))
    group: Any = SimpleNamespace(leave=lambda _: None)
    never: Any = lambda *_: None  # noqa: E731
    backend = RingBackend(rank, 3, group=group, split=never, store=here, timeout_s=20.0)
    backend.monitored_barrier(wait_all_ranks=False)
    if rank == 0:
        del backend, here, store
        group_store().set("gone", "")
