"""recorded_groups: the groups of torch.distributed whose engines record what they do.

They have worlds of their own, of which ``current`` knows nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

from torch_ring._C import Engine
from torch_ring.world.join import World

__all__ = ["RecordedGroup", "add_recorded", "recorded_groups"]


@dataclass(frozen=True)
class RecordedGroup:
    """A group that this process uses.

    Attributes:
        name: as torch.distributed calls it: the same on all its ranks, and of no other group.
        ranks: its members, in its order: ranks of torch.distributed.
        flight_dir: TORCH_RING_FLIGHT_DIR when the group was made.
        engine: of its operations.
        world: whose connections and memory it uses; maybe with other groups.
        world_ranks: ranks of torch.distributed, by their rank in that world.
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
    """Have a group among those that are asked for what they have recorded, as long as it lives."""
    _groups.add(group)


def recorded_groups() -> list[RecordedGroup]:
    """Return the connected groups of this process, by name."""
    found = [group.recorded() for group in list(_groups)]
    return sorted((each for each in found if each is not None), key=lambda each: each.name)
