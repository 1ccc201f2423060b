# SPDX-License-Identifier: Apache-2.0
"""recorded_sets, RecordedSet: the operations recorded by this rank's engines."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch_ring._C import MessageRecord, OperationRecord
from torch_ring.world import current
from torch_ring.world.join import World
from torch_ring.world.recorded import recorded_groups

__all__ = ["RecordedSet", "asked_world", "own_rank", "recorded_sets"]

_GROUPS_FROM = 1 << 32  # above the numbers of process sets


@dataclass(frozen=True)
class RecordedSet:
    """The operations of this rank in one process set, or group of torch.distributed.

    Attributes:
        set_id: the unique number of the set; 0: the world. A group's number is derived from its
            name.
        name: "world", "process set 2" or "group 1 of torch.distributed".
        ranks: its members, as ranks of the world, or of torch.distributed.
        records: the last 2000 operations, oldest first, with those in flight.
        messages: the last 2000 messages, likewise.
        world: the world in which its ranks ask one another.
        world_ranks: the ranks of that world, in the numbering of `ranks`.
    """

    set_id: int
    name: str
    ranks: tuple[int, ...]
    records: list[OperationRecord]
    messages: list[MessageRecord]
    world: World
    world_ranks: Sequence[int]


def recorded_sets() -> list[RecordedSet]:
    """Return this rank's recorded sets, the world first, groups of torch.distributed last.

    Raises:
        NotInitializedError: there is no world, and no connected group of the backend ring.
    """
    found: list[RecordedSet] = []
    groups = recorded_groups()
    if not groups or current.find_world() is not None:
        current.require_own()
        world = current.world()
        for set_id, ranks, engine in world.process_sets.engines():
            name = f"process set {set_id}" if set_id else "world"
            own = tuple(ranks), engine.records(), engine.messages()
            found.append(RecordedSet(set_id, name, *own, world, range(world.size)))
    for group in groups:
        number = _GROUPS_FROM + zlib.crc32(group.name.encode())
        name = f"group {group.name} of torch.distributed"
        own = group.ranks, group.engine.records(), group.engine.messages()
        found.append(RecordedSet(number, name, *own, group.world, group.world_ranks))
    return found


def asked_world() -> tuple[World, Sequence[int]]:
    """Return the world in which ranks ask one another, and its ranks in the users' numbering.

    Without a world of init(), it is that of the largest group of torch.distributed.

    Raises:
        NotInitializedError: there is no world, and no connected group of the backend ring.
    """
    groups = recorded_groups()
    if groups and current.find_world() is None:
        largest = max(groups, key=lambda group: len(group.world_ranks))
        return largest.world, largest.world_ranks
    current.require_own()
    world = current.world()
    return world, range(world.size)


def own_rank() -> int:
    """Return this process's rank in the world; without a world, in torch.distributed."""
    groups = recorded_groups()
    return groups[0].rank if groups and current.find_world() is None else current.world().rank
