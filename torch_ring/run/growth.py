# SPDX-License-Identifier: Apache-2.0
"""Growth: decides which processes an elastic job starts while it runs, and which must leave."""

from __future__ import annotations

import math
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch_ring.errors import InvalidArgumentError
from torch_ring.membership.directory import Directory
from torch_ring.run.hosts import Discovery, HostSlots, RankSlot
from torch_ring.run.options import Options
from torch_ring.run.standby_process import READ_PROGRAM

__all__ = ["Growth", "HostTable", "Standbys", "standby_command"]

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 60.0
_STEADY_S = 1200.0  # if a rank has lived so long, its start was no failure
_MOST_EARLY_ENDS = 10  # early failures after which a slot stays empty
_FIRST_REACH_S = 1.0  # delay before a lost host is tried again, if no host is ever left out
_YOUNG_S = 60.0  # a failure so soon after a rank's start counts against its host
_MOST_YOUNG_ENDS = 3  # consecutive such failures after which a host is left out


@dataclass
class _Place:
    """A slot, and the history of its processes."""

    slot: RankSlot
    is_taken: bool = False
    early_ends: int = 0
    due_at: float = 0.0


@dataclass
class _Failures:
    """The failures of a host."""

    young_ends: int = 0  # consecutive failures soon after the start
    times_out: int = 0
    out_until: float = 0.0


