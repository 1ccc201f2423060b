"""Growth: which processes an elastic job starts while it runs, and which are to leave it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from torch_ring.rendezvous.directory import Directory
from torch_ring.run.assignment import Slot
from torch_ring.run.discovery import Discovery
from torch_ring.run.growth_settings import GrowthSettings
from torch_ring.run.host_table import HostTable
from torch_ring.run.hosts import Host
from torch_ring.run.standbys import Standbys

__all__ = ["Growth"]

_LOOK_S = 0.25  # between looks at what the script and the ranks have said
_ASK_AGAIN_S = 5.0  # ranks to leave, of whom none has answered, or rank 0 has died meanwhile


class Growth:
    """Hosts, free slots and standby processes of a job.

    Thread: one. Blocking: no.

    Args:
        settings: of the user.
        slots: of the ranks with which the job begins.
        directory: to which the ranks tell who they are; None: to nobody.
        discovery: knows which hosts there are; None: they stay the same.
        say: shows the user a line.
    """

    def __init__(
        self,
        settings: GrowthSettings,
        slots: Sequence[Slot],
        directory: Directory | None,
        discovery: Discovery | None,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._directory, self._discovery = settings, directory, discovery
        self._say = say
        is_script = settings.script is not None
        leaves_out = is_script or settings.cooldown_s is not None
        self._table = HostTable(slots, settings.cooldown_s, leaves_out)
        self._standbys = Standbys(settings.standbys)
        self._hosts: Sequence[Host] = ()
        self._problem = ""
        self._stay = ""  # what was said last of ranks that cannot leave
        self._asking: threading.Thread | None = None
        self._ask_at = 0.0

    def is_let_in(self, process: str) -> bool:
        """Return whether the other ranks have let a process in, by its name."""
        return self._directory is not None and self._directory.has_had(process)

    def expect(self, processes: Mapping[str, int]) -> None:
        """Let the processes that live, by name with their ranks, make the job's first world."""
        if self._directory is not None:
            self._directory.expect(processes)

    def next_at(self, now: float) -> float | None:
        """Return when there may be something to do; None: at the next event."""
        if self._discovery is not None or self._settings.reset_limit is not None:
            return now + _LOOK_S
        return self._table.next_at(now)

    def resets_too_many(self) -> int:
        """Return how often the ranks have changed, if that is too often; or 0."""
        if self._directory is None or self._settings.reset_limit is None:
            return 0
        resets = self._directory.resets
        return resets if resets > self._settings.reset_limit else 0

    # --- hosts

    def note_hosts(self) -> None:
        """Take the script's last answer."""
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
        self._table.update(hosts)

    def lose(self, host: str, now: float) -> None:
        """Note that a host was lost, or not reached."""
        self._standbys.lose(host)
        self._say_if(self._table.lose(host, now))

    # --- ranks

    def due(self, now: float, running: int) -> list[Slot]:
        """Return the slots in which ranks may be started now; more than there may be ranks.

        Args:
            now: the time.
            running: the number of processes that are ranks, or are to be.
        """
        most = self._settings.most
        if not self._settings.grows or (most is not None and running >= most):
            return []
        return self._table.due(now)

    def has_room(self, running: int) -> bool:
        """Return whether one more process may run."""
        return self._settings.most is None or running < self._settings.most

    def start(self, slot: Slot) -> int | None:
        """Note that a slot gets a process; return the number of a standby process for it."""
        self._table.start(slot)
        return self._standbys.take(slot.host)

    def end(self, slot: Slot, now: float) -> None:
        """Note that a slot's process has ended, for no fault of its host."""
        self._table.end(slot, now)

    def fail(self, slot: Slot, lived_s: float, now: float) -> None:
        """Note that a slot's process has failed."""
        self._say_if(self._table.fail(slot, lived_s, now))

    # --- standby processes

    def standbys_to_start(self, hosts: Collection[str], now: float) -> list[tuple[int, Slot]]:
        """Return the numbers of standby processes to start now, and slots on their hosts.

        Args:
            hosts: on which processes can be started.
            now: the time.
        """
        usable = [host for host in self._table.usable_hosts(now) if host in hosts]
        wanted = self._standbys.wanted(usable)
        return [(number, _any_slot(host, self._table.slots_of(host))) for number, host in wanted]

    def end_standby(self, number: int, text: str) -> None:
        """Note that a standby process has ended while it waited."""
        if self._standbys.end(number):
            self._say(f"a standby process {text}, as those before it: no more are started")

    # --- ranks that leave

    def leaving(self, living: Collection[int], done: int) -> list[Slot]:
        """Return the slots whose ranks are to leave, because their hosts are not there any more.

        Args:
            living: the ranks that live.
            done: the number of those that have finished.
        """
        slots = [slot for slot in self._table.vanished() if slot.rank in living]
        least = max(1, self._settings.least or 1)
        ranks = ", ".join(str(slot.rank) for slot in slots)
        if not slots or len(living) - len(slots) + done >= least:
            self._stay = ""
            return slots
        if ranks != self._stay:
            self._stay = ranks
            self._say(f"rank {ranks} would leave, but --min-np is {least}: they stay meanwhile")
        return []

    def ask_to_leave(self, processes: Collection[str], now: float) -> None:
        """Ask ranks to leave, by the names of their processes. Again, if they are asked again."""
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


def _any_slot(host: str, slots: int) -> Slot:
    first = Slot(host, 0, 1, 0, 1, 0, 1, 0, 1)
    return replace(first, local_size=max(1, slots))
