"""needs_of, limits_of: what a world of many ranks needs beside its network. Pure.

Counted by the rules of the code, not measured. A limit is the most ranks whose need is met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, log2

from choice import SECTION_RANKS, levels_of
from clusters import ENTRY_BYTES
from steps import Link

# Of the table of all ranks, for each of them: tests/setup/test_exchange_counts.py.
TABLE_BYTES = 26
STORE_OPERATIONS = 4  # of a host, as torch_ring/setup/store_exchange.py counts them
INIT_TIMEOUT_S = 120  # TORCH_RING_INIT_TIMEOUT's default
SLOT_BYTES = 4 << 20  # for the entries of all ranks: csrc/transport/slot.h
DIFFERENT_BYTES = 24  # beside an entry that no other rank shares: csrc/collective/runs.h
ROWS_BYTES = 16  # of a rank's rows in an allgather, if no two ranks have equally many
OPEN_FILES = 1024  # `ulimit -n`, as it usually is
OTHER_FILES = 64  # that a process has besides: a guess with room
MOST_RANKS = 1 << 30  # whose limits are searched


@dataclass(frozen=True)
class Needs:
    """The needs of a world.

    Attributes:
        control: control connections of a rank, at most: a Chord ring and its fingers.
        data: data connections of a rank for the agreement and an allreduce, at most.
        alltoall: data connections of a rank once it has taken part in an alltoall.
        store_operations: of all hosts, but for looks whether something is there.
        table_bytes: of the table of all ranks, which each host gets from the store, once.
        store_s: in which the store has answered all that, through one connection at a time.
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
        ranks: of the world.
        ranks_per_host: on each of its hosts.
        link: to the store.
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
    """Yield what ends a world of more ranks, and the most ranks without that; None: no end."""

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
    """Return the most ranks for which `is_met` is true, which it is for few; None: for all."""
    low, high = 1, MOST_RANKS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle - 1)
    return low if low < MOST_RANKS else None
