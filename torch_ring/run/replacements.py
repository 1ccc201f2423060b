"""Replacements: when ranks that have failed are started again."""

from __future__ import annotations

from torch_ring.run.assignment import Slot

__all__ = ["Replacements"]

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 60.0
_STEADY_S = 1200.0  # a rank that has lived so long did not fail for having been started
_MOST_EARLY_ENDS = 10  # after which a slot stays empty


class Replacements:
    """The slots whose ranks are to be started again, and when.

    The first time that is at once. A rank that fails soon after its start waits longer each time,
    and is given up after ten times.
    """

    def __init__(self) -> None:
        self._early_ends: dict[Slot, int] = {}
        self._due_at: dict[Slot, float] = {}

    def add(self, slot: Slot, lived_s: float, now: float) -> None:
        """Plan the next start of a slot's rank, which has lived for some time."""
        count = 0 if lived_s >= _STEADY_S else self._early_ends.get(slot, 0) + 1
        self._early_ends[slot] = count
        if count > _MOST_EARLY_ENDS:
            return
        delay_s = _FIRST_DELAY_S * 2 ** (count - 2) if count > 1 else 0.0
        self._due_at[slot] = now + min(delay_s, _LONGEST_DELAY_S)

    def take(self, now: float) -> list[Slot]:
        """Return the slots whose ranks are to be started now."""
        due = [slot for slot, at in self._due_at.items() if at <= now]
        for slot in due:
            del self._due_at[slot]
        return due

    @property
    def next_at(self) -> float | None:
        """When the next start is due; None: none is planned."""
        return min(self._due_at.values(), default=None)
