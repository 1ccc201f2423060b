# SPDX-License-Identifier: Apache-2.0
"""Process sets: their properties, adding and removing them, and several at once."""

import copy
import pickle

import pytest
import torch
from on_ranks import on_ranks
from pool import error_of, run
from process_set_use import (
    assert_no_more_than,
    check_process_set,
    memory_bytes,
    resources,
)
from worlds import on_both_transports

import torch_ring as hvd
from torch_ring.tracing import snapshot
from torch_ring.world.process_set import engine_of, root_in

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
    before: tuple[int, int] | None = None
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
    assert_no_more_than(before, opened=3)
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
