"""recorded_sets, RecordedSet: what this rank's engines have recorded."""

from __future__ import annotations

from dataclasses import dataclass

from torch_ring._C import OperationRecord
from torch_ring.world import current

__all__ = ["RecordedSet", "recorded_sets"]


@dataclass(frozen=True)
class RecordedSet:
    """The operations of this rank in one process set.

    Attributes:
        set_id: the number of the set, which no other set gets; 0: the world.
        ranks: its members, ranks of the world.
        records: the last 2000, oldest first, also those in flight.
    """

    set_id: int
    ranks: tuple[int, ...]
    records: list[OperationRecord]


def recorded_sets() -> list[RecordedSet]:
    """Return what this rank has recorded, the world first. Raises NotInitializedError."""
    current.require_own()
    found: list[RecordedSet] = []
    for set_id, ranks, engine in current.world().process_sets.engines():
        found.append(RecordedSet(set_id, tuple(ranks), engine.records()))
    return found
