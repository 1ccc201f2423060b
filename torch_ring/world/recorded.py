"""recorded_groups: the groups of torch.distributed whose engines record what they do.

They have worlds of their own, of which ``current`` knows nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

from torch_ring._C import Engine

__all__ = ["RecordedGroup", "add_recorded", "recorded_groups"]


@dataclass(frozen=True)
class RecordedGroup:
    """A group that this process uses.

    Attributes:
        name: as torch.distributed calls it: the same on all its ranks, and of no other group.
        ranks: its members, in its order: ranks of torch.distributed.
        rank: of this process in torch.distributed.
        flight_dir: TORCH_RING_FLIGHT_DIR when the group was made.
        engine: of its operations.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    flight_dir: str
    engine: Engine


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
