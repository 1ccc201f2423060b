# SPDX-License-Identifier: Apache-2.0
"""Process sets used by no rank or by some; their memory, ids and connections are reused."""

import itertools
import random
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from pool import eventually
from process_set_use import (
    check_process_set,
    connections,
    memory_bytes,
    resources,
    started_sum,
)
from worlds import on_both_transports

import torch_ring as hvd

_PAGE = 4096


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


def holds_no_more_than(before: tuple[int, int]) -> bool:
    """Return whether the descriptors and threads are soon no more than before."""
    return eventually(lambda: all(a <= b for a, b in zip(resources(), before, strict=True)), 20.0)


# --- unused sets


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


# --- first use


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


# --- leftovers of removed sets


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
