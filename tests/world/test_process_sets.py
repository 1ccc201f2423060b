# SPDX-License-Identifier: Apache-2.0
"""Process sets: their properties, adding, removing and using them; ids and memory used again."""

import copy
import itertools
import pickle
import random
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from pool import error_of, eventually, run
from process_set_use import (
    check_process_set,
    connections,
    holds_no_more_than,
    memory_bytes,
    resources,
    started_sum,
)
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.tracing import snapshot
from torch_ring.world.process_set import engine_of, root_in

_PAGE = 4096

# --- one rank


def test_wrong_ranks_are_refused():
    for wrong in ([], [-1, 0], [1, 1], "01", 3, [0.5], None):
        with pytest.raises(hvd.InvalidArgumentError):
            hvd.ProcessSet(wrong)


def test_equality_and_pickle():
    one, other = hvd.ProcessSet([2, 0]), hvd.ProcessSet(range(0, 3, 2))
    assert one == other == pickle.loads(pickle.dumps(one))
    assert {one: "it"}[other] == "it"
    assert one != hvd.ProcessSet([0])
    assert one != [0, 2]
    everyone = hvd.global_process_set
    assert pickle.loads(pickle.dumps(everyone)) is everyone is copy.deepcopy(everyone)
    assert (one.process_set_id, one.included(), one.size()) == (None, False, 2)
    assert (everyone.process_set_id, everyone.ranks, everyone.included()) == (0, None, False)
    assert repr(one) == "ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)"


def test_process_sets_need_a_world():
    for fn in (
        lambda: hvd.add_process_set([0]),
        lambda: hvd.remove_process_set(hvd.ProcessSet([0])),
        lambda: engine_of(hvd.ProcessSet([0])),
        lambda: engine_of(hvd.global_process_set),
        lambda: root_in(hvd.global_process_set, 0),
        hvd.global_process_set.size,
        hvd.global_process_set.rank,
        hvd._basics._get_process_set_ids_and_ranks,
    ):
        with pytest.raises(hvd.NotInitializedError):
            fn()


@on_ranks(1)
def test_a_world_of_one() -> None:
    assert hvd._basics._get_process_set_ids_and_ranks() == {0: [0]}
    assert error_of(lambda: hvd.add_process_set([0]))[0] == "InvalidArgumentError"
    assert error_of(lambda: hvd.add_process_set([1]))[0] == "InvalidArgumentError"
    check_process_set(hvd.global_process_set, [0])


# --- adding and removing


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("shm", 4), ("tcp", 3)])
@on_ranks()
def test_sets_are_added_and_removed(transport, size) -> None:
    everyone = list(range(size))
    first, rest = hvd.ProcessSet([0]), hvd.ProcessSet(range(size - 1, 0, -1))
    assert hvd.add_process_set(first) is first
    assert hvd.add_process_set(rest) is rest
    ids = {0: everyone, 1: [0], 2: everyone[1:]}
    assert hvd._basics._get_process_set_ids_and_ranks() == ids
    assert str(first) == "ProcessSet(process_set_id=1, ranks=[0], mpi_comm=None)"
    for process_set in (hvd.global_process_set, first, rest, pickle.loads(pickle.dumps(rest))):
        check_process_set(process_set, process_set.ranks or [])

    for taken in ([0], everyone, rest):
        kind, text = error_of(lambda: hvd.add_process_set(taken))  # noqa: B023
        assert (kind, "there is a process set" in text) == ("InvalidArgumentError", True)
    assert error_of(lambda: hvd.add_process_set([0, size]))[0] == "InvalidArgumentError"

    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.remove_process_set(first)
    assert not hvd.remove_process_set(first)
    assert first.process_set_id is None
    kind, text = error_of(lambda: engine_of(first))
    assert (kind, "has been removed" in text) == ("InvalidArgumentError", True)
    check_process_set(rest, everyone[1:])
    last = hvd.add_process_set([size - 1, 0] if size > 2 else [0])
    assert last.process_set_id == 1  # used again
    check_process_set(last, last.ranks or [])
    hvd.shutdown()
    assert rest.process_set_id is None
    assert hvd.global_process_set.process_set_id == 0

    hvd.init(process_sets=[rest, [0]])
    assert (rest.process_set_id, first.process_set_id) == (1, 2)
    check_process_set(rest, everyone[1:])
    check_process_set(first, [0])


@on_both_transports
@on_ranks(4)
def test_nothing_is_left_of_a_removed_set(transport) -> None:
    """Sets of changing members reuse memory that still has the counters of earlier sets."""
    for number in range(60):
        ranks = ([0, 1], [0, 2], [0, 1, 2])[number % 3]
        process_set = hvd.add_process_set(ranks)
        for _ in range(number % 4):
            check_process_set(process_set, ranks)
        assert hvd.remove_process_set(process_set)
        if number == 20:  # the first ones open permanent descriptors
            hvd.barrier()
            before, shared_bytes = resources(), snapshot().memory.shared_bytes
            memory = memory_bytes()
            hvd.barrier()
    hvd.barrier()
    # A rank may open a few once for all sets, such as the socket for rings to ranks that poll.
    descriptors, threads = before
    assert holds_no_more_than((descriptors + 3, threads))
    assert snapshot().memory.shared_bytes == shared_bytes
    assert memory_bytes() <= memory


