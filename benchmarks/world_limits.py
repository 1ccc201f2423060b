"""needs_of, limits_of: the needs of a world of many ranks beside its network. Pure.

They are counted by the rules of the code, not measured. A limit is the most ranks whose need is
met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, log2

from choice import SECTION_RANKS, levels_of
from clusters import ENTRY_BYTES
from steps import Link

# For each rank in the table of all ranks: tests/setup/test_exchange_counts.py.
TABLE_BYTES = 26
STORE_OPERATIONS = 4  # of a host: see torch_ring/setup/store_exchange.py
INIT_TIMEOUT_S = 120  # TORCH_RING_INIT_TIMEOUT's default
SLOT_BYTES = 4 << 20  # for the entries of all ranks: csrc/transport/slot.h
DIFFERENT_BYTES = 24  # added to an entry that no other rank shares: csrc/collective/runs.h
ROWS_BYTES = 16  # for a rank's number of rows in an allgather, if all numbers differ
OPEN_FILES = 1024  # the usual `ulimit -n`
OTHER_FILES = 64  # a generous guess of a process's other open files
MOST_RANKS = 1 << 30  # upper end of the search for limits


@dataclass(frozen=True)
class Needs:
    """The needs of a world.

    Attributes:
        control: the most control connections of a rank: a Chord ring and its fingers.
        data: the most data connections of a rank for the agreement and an allreduce.
        alltoall: data connections of a rank after an alltoall.
        store_operations: the operations of all hosts on the store, without polls.
        table_bytes: the size of the table of all ranks, which each host reads from the store once.
        store_s: the time in which the store answers all that, over one connection at a time.
    """

    ranks: int
    control: int
    data: int
    alltoall: int
    store_operations: int
    table_bytes: int
    store_s: float


def needs_of(ranks: int, ranks_per_host: int, link: Link) -> Needs:
    """Return the needs of a world.

    Args:
        ranks: the number of ranks.
        ranks_per_host: the number of ranks on each host.
        link: the link to the store.
    """
    hosts = ceil(ranks / ranks_per_host)
    operations = STORE_OPERATIONS * hosts if hosts > 1 else 0
    table = TABLE_BYTES * ranks
    return Needs(
        ranks,
        control=min(ranks - 1, 2 * int(log2(ranks)) + 2),
        data=min(hosts - 1, 2 * ceil(log2(hosts)) + (SECTION_RANKS - 1) * levels_of(hosts)),
        alltoall=hosts - 1,
        store_operations=operations,
        table_bytes=table,
        store_s=operations * link.latency_s + (hosts - 1) * table / link.bandwidth,
    )


def limits_of(ranks_per_host: int, link: Link) -> Iterator[tuple[str, int | None]]:
    """Yield each limit's name, and the most ranks within it; None: no limit."""

    def needs(ranks: int) -> Needs:
        return needs_of(ranks, ranks_per_host, link)

    files = OPEN_FILES - OTHER_FILES
    yield (
        f"descriptors: {OPEN_FILES} open files, allreduce",
        most(lambda n: needs(n).control + needs(n).data <= files),
    )
    yield (
        f"descriptors: {OPEN_FILES} open files, alltoall",
        most(lambda n: needs(n).control + needs(n).alltoall <= files),
    )
    yield (
        f"store: all hosts served within {INIT_TIMEOUT_S} s",
        most(lambda n: needs(n).store_s <= INIT_TIMEOUT_S),
    )
    yield (
        "slot: an error that names both sides, all ranks ask for different things",
        most(lambda n: 8 + n * (DIFFERENT_BYTES + ENTRY_BYTES) <= SLOT_BYTES),
    )
    yield (
        "slot: an allgather, all ranks give different numbers of rows",
        most(lambda n: 8 + 16 + ENTRY_BYTES + n * ROWS_BYTES <= SLOT_BYTES),
    )


def most(is_met: Callable[[int], bool]) -> int | None:
    """Return the most ranks for which `is_met` is true, as it is for few ranks; None: for all."""
    low, high = 1, MOST_RANKS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle - 1)
    return low if low < MOST_RANKS else None