class HostTable:
    """Slots of hosts by number. The number of a slot is the rank of its first process.

    A process that fails is started again at once. If it fails soon after its start, the delay grows
    each time, and after ten times the slot is given up. A host on which three consecutive processes
    fail within a minute is left out: for good, or for a time that doubles.

    All times are in seconds of the same clock.

    Args:
        slots: the slots that have a process already.
        cooldown_s: the shortest and the longest time for which a host is left out; None: for good.
        leaves_out: whether hosts are left out at all.
    """

    def __init__(
        self,
        slots: Sequence[RankSlot],
        cooldown_s: tuple[float, float] | None = None,
        leaves_out: bool = False,
    ) -> None:
        self._places = {(s.host, s.local_rank): _Place(s, is_taken=True) for s in slots}
        self._listed: dict[str, int] = {}  # slots of each host
        for slot in slots:
            self._listed[slot.host] = max(self._listed.get(slot.host, 0), slot.local_rank + 1)
        self._going: set[str] = set()
        self._records: dict[str, _Failures] = {}
        self._cooldown_s, self._leaves_out = cooldown_s, leaves_out

    def update(self, hosts: Sequence[HostSlots]) -> None:
        """Use these hosts from now on. New slots get the next numbers."""
        self._listed = {host.name: host.slots for host in hosts}
        self._going &= self._listed.keys()
        for node, host in enumerate(hosts):
            for local_rank in range(host.slots):
                key = host.name, local_rank
                if key in self._places:
                    place = self._places[key]
                    place.slot = replace(place.slot, local_size=host.slots)
                    continue
                number = len(self._places)
                self._places[key] = _Place(
                    RankSlot(
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

    def due(self, now: float) -> list[RankSlot]:
        """Return the slots in which processes may be started now, in the order of their numbers."""
        return [
            place.slot
            for place in self._places.values()
            if self._is_open(place) and self._due_at(place) <= now
        ]

    def next_at(self, now: float) -> float | None:
        """Return the time when the next slot will be due; None: none will be, or one is now."""
        times = [self._due_at(place) for place in self._places.values() if self._is_open(place)]
        later = [at for at in times if now < at < math.inf]
        return min(later, default=None)

    def vanished(self) -> list[RankSlot]:
        """Return the slots that have a process but no longer exist."""
        return [p.slot for p in self._places.values() if p.is_taken and not self._is_listed(p)]

    def usable_hosts(self, now: float) -> list[str]:
        """Return the hosts that are listed and not left out."""
        usable = [host for host in self._listed if host not in self._going]
        return [host for host in usable if self._record(host).out_until <= now]

    def slots_of(self, host: str) -> int:
        """Return the number of slots of a host."""
        return self._listed.get(host, 0)

    def start(self, slot: RankSlot) -> None:
        """Note that a process was started in a slot."""
        self._place(slot).is_taken = True

    def end(self, slot: RankSlot, now: float) -> None:
        """Note that a slot's process has ended, not by a fault of its host."""
        place = self._place(slot)
        place.is_taken, place.due_at = False, now

    def fail(self, slot: RankSlot, lived_s: float, now: float) -> str:
        """Note that a slot's process has failed; return a line if its host is left out, or ""."""
        place = self._place(slot)
        place.is_taken = False
        if slot.host in self._going:
            return ""
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

    def drain(self, host: str) -> None:
        """Note that a host is about to go: until it is lost, no process is started there."""
        self._going.add(host)

    def lose(self, host: str, now: float) -> str:
        """Note that a host was lost, or not reached; return a line if it is left out, or ""."""
        record = self._record(host)
        if host in self._going:  # as announced; it may still answer while it shuts down
            self._going.remove(host)
            record.out_until = now + _LONGEST_DELAY_S
            return ""
        if self._leaves_out:
            return self._leave_out(host, now)
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

    def _place(self, slot: RankSlot) -> _Place:
        return self._places[slot.host, slot.local_rank]

    def _record(self, host: str) -> _Failures:
        return self._records.setdefault(host, _Failures())

    def _is_listed(self, place: _Place) -> bool:
        return place.slot.local_rank < self._listed.get(place.slot.host, 0)

    def _is_open(self, place: _Place) -> bool:
        is_free = not place.is_taken and place.slot.host not in self._going
        return is_free and self._is_listed(place)

    def _due_at(self, place: _Place) -> float:
        return max(place.due_at, self._record(place.slot.host).out_until)


_PYTHON = re.compile(r"python[\d.]*|pypy[\d.]*")
_FLAGS = re.compile(r"-[bBdEhiIOPqsSuvx]+")  # python's options without a value
_VALUED = re.compile(r"-[WX](.*)")
_FIRST = -2  # the first standby's number: numbers below 0 are no ranks, and -1 is the launcher
_MOST_FAILURES = 3  # consecutive failures of standby processes


def standby_command(command: Sequence[str]) -> list[str]:
    """Return the command of a standby process, which waits and then runs `command`.

    Raises:
        InvalidArgumentError: the command does not begin with python and its program, or starts
            another Python.
    """
    if _PYTHON.fullmatch(os.path.basename(command[0])) is None:
        raise InvalidArgumentError(
            f"--standby needs a command that begins with python, and not with {command[0]!r}"
        )
    index = 1
    while index < len(command):
        valued = _VALUED.fullmatch(command[index])
        if valued is None and _FLAGS.fullmatch(command[index]) is None:
            break
        index += 2 if valued is not None and not valued[1] else 1
    program = list(command[index:])
    if not program or (program[0].startswith("-") and program[0] not in ("-m", "-c")):
        raise InvalidArgumentError(
            "--standby needs a command such as `python train.py` or `python -m train`"
        )
    if program[:2] == ["-m", "torch_ring.horovod"]:  # starts a new Python, without torch
        raise InvalidArgumentError(
            "--standby needs TORCH_RING_AS_HOROVOD=1 in place of `-m torch_ring.horovod`"
        )
    return [*command[:index], "-c", READ_PROGRAM, *program]


class Standbys:
    """The standby processes of a job, spread evenly over its hosts.

    Args:
        count: the number of standby processes to keep.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._host_of: dict[int, str] = {}
        self._next = _FIRST
        self._failures = 0  # consecutive failures

    def wanted(self, hosts: Sequence[str]) -> list[tuple[int, str]]:
        """Return the numbers and hosts of the standbys to start now, and count them as started."""
        found = []
        while hosts and len(self._host_of) < self._count and not self.has_given_up:
            counts = Counter(self._host_of.values())
            host = min(hosts, key=lambda each: counts[each])
            found.append((self._next, host))
            self._host_of[self._next] = host
            self._next -= 1
        return found

    def take(self, host: str) -> int | None:
        """Remove a standby on a host, and return its number; None: there is none."""
        for number, its_host in self._host_of.items():
            if its_host == host:
                del self._host_of[number]
                self._failures = 0
                return number
        return None

    def end(self, number: int) -> bool:
        """Note that a waiting standby has ended; return whether this makes the job give up."""
        if self._host_of.pop(number, None) is None:
            return False
        self._failures += 1
        return self._failures == _MOST_FAILURES

    def lose(self, host: str) -> None:
        """Note that a host was lost."""
        for number in [n for n, its_host in self._host_of.items() if its_host == host]:
            del self._host_of[number]

    @property
    def has_given_up(self) -> bool:
        """Whether consecutive failures have ended the starts of standby processes."""
        return self._failures >= _MOST_FAILURES


_LOOK_S = 0.25  # between checks for answers of the script and the ranks
_ASK_AGAIN_S = 5.0  # before asking ranks again to leave: no rank answered, or rank 0 has died


class Growth:
    """Hosts, free slots and standby processes of a job.

    Thread: one. Blocking: no.

    Args:
        options: the user's options.
        slots: the slots of the ranks with which the job begins.
        directory: the directory to which the ranks report; None: the job is not elastic.
        discovery: has the available hosts; None: they stay the same.
        say: shows the user a line.

    Attributes:
        table: the slots of hosts.
        standbys: the standby processes.
    """

    def __init__(
        self,
        options: Options,
        slots: Sequence[RankSlot],
        directory: Directory | None,
        discovery: Discovery | None,
        say: Callable[[str], None],
    ) -> None:
        self._options, self._directory, self._discovery = options, directory, discovery
        self._say = say
        leaves_out = discovery is not None or options.cooldown_range is not None
        self.table = HostTable(slots, options.cooldown_range, leaves_out)
        self.standbys = Standbys(options.standby)
        self._hosts: Sequence[HostSlots] = ()
        self._problem = ""
        self._stay = ""  # the last line about ranks that cannot leave
        self._asking: threading.Thread | None = None
        self._ask_at = 0.0

    @property
    def is_elastic(self) -> bool:
        """Whether the job survives failures of ranks."""
        return self._directory is not None

    def is_left_by(self, process: str) -> bool:
        """Return whether the named process has said that it leaves of its own accord."""
        return self._directory is not None and self._directory.is_left_by(process)

    def is_let_in(self, process: str) -> bool:
        """Return whether the other ranks have let the named process in."""
        return self._directory is not None and self._directory.has_had(process)

    def expect(self, processes: Mapping[str, int]) -> None:
        """Set the living processes, with their ranks by name, for the job's first world."""
        if self._directory is not None:
            self._directory.expect(processes)

    def next_at(self, now: float) -> float | None:
        """Return the time of the next possible action; None: at the next event."""
        if self._discovery is not None or self._options.reset_limit is not None:
            return now + _LOOK_S
        return self.table.next_at(now)

    def resets_too_many(self) -> int:
        """Return the number of changes of the ranks if it exceeds the limit, else 0."""
        if self._directory is None or self._options.reset_limit is None:
            return 0
        resets = self._directory.resets
        return resets if resets > self._options.reset_limit else 0

    # --- hosts

    def note_hosts(self) -> None:
        """Use the script's last answer."""
        if self._discovery is None:
            return
        problem, hosts = self._discovery.problem, self._discovery.hosts
        if problem and problem != self._problem:
            self._say(f"{problem}; the hosts of its last answer stay")
        self._problem = problem
        if hosts == self._hosts:
            return
        if self._hosts:
            before, now = ({h.name: h.slots for h in each} for each in (self._hosts, hosts))
            for name in sorted(before.keys() | now.keys()):
                if before.get(name) != now.get(name):
                    slots = f"has {now[name]} slots now" if name in now else "is not there any more"
                    self._say(f"--host-discovery-script: {name} {slots}")
        self._hosts = hosts
        self.table.update(hosts)

    def drain(self, host: str) -> None:
        """Note that a host is about to go."""
        self.standbys.lose(host)
        self.table.drain(host)

    def lose(self, host: str, now: float) -> None:
        """Note that a host was lost, or not reached."""
        self.standbys.lose(host)
        self._say_if(self.table.lose(host, now))

    def fail(self, slot: RankSlot, lived_s: float, now: float) -> None:
        """Note that a slot's process has failed."""
        self._say_if(self.table.fail(slot, lived_s, now))

    def due(self, now: float) -> list[RankSlot]:
        """Return the slots in which ranks may be started now, perhaps more than there may be."""
        return self.table.due(now) if self._options.grows else []

    def standbys_to_start(self, hosts: Collection[str], now: float) -> list[tuple[int, RankSlot]]:
        """Return the numbers of standby processes to start now, and slots on their hosts.

        Args:
            hosts: the hosts on which processes can be started.
            now: the time.
        """
        usable = [host for host in self.table.usable_hosts(now) if host in hosts]
        wanted = self.standbys.wanted(usable)
        return [(number, _any_slot(host, self.table.slots_of(host))) for number, host in wanted]

    # --- ranks that leave

    def leaving(self, living: Collection[int], done: int) -> list[RankSlot]:
        """Return the slots whose ranks must leave, because their hosts are gone from the list.

        Args:
            living: the living ranks.
            done: the number of those that have finished.
        """
        slots = [slot for slot in self.table.vanished() if slot.rank in living]
        least = max(1, self._options.least or 1)
        ranks = ", ".join(str(slot.rank) for slot in slots)
        if not slots or len(living) - len(slots) + done >= least:
            self._stay = ""
            return slots
        if ranks != self._stay:
            self._stay = ranks
            self._say(f"rank {ranks} would leave, but --min-np is {least}: they stay meanwhile")
        return []

    def ask_to_leave(self, processes: Collection[str], now: float) -> None:
        """Ask ranks to leave, by the names of their processes. May be repeated."""
        is_asking = self._asking is not None and self._asking.is_alive()
        if self._directory is None or is_asking or now < self._ask_at:
            return
        self._ask_at = now + _ASK_AGAIN_S
        self._asking = threading.Thread(
            target=self._directory.ask_to_leave, args=(set(processes),), daemon=True
        )
        self._asking.start()

    def _say_if(self, line: str) -> None:
        if line:
            self._say(line)


def _any_slot(host: str, slots: int) -> RankSlot:
    first = RankSlot(host, 0, 1, 0, 1, 0, 1, 0, 1)
    return replace(first, local_size=max(1, slots))
