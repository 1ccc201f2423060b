"""snapshot: what this rank has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_ring.world import current

__all__ = ["Histogram", "OperationCounts", "SetMetrics", "Snapshot", "snapshot"]


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
    """What this rank has done in one process set.

    Attributes:
        ranks: the members, ranks of the world.
        operations: by name, such as "allreduce".
        inlined: operations whose data travelled with the agreement.
        fused: operations that were reduced in one buffer with others.
        lag: of every operation that was agreed on, how long this rank has waited for the last one.
    """

    ranks: tuple[int, ...]
    operations: dict[str, OperationCounts]
    inlined: int
    fused: int
    lag: Histogram


@dataclass(frozen=True)
class Snapshot:
    """What this rank has done since init().

    Attributes:
        rank, size: of this process; of the world.
        sets: by the number of the process set; 0: the world. A set that is removed is gone.
    """

    rank: int
    size: int
    sets: dict[int, SetMetrics] = field(default_factory=dict)


def snapshot() -> Snapshot:
    """Return counters and histograms of this rank since init(). Talks to no other rank.

    Raises:
        NotInitializedError: before init().
    """
    current.require_own()
    world = current.world()
    sets = {}
    for number, ranks, engine in world.process_sets.engines():
        totals = engine.totals()
        lags = totals["lags"]
        sets[number] = SetMetrics(
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
        )
    return Snapshot(world.rank, world.size, sets)
