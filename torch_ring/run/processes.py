# SPDX-License-Identifier: Apache-2.0
"""Processes: the running ranks of a job, and the processes that will become ranks."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_ring.run import standby_process
from torch_ring.run.growth import Growth, standby_command
from torch_ring.run.hosts import RankSlot
from torch_ring.run.job_settings import JobSpec, rank_environment
from torch_ring.run.supervisor import Supervisor

__all__ = ["Processes"]


@dataclass
class _Process:
    """A process that is a rank, or waits to join the others.

    Attributes:
        slot: the place where it runs.
        name: its name in the ranks' reports.
        began_at: the time of its start.
        is_newcomer: whether it was started while the others ran.
        leaves: whether it was asked to leave the job.
    """

    slot: RankSlot
    name: str
    began_at: float
    is_newcomer: bool
    leaves: bool = False


class Processes:
    """Starts processes on hosts that have answered, by the numbers of their slots.

    Args:
        spec: the program and its ranks.
        supervisor: the connections to hosts.
        growth: decides about processes that are started later.
    """

    def __init__(self, spec: JobSpec, supervisor: Supervisor, growth: Growth) -> None:
        self._spec, self._supervisor, self._growth = spec, supervisor, growth
        self._screen = supervisor.screen
        self._running: dict[int, _Process] = {}
        self._starts: dict[int, int] = {}  # number of processes started in each slot
        self._store = "", 0  # the address and the port of rank 0

    # --- the present processes

    @property
    def count(self) -> int:
        """The number of processes that are ranks, or wait to be let in."""
        return len(self._running)

    def living(self) -> list[int]:
        """Return the running ranks, without processes that have not been let in."""
        return [rank for rank, process in self._running.items() if not self._waits(process)]

    def on(self, host: str) -> list[int]:
        """Return the numbers of the processes on a host."""
        return [rank for rank, each in self._running.items() if each.slot.host == host]

    def hosts(self) -> list[str]:
        """Return the hosts that have a process."""
        return list(dict.fromkeys(process.slot.host for process in self._running.values()))

    # --- starts

    def begin(self, store: tuple[str, int]) -> None:
        """Start the ranks with which the job begins; rank 0 serves the store at this address."""
        self._store = store
        for slot in self._spec.slots:
            if self._spec.options.verbose:
                self._screen.say(f"rank {slot.rank} starts on {slot.host}")
            self._start(slot, self._name(slot), is_newcomer=False)
        self._expect()

    def add(self, slot: RankSlot) -> None:
        """Start a rank while the others run, from a standby process if there is one."""
        again = " again" if slot.rank in self._starts else ""
        self._growth.table.start(slot)
        standby = self._growth.standbys.take(slot.host)
        how = "" if standby is None else ", from a standby process"
        self._screen.say(f"rank {slot.rank} starts on {slot.host}{again}{how}")
        name = self._name(slot)
        if standby is None:
            self._start(slot, name, is_newcomer=True)
            return
        self._screen.finish(standby)
        environment = self._environment(slot, name, is_newcomer=True)
        self._supervisor.connections[slot.host].send(
            standby_process.activation(environment),
            do="activate",
            standby=standby,
            rank=slot.rank,
            **self._place(slot),
        )
        self._note(slot, name, is_newcomer=True)

    def add_standbys(self, hosts: Collection[str]) -> None:
        """Start the missing standby processes on some of these hosts."""
        for number, slot in self._growth.standbys_to_start(hosts, time.monotonic()):
            text = Path(standby_process.__file__).read_bytes()
            self._send_start(
                slot,
                number,
                standby_command(self._spec.options.command),
                standby_process.program(text),
            )

    def _start(self, slot: RankSlot, name: str, *, is_newcomer: bool) -> None:
        spec = self._spec
        self._send_start(slot, slot.rank, spec.options.command, spec.given, name, is_newcomer)
        self._note(slot, name, is_newcomer)

    def _send_start(
        self,
        slot: RankSlot,
        number: int,
        command: Collection[str],
        given: bytes,
        name: str = "",
        is_newcomer: bool = False,
    ) -> None:
        self._supervisor.connections[slot.host].send(
            given,
            do="start",
            rank=number,
            command=list(command),
            environment=self._environment(slot, name, is_newcomer),
            folder=self._spec.folder,
            **self._place(slot),
            has_result=self._spec.has_result,
            is_standby=number < 0,
        )

    def _place(self, slot: RankSlot) -> dict[str, Any]:
        """Return the values by which an agent chooses the CPUs of a rank."""
        numbers = {"local_rank": slot.local_rank, "local_size": slot.local_size}
        return {"numa_binding": self._spec.options.numa_binding, **numbers}

    def _environment(self, slot: RankSlot, name: str, is_newcomer: bool) -> dict[str, str]:
        is_local = self._supervisor.connections[slot.host].is_local
        found = rank_environment(slot, self._spec, self._store, is_local, name)
        if is_newcomer:
            found["TORCH_RING_ELASTIC_NEWCOMER"] = "1"
        return found

    def _name(self, slot: RankSlot) -> str:
        self._starts[slot.rank] = self._starts.get(slot.rank, 0) + 1
        return f"{slot.rank}.{self._starts[slot.rank]}" if self._growth.is_elastic else ""

    def _note(self, slot: RankSlot, name: str, is_newcomer: bool) -> None:
        self._running[slot.rank] = _Process(slot, name, time.monotonic(), is_newcomer)

    def _waits(self, process: _Process) -> bool:
        """Return whether a process has not been let in yet."""
        return process.is_newcomer and not self._growth.is_let_in(process.name)

    def _expect(self) -> None:
        """Tell `growth` the living processes that make the job's first world."""
        living = self._running.values()
        self._growth.expect({p.name: p.slot.rank for p in living if not p.is_newcomer})

    # --- ends

    def remove_vanished(self, done: int) -> None:
        """Ask ranks to leave if their hosts are gone from the list.

        Args:
            done: the number of ranks that have finished.
        """
        leaving = []
        for slot in self._growth.leaving(self.living(), done):
            process = self._running[slot.rank]
            if not process.leaves:
                self._screen.say(f"rank {slot.rank} on {slot.host} is asked to leave")
            process.leaves = True
            leaving.append(process.name)
        if leaving:
            self._growth.ask_to_leave(leaving, time.monotonic())

    def finish(self, rank: int) -> RankSlot | None:
        """Note that a process has ended with exit code 0; return its slot if it was a rank."""
        process = self._running.get(rank)
        if process is None:
            return None
        leaves = self.leaves(rank)
        has_finished = not (leaves or self._waits(process))
        self._end(rank, process, "has left" if leaves else "")
        return process.slot if has_finished else None

    def leaves(self, rank: int) -> bool:
        """Return whether a process leaves the job, as the launcher or a signal has asked it to."""
        process = self._running.get(rank)
        if process is None:
            return False
        return process.leaves or self._growth.is_left_by(process.name)

    def _end(self, rank: int, process: _Process, text: str) -> None:
        """Note the end of a process without a failure; report it unless `text` is empty."""
        del self._running[rank]
        self._expect()
        self._screen.finish(rank)
        if text:
            self._screen.say(f"rank {rank} on {process.slot.host} {text}")
        self._growth.table.end(process.slot, time.monotonic())

    def fail(self, rank: int, text: str, *, is_ending: bool) -> RankSlot | None:
        """Note that a process has failed; return its slot if it was a rank.

        Args:
            rank: the number of the process.
            text: the failure in words.
            is_ending: whether the job is being ended.
        """
        self._screen.finish(rank)
        if rank < 0:
            if not is_ending and self._growth.standbys.end(rank):
                self._screen.say(
                    f"a standby process {text}, as those before it: no more are started"
                )
            return None
        process = self._running.get(rank)
        if process is None:
            return None
        if self.leaves(rank) and not is_ending:
            self._end(rank, process, f"{text}, while it was to leave")
            return None
        waited = self._waits(process)
        del self._running[rank]
        self._expect()
        slot, now = process.slot, time.monotonic()
        if waited and not is_ending:
            self._screen.say(f"rank {rank} on {slot.host} {text}, before it was let in")
        if not is_ending:
            self._growth.fail(slot, now - process.began_at, now)
        return None if waited else slot

    def finish_all(self) -> None:
        """Show the unfinished lines of all processes."""
        for rank in self._starts:
            self._screen.finish(rank)
