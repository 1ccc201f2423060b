# SPDX-License-Identifier: Apache-2.0
"""snapshot: counters of this rank's operations so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch_ring._C import Engine, kept_result_bytes
from torch_ring.tracing.operations import asked_world
from torch_ring.world import current
from torch_ring.world.join import World
from torch_ring.world.recorded import recorded_groups

__all__ = [
    "Histogram",
    "MemoryUse",
    "MessageCounts",
    "OperationCounts",
    "SetMetrics",
    "Snapshot",
    "snapshot",
    "snapshot_of",
]


@dataclass(frozen=True)
class OperationCounts:
    """The operations of one kind that have ended.

    Attributes:
        operations: their number, with failed ones.
        failed: the number of failed ones.
        bytes: the size of this rank's inputs.
        waiting_s: the sum of the times from submission to agreement: for other ranks, and for the
            fusion window.
        running_s: the sum of the times from agreement to the end. On a device: to the launch.
    """

    operations: int
    failed: int
    bytes: int
    waiting_s: float
    running_s: float


@dataclass(frozen=True)
class MessageCounts:
    """The messages of one direction that have ended.

    Attributes:
        messages: their number, with failed ones.
        failed: the number of failed ones.
        bytes: the size of the others.
    """

    messages: int
    failed: int
    bytes: int


@dataclass(frozen=True)
class Histogram:
    """A histogram of durations.

    Attributes:
        bounds_s: upper bounds in seconds, ascending; the last count has none.
        counts: the numbers of values in the intervals between bounds; one more than bounds.
        sum_s: the sum of all values.
    """

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True)
class SetMetrics:
    """Counts of the operations of this rank in one process set.

    Attributes:
        ranks: the members, as ranks of the world.
        operations: the counts by operation, such as "allreduce".
        inlined: the number of operations whose data travelled with the agreement.
        fused: the number of operations that were reduced in one buffer with others.
        lag: the waits of this rank for the last rank, for every agreed operation.
        rounds: the number of rounds of agreement, with those without an operation.
        messages: the counts by "sent" and "received"; a short message counts as sent when it has
            left this rank.
    """

    ranks: tuple[int, ...]
    operations: dict[str, OperationCounts]
    inlined: int
    fused: int
    lag: Histogram
    rounds: int
    messages: dict[str, MessageCounts]


@dataclass(frozen=True)
class MemoryUse:
    """The memory that torch_ring now uses on this rank, in bytes.

    Attributes:
        shared_bytes: the memory in use of this rank's part of its host's shared memory: buckets,
            gradients, `empty_shared()`, and address space for process sets; 0 if no two ranks share
            a host.
        kept_gradient_bytes: the part of it that is kept for the gradients of the next pass.
        kept_result_bytes: private memory that is kept for the next results.
    """

    shared_bytes: int
    kept_gradient_bytes: int
    kept_result_bytes: int


@dataclass(frozen=True)
class Snapshot:
    """Counts of the operations of this rank since init().

    Attributes:
        rank, size: this process's rank, and the number of ranks. In a program that has only groups:
            its rank in torch.distributed, and the number of ranks connected by the largest group.
        sets: the metrics by number of the process set; 0: the world. Removed sets are left out.
            Empty in a program that has only groups of torch.distributed.
        groups: the metrics of the connected groups of torch.distributed with the backend ring, by
            torch's name of the group.
        connections: the number of data connections that this rank has made or accepted, for
            collectives and messages. Each is made at its first use, so the number grows only with
            new process sets and new peers.
        memory: the memory in use.
    """

    rank: int
    size: int
    sets: dict[int, SetMetrics]
    groups: dict[str, SetMetrics]
    connections: int
    memory: MemoryUse


def snapshot() -> Snapshot:
    """Return counters and histograms of this rank since init(). Talks to no other rank.

    Raises:
        NotInitializedError: there is no world, and no connected group of the backend ring.
    """
    world, ranks = asked_world()
    found = snapshot_of(world)
    if world is current.find_world():
        return found
    return replace(found, rank=ranks[world.rank], sets={})  # the groups are its sets


def snapshot_of(world: World) -> Snapshot:
    """Return the snapshot of a world of this process. Thread: any."""
    sets = world.process_sets.engines()
    groups = recorded_groups()
    engines = {id(engine): engine for _, _, engine in sets}
    engines |= {id(group.engine): group.engine for group in groups}
    worlds = {id(each): each for each in (world, *(group.world for group in groups))}
    tables = [each.process_sets for each in worlds.values()]
    return Snapshot(
        world.rank,
        world.size,
        {number: _metrics(ranks, engine) for number, ranks, engine in sets},
        {group.name: _metrics(group.ranks, group.engine) for group in groups},
        sum(table.data_connections() for table in tables),
        MemoryUse(
            sum(table.shared_bytes() for table in tables),
            sum(engine.vacant_gradient_bytes() for engine in engines.values()),
            kept_result_bytes(),
        ),
    )


def _metrics(ranks: Sequence[int], engine: Engine) -> SetMetrics:
    totals = engine.totals()
    lags = totals["lags"]
    return SetMetrics(
        tuple(ranks),
        {
            name: OperationCounts(
                each["operations"],
                each["failed"],
                each["bytes"],
                each["waiting_ns"] / 1e9,
                each["running_ns"] / 1e9,
            )
            for name, each in totals["operations"].items()
        },
        totals["inlined"],
        totals["fused"],
        Histogram(
            tuple(2**i / 1e6 for i in range(len(lags) - 1)), tuple(lags), totals["lag_ns"] / 1e9
        ),
        totals["rounds"],
        {way: MessageCounts(**each) for way, each in engine.message_totals().items()},
    )
