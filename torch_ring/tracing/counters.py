"""snapshot: what this rank has done so far, in numbers."""

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
        operations: their number, those that failed too.
        failed: of these.
        bytes: of this rank's inputs.
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
        messages: their number, those that failed too.
        failed: of these.
        bytes: of the others.
    """

    messages: int
    failed: int
    bytes: int


@dataclass(frozen=True)
class Histogram:
    """How often a value was how large.

    Attributes:
        bounds_s: upper bounds in seconds, ascending; the last count has none.
        counts: of the values below each bound and not below the one before; one more than bounds.
        sum_s: of all values.
    """

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True)
class SetMetrics:
    """Counts of the operations of this rank in one process set.

    Attributes:
        ranks: the members, ranks of the world.
        operations: by name, such as "allreduce".
        inlined: operations whose data travelled with the agreement.
        fused: operations that were reduced in one buffer with others.
        lag: of every operation that was agreed on, how long this rank has waited for the last one.
        rounds: of the agreement, those without an operation too.
        messages: by "sent" and "received"; a short message counts as sent when it is on its way.
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
    """The memory of this rank that torch_ring allocates, in bytes, now.

    Attributes:
        shared_bytes: of this rank's part of the memory that the ranks of its host share: buckets,
            gradients, `empty_shared()`, and address space for process sets; 0 where no two ranks
            share a host.
        kept_gradient_bytes: of these, blocks that are kept for the gradients of the next pass.
        kept_result_bytes: private memory that is kept for the next results
            (TORCH_RING_KEPT_RESULT_BYTES).
    """

    shared_bytes: int
    kept_gradient_bytes: int
    kept_result_bytes: int


@dataclass(frozen=True)
class Snapshot:
    """Counts of the operations of this rank since init().

    Attributes:
        rank, size: of this process; of the world. In a program that has only groups: its rank in
            torch.distributed, and the ranks that are connected with the largest group's.
        sets: by the number of the process set; 0: the world. A set that is removed is gone. Empty
            in a program that has only groups of torch.distributed.
        groups: those of torch.distributed with the backend ring that are connected, by torch's
            name of the group.
        connections: data connections that this rank has made or accepted, for collectives and
            messages. Each is made once, when it is first used, so more of them come with new
            process sets and new peers only.
        memory: what is allocated now.
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
    return replace(found, rank=ranks[world.rank], sets={})  # its sets are the groups


def snapshot_of(world: World) -> Snapshot:
    """Return the same for a world of this process. Thread: any."""
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
