"""HostTable: which hosts an elastic job has, and which of their slots are to get a process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch_ring.run.assignment import Slot
from torch_ring.run.hosts import Host

__all__ = ["HostTable"]

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 60.0
_STEADY_S = 1200.0  # a rank that has lived so long did not fail for having been started
_MOST_EARLY_ENDS = 10  # after which a slot stays empty
_FIRST_REACH_S = 1.0  # until a host that was lost is reached again, where none is left out
_YOUNG_S = 60.0  # ranks that fail so soon after their start speak against their host
_MOST_YOUNG_ENDS = 3  # in a row, after which a host is left out


@dataclass
class _Place:
    """A slot, and what has become of the processes that were there."""

    slot: Slot
    is_taken: bool = False
    early_ends: int = 0
    due_at: float = 0.0


@dataclass
class _Record:
    """What speaks against a host."""

    young_ends: int = 0  # in a row
    times_out: int = 0
    out_until: float = 0.0


class HostTable:
    """Slots of hosts by number. The number of a slot is the rank of its first process.

    A process that fails is started again at once. If it fails soon after its start, that waits
    longer each time, and is given up after ten times. A host on which three processes in a row fail
    within a minute is left out: for good, or for a time that doubles.

    Times are those of one clock, in seconds.

    Args:
        slots: that have a process already.
        cooldown_s: the shortest and the longest time for which a host is left out; None: for good.
        leaves_out: whether hosts are left out at all.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        cooldown_s: tuple[float, float] | None = None,
        leaves_out: bool = False,
    ) -> None:
        self._places = {(s.host, s.local_rank): _Place(s, is_taken=True) for s in slots}
        self._listed: dict[str, int] = {}  # slots of each host
        for slot in slots:
            self._listed[slot.host] = max(self._listed.get(slot.host, 0), slot.local_rank + 1)
        self._records: dict[str, _Record] = {}
        self._cooldown_s, self._leaves_out = cooldown_s, leaves_out

    def update(self, hosts: Sequence[Host]) -> None:
        """Use these hosts from now on. Slots that come get the next numbers."""
        self._listed = {host.name: host.slots for host in hosts}
        for node, host in enumerate(hosts):
            for local_rank in range(host.slots):
                key = host.name, local_rank
                if key in self._places:
                    place = self._places[key]
                    place.slot = replace(place.slot, local_size=host.slots)
                    continue
                number = len(self._places)
                self._places[key] = _Place(
                    Slot(
                        host.name,
                        rank=number,
                        size=number + 1,
                        local_rank=local_rank,
                        local_size=host.slots,
                        cross_rank=node,
                        cross_size=len(hosts),
                        node=node,
                        nodes=len(hosts),
                    )
                )

    def due(self, now: float) -> list[Slot]:
        """Return the slots in which processes may be started now, in the order of their numbers."""
        return [
            place.slot
            for place in self._places.values()
            if self._is_open(place) and self._due_at(place) <= now
        ]

    def next_at(self, now: float) -> float | None:
        """Return when the next slot will be due; None: none will, or one is."""
        times = [self._due_at(place) for place in self._places.values() if self._is_open(place)]
        later = [at for at in times if now < at < math.inf]
        return min(later, default=None)

    def vanished(self) -> list[Slot]:
        """Return the slots that have a process although they are not there any more."""
        return [p.slot for p in self._places.values() if p.is_taken and not self._is_listed(p)]

    def usable_hosts(self, now: float) -> list[str]:
        """Return the hosts that are there and not left out."""
        return [host for host in self._listed if self._record(host).out_until <= now]

    def slots_of(self, host: str) -> int:
        """Return the number of slots of a host."""
        return self._listed.get(host, 0)

    def start(self, slot: Slot) -> None:
        """Note that a slot has got a process."""
        self._place(slot).is_taken = True

    def end(self, slot: Slot, now: float) -> None:
        """Note that a slot's process has ended, for no fault of its host."""
        place = self._place(slot)
        place.is_taken, place.due_at = False, now

    def fail(self, slot: Slot, lived_s: float, now: float) -> str:
        """Note that a slot's process has failed. Returns a line if its host is left out; or ""."""
        place = self._place(slot)
        place.is_taken = False
        place.early_ends = 0 if lived_s >= _STEADY_S else place.early_ends + 1
        delay_s = _FIRST_DELAY_S * 2 ** (place.early_ends - 2) if place.early_ends > 1 else 0.0
        place.due_at = now + min(delay_s, _LONGEST_DELAY_S)
        if place.early_ends > _MOST_EARLY_ENDS:
            place.due_at = math.inf
        record = self._record(slot.host)
        record.young_ends = record.young_ends + 1 if lived_s < _YOUNG_S else 0
        if record.young_ends < _MOST_YOUNG_ENDS:
            return ""
        return self._leave_out(slot.host, now)

    def lose(self, host: str, now: float) -> str:
        """Note that a host was lost, or not reached. Returns a line if it is left out; or ""."""
        if self._leaves_out:
            return self._leave_out(host, now)
        record = self._record(host)
        record.out_until = now + min(_FIRST_REACH_S * 2.0**record.times_out, _LONGEST_DELAY_S)
        record.times_out = min(record.times_out + 1, _MOST_EARLY_ENDS)
        return ""

    def _leave_out(self, host: str, now: float) -> str:
        if not self._leaves_out or host not in self._listed:
            return ""
        record = self._record(host)
        record.young_ends = 0
        if self._cooldown_s is None:
            record.out_until = math.inf
            return f"{host} is left out for good (--blacklist-cooldown-range sets a time)"
        shortest, longest = self._cooldown_s
        seconds = min(shortest * 2.0 ** min(record.times_out, 60), longest)
        record.times_out += 1
        record.out_until = now + seconds
        for place in self._places.values():
            if place.slot.host == host:
                place.early_ends, place.due_at = 0, 0.0
        return f"{host} is left out for {seconds:g} s"

    def _place(self, slot: Slot) -> _Place:
        return self._places[slot.host, slot.local_rank]

    def _record(self, host: str) -> _Record:
        return self._records.setdefault(host, _Record())

    def _is_listed(self, place: _Place) -> bool:
        return place.slot.local_rank < self._listed.get(place.slot.host, 0)

    def _is_open(self, place: _Place) -> bool:
        return self._is_listed(place) and not place.is_taken

    def _due_at(self, place: _Place) -> float:
        return max(place.due_at, self._record(place.slot.host).out_until)
