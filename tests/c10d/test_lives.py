# SPDX-License-Identifier: Apache-2.0
"""A store outlives its groups, and torch reuses their names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.support.groups import default_group, group_store, needs_torch_2_14, on_ring
from tests.support.pool import error_of, eventually, run
from tests.support.worlds import on_both_transports


def total(value: float, group: Any = None) -> float:
    """Return the sum of the ranks' values over a group."""
    tensor = torch.tensor(value)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def begin_total(value: float, group: Any) -> tuple[Any, torch.Tensor]:
    tensor = torch.tensor(value)
    return dist.all_reduce(tensor, group=group, async_op=True), tensor


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
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
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
            begun = [begin_total(300.0, first), begin_total(400.0, second)]
            for work, _ in begun:
                work.wait()
            return [tensor.item() for _, tensor in begun]
        if rank == 1:
            tell_of_look(first.group_name)  # type: ignore[union-attr]
            return [total(1.0, first), total(1.0, second)]
    return []


@on_both_transports
def test_a_group_is_not_taken_for_one_of_an_earlier_life(transport: str) -> None:
    sums = run(groups_of_two_lives, 3, transport=transport, initialized=False, kind="c10d")
    assert sums == [[301.0, 401.0], [301.0, 401.0], []]


def made_again() -> list[float]:
    # torch 2.13 calls a group by the hash of its ranks, which is the same each time.
    dist.distributed_c10d._hash_ranks_to_str = lambda ranks: f"of {ranks}"  # type: ignore[assignment]
    rank, sums = dist.get_rank(), []
    for life in range(3):
        if rank == 0 and life > 0:
            group_store().wait(["looked"], timedelta(seconds=20))
            group_store().delete_key("looked")
        if rank < 2:
            group = dist.new_group([0, 1], use_local_synchronization=True)
            if rank == 1 and life > 0:
                tell_of_look(group.group_name)  # type: ignore[union-attr]
            sums += [total(10.0**life, group), total(float(rank), group)]
            dist.destroy_process_group(group)
    dist.barrier()
    return sums


@on_both_transports
def test_a_group_is_made_again_under_its_name(transport: str) -> None:
    sums = on_ring(made_again, 3, transport=transport, is_fresh=True)
    assert sums == [[2.0, 1.0, 20.0, 1.0, 200.0, 1.0]] * 2 + [[]]


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
@on_both_transports
def test_worlds_of_their_own_in_four_lives(transport: str) -> None:
    sums = run(own_worlds, 3, transport=transport, initialized=False, kind="c10d")
    assert sums == [[3.0, 6.0, 3.0], [3.0, 6.0, 5.0, 3.0], [6.0, 5.0]]


def worlds_of_other_sizes() -> list[float]:
    """A later world has fewer ranks, as after a death."""
    import torch_ring as hvd

    rank, sums = int(os.environ["RANK"]), []
    for size in (3, 2, 3):
        if rank < size:
            hvd.init(rank=rank, size=size, store=group_store())
            sums.append(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item())
            hvd.shutdown()
    return sums


@on_both_transports
def test_worlds_of_other_sizes_over_one_store(transport: str) -> None:
    sums = run(worlds_of_other_sizes, 3, transport=transport, initialized=False)
    assert sums == [[3.0, 2.0, 3.0], [3.0, 2.0, 3.0], [3.0, 3.0]]


def short_monitored_barrier() -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=2))


def monitored_in_a_second_life() -> list[tuple[str, str]]:
    errors = []
    for life in range(2):
        with default_group():
            if life == 0:
                dist.monitored_barrier()
            elif int(os.environ["RANK"]) != 1:  # rank 1 does not come
                errors.append(error_of(short_monitored_barrier))
            dist.barrier()
    return errors


@needs_torch_2_14
def test_a_monitored_barrier_waits_in_a_second_life() -> None:
    first, middle, last = run(monitored_in_a_second_life, 3, initialized=False, kind="c10d")
    assert middle == []
    for _, text in first:
        assert "Rank 1 failed to pass monitoredBarrier in 2000 ms" in text
    for _, text in last:
        assert "rank 0's error names it" in text


@contextmanager
def served_by_rank_0(directory: Path) -> Iterator[dist.Store]:
    """Serve a store that ends with rank 0; the others ask it only after rank 0 has gone on.

    They wait half a second for rank 0 to go on; it does not if it waits for them.
    """
    rank, port = int(os.environ["RANK"]), directory / "port"

    class Late(dist.Store):
        def __init__(self, store: dist.Store) -> None:
            super().__init__()
            self._real = store

        def check(self, keys: list[str]) -> bool:
            if "monitored_barrier" in keys[0] and "answer" in keys[0]:
                eventually((directory / "gone").exists, 0.5)
            return self._real.check(keys)

        def get(self, key: str) -> bytes:
            return self._real.get(key)

        def set(self, key: str, value: Any) -> None:
            self._real.set(key, value)

        def add(self, key: str, amount: int) -> int:
            return self._real.add(key, amount)

        def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
            return self._real.compare_set(key, expected, desired)

        def delete_key(self, key: str) -> bool:
            return self._real.delete_key(key)

    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (directory / "new").write_text(str(store.port))
        (directory / "new").rename(port)
        yield store
        del store
        return
    assert eventually(port.exists, 20)
    client = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    yield Late(client)


def ends_with_a_barrier(directory: Path) -> str:
    from torch_ring._C import RingBackend

    rank = int(os.environ["RANK"])
    with served_by_rank_0(directory) as store:
        never: Any = lambda *_: None  # noqa: E731
        backend = RingBackend(
            rank,
            3,
            group=SimpleNamespace(leave=lambda _: None),  # type: ignore[arg-type]
            split=never,
            store=store,
            timeout_s=20.0,
        )
        kind, text = error_of(lambda: backend.monitored_barrier(wait_all_ranks=False))
    if rank == 0:
        (directory / "gone").touch()
    return f"{kind} {text}"


def test_a_monitored_barrier_is_the_last_statement(tmp_path: Path) -> None:
    assert run(ends_with_a_barrier, 3, args=(tmp_path,), initialized=False) == ["nothing "] * 3