def use_a_hierarchy() -> tuple[list[int] | None, ...]:
    host, one_of_each = hvd.hierarchy()
    found = host.ranks, one_of_each.ranks
    for each in (*hvd.hierarchy(), *pickle.loads(pickle.dumps((host, one_of_each)))):
        assert each in {host, one_of_each}
        assert each.included() is (hvd.rank() in (each.ranks or ()))
        if each.included():
            check_process_set(each, each.ranks)
    assert host != one_of_each
    hvd.shutdown()
    assert (host.ranks, one_of_each.process_set_id) == ([], None)
    hvd.init()
    with pytest.raises(hvd.InvalidArgumentError, match="has not been added"):
        hvd.allreduce(torch.ones(1), process_set=one_of_each if found[1] == [0] else host)
    hvd.hierarchy()
    assert (host.ranks, one_of_each.ranks) == found
    return found


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_hierarchy(transport):
    """One host, whose ranks form one level; and a host for each rank, which form the other."""
    everyone = [0, 1, 2]
    levels = [(everyone, [0])] * 3 if transport == "shm" else [([r], everyone) for r in everyone]
    assert run(use_a_hierarchy, 3, transport=transport) == levels


# --- sets that nobody uses, and first uses


def subsets(size: int, most: int) -> list[list[int]]:
    """Return `most` sets of two to four of `size` ranks."""
    every = (itertools.combinations(range(size), n) for n in (2, 3, 4))
    return [list(ranks) for ranks in itertools.islice(itertools.chain(*every), most)]


def add_all(sets: list[list[int]]) -> list[hvd.ProcessSet]:
    return [hvd.add_process_set(ranks) for ranks in sets]


def remove_all(sets: list[hvd.ProcessSet]) -> None:
    for each in sets:
        assert hvd.remove_process_set(each)


def warmed_up() -> tuple[int, int]:
    """Return the most resources of this rank without sets: the world may connect to all ranks."""
    remove_all(add_all([[0]]))
    hvd.alltoall(torch.zeros(hvd.size() << 16))  # too much to be relayed by other ranks
    hvd.barrier()
    descriptors, threads = resources()
    hvd.barrier()
    return descriptors + (hvd.size() - 1 if connections().memory is None else 0), threads


@on_both_transports
@on_ranks(5)
def test_sets_that_nobody_uses(transport) -> None:
    count = 20
    ranks = subsets(hvd.size(), count)
    assert len(ranks) == count
    before, memory = warmed_up(), memory_bytes()
    hvd.barrier()
    sets = add_all(ranks)
    hvd.barrier()
    assert holds_no_more_than(before), resources()
    # A page each, where huge pages are not forced on shared memory; between hosts, none.
    assert memory_bytes() - memory <= sum(map(len, ranks)) * _PAGE
    hvd.barrier()
    check_process_set(sets[-1], ranks[-1])  # it can still be used
    remove_all(sets)
    hvd.barrier()
    assert memory_bytes() <= memory
    assert holds_no_more_than(before), resources()


@on_both_transports
@on_ranks(4)
def test_ranks_use_sets_first_in_different_orders(transport) -> None:
    rank = hvd.rank()
    for turn in range(3):
        sets = add_all([*subsets(hvd.size(), 10), *([r] for r in range(hvd.size()))])
        mine = [each for each in sets if each.included()]
        random.Random(100 * turn + rank).shuffle(mine)
        works = [(each, started_sum(each, rank)) for each in mine]
        random.Random(100 * turn + rank + 50).shuffle(works)
        for each, work in works:
            assert work.wait()[0] == sum(each.ranks or [])
        remove_all(sets)


@on_both_transports
@on_ranks(3)
def test_a_set_that_has_another_ones_id(transport) -> None:
    """One member has used a set when it is removed, so its connections are there on both sides."""
    rounds = 9
    before, rank, size = warmed_up(), hvd.rank(), hvd.size()
    for turn in range(rounds):
        pair = hvd.add_process_set([0, size - 1])
        assert pair.process_set_id == 1
        work: Any = None
        if rank == (size - 1 if turn % 3 else 0):
            work = started_sum(pair, 1e6)
            eventually(work.done, 0.01)  # it connects meanwhile, or soon
        hvd.remove_process_set(pair)
        if work is not None:
            with pytest.raises(hvd.RingError):
                work.wait()
            work = None  # it keeps the set's resources
        again = hvd.add_process_set([0, size - 1])
        assert again.process_set_id == 1
        for _ in range(3):
            check_process_set(again, [0, size - 1])
        hvd.remove_process_set(again)
        hvd.barrier()
    assert holds_no_more_than(before), resources()
