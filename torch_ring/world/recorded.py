# SPDX-License-Identifier: Apache-2.0
"""recorded_groups: the groups of torch.distributed whose engines record their operations.

They have worlds of their own, which ``current`` does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from torch_ring._C import Engine
from torch_ring.errors import InvalidArgumentError
from torch_ring.setup.launchers import discover
from torch_ring.world.join import World

__all__ = ["RecordedGroup", "add_recorded", "group_of_job", "place_in", "recorded_groups"]


def place_in(group: Any) -> tuple[int, int, Store]:
    """Return this process's rank in a group, the group's size, and its store.

    Raises:
        InvalidArgumentError: `group` is no group of torch.distributed with this process.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgumentError(
            "process_group: torch.distributed has no groups before init_process_group()"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgumentError(
            f"process_group={group!r} is no group of torch.distributed, or one without this process"
        )
    _, store = dist.distributed_c10d._world.pg_map[group]
    return dist.get_rank(group), dist.get_world_size(group), store


def group_of_job() -> Any:
    """Return torch.distributed's default group, if it has all ranks of this job; otherwise None.

    A launcher may have started more ranks than the group has.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD
    try:
        launched = discover()
    except InvalidArgumentError:
        return group
    same = (launched.rank, launched.size) == (dist.get_rank(group), dist.get_world_size(group))
    return group if same or launched.launcher == "python" else None


@dataclass(frozen=True)
class RecordedGroup:
    """A group that this process uses.

    Attributes:
        name: its unique name in torch.distributed, the same on all its ranks.
        ranks: its members in the group's order, as ranks of torch.distributed.
        flight_dir: TORCH_RING_FLIGHT_DIR when the group was made.
        engine: the engine of its operations.
        world: the world whose connections and memory it uses, perhaps with other groups.
        world_ranks: the ranks of torch.distributed, by rank in that world.
    """

    name: str
    ranks: tuple[int, ...]
    flight_dir: str
    engine: Engine
    world: World
    world_ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Return the rank of this process in torch.distributed."""
        return self.world_ranks[self.world.rank]


class _Recorded(Protocol):
    def recorded(self) -> RecordedGroup | None:
        """Return the group, if it is connected."""


_groups: WeakSet[_Recorded] = WeakSet()


def add_recorded(group: _Recorded) -> None:
    """Add a group to `recorded_groups`, as long as it lives."""
    _groups.add(group)


def recorded_groups() -> list[RecordedGroup]:
    """Return the connected groups of this process, by name."""
    found = [group.recorded() for group in list(_groups)]
    return sorted((each for each in found if each is not None), key=lambda each: each.name)
