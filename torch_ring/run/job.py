# SPDX-License-Identifier: Apache-2.0
"""Job: starts ranks together; when one fails, the job ends them all, or the others go on."""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch_ring.errors import InvalidArgumentError, RingError, TimeoutError, first_line
from torch_ring.run.growth import Growth
from torch_ring.run.host_connection import (
    Ended,
    Event,
    Exited,
    Going,
    Lost,
    Note,
    Output,
    Ready,
    Signal,
    Unread,
    Unstartable,
)
from torch_ring.run.hosts import RankSlot
from torch_ring.run.job_settings import JobSpec
from torch_ring.run.processes import Processes
from torch_ring.run.supervisor import Supervisor

__all__ = ["Job", "RankFailure", "exit_code"]

FAILURE_GRACE_S = 10.0  # for the other ranks, from SIGTERM to SIGKILL, when one has failed
_LEFT_GRACE_S = 5.0  # for processes that ended ranks have left behind
_AGENTS_PATIENCE_S = 15.0  # beyond the grace period: agents report the end of their ranks
_READERS_PATIENCE_S = 5.0  # for the readers of our output, when the job was ended
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


@dataclass(frozen=True)
class RankFailure:
    """The first failure of a rank.

    Attributes:
        rank, host: the rank and its host.
        code: its exit code, negative for a signal.
        text: the same in words.
    """

    rank: int
    host: str
    code: int
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.text}"


def exit_code(code: int) -> int:
    """Return an exit code as in a shell: 128 plus the number for a signal."""
    return 128 - code if code < 0 else code


class Job:
    """Starts the ranks of a job, and ends all of them when too many have failed.

    Args:
        spec: the program and its ranks.
        supervisor: the connections to hosts; the caller closes it.
        growth: decides about processes that are started later.

    Attributes:
        failure: the failure that has ended the job; None: no failure has.
        finished: the slots of the ranks that have ended with exit code 0.
        results: the bytes that the ranks have written as their results, by rank.
    """

    def __init__(self, spec: JobSpec, supervisor: Supervisor, growth: Growth) -> None:
        self.failure: RankFailure | None = None
        self.finished: list[RankSlot] = []
        self._is_warned = False
        self.results: defaultdict[int, bytearray] = defaultdict(bytearray)
        self._spec, self._supervisor, self._growth = spec, supervisor, growth
        self._processes = Processes(spec, supervisor, growth)
        self._screen = supervisor.screen
        self._signal = 0  # the signal that has ended the job
        self._code = 0  # not 0: the exit code of a job ended without a rank's failure
        self._end_at: float | None = None  # not None: when remaining ranks are ended
        self._close_at: float | None = None  # not None: when remaining agents are ended
        self._pieces = 0  # pieces on the screen when a rank failed

    @property
    def has_stopped(self) -> bool:
        """Whether the ranks have stopped after SIGUSR1 or SIGUSR2, with exit code 0 or 143.

        Schedulers announce the end of a job's time by these signals.
        """
        is_in_peace = self.failure is None or self.failure.code == 128 + signal.SIGTERM
        return self._is_warned and not self._signal and not self._code and is_in_peace

    def run(self) -> int:
        """Run the job; return its exit code: the first failing rank's, or that of a signal.

        Raises:
            InvalidArgumentError: a host cannot run ranks: it lacks the network interface, or ssh.
            TimeoutError: a host was not reached in time.
            RingError: a host cannot be reached.
        """
        self._connect()
        if self._signal:
            return exit_code(-self._signal)
        self._processes.begin(self._supervisor.store())
        while self._processes.living() and not self._has_given_up():
            self._handle(self._supervisor.events(self._left_s()))
            self._check_time()
            self._grow()
        self._leave()
        if self._signal and (self.failure or self._processes.living()):
            return exit_code(-self._signal)
        if self._growth.is_elastic and not (self.finished or self.failure or self._code):
            self._screen.say("all ranks have left: the job is not done")
            return exit_code(-signal.SIGTERM)
        return self._code or (exit_code(self.failure.code) if self.failure else 0)

    def _connect(self) -> None:
        """Return when all hosts have answered, or a signal has come."""
        spec = self._spec
        for host in dict.fromkeys(slot.host for slot in spec.slots):
            self._supervisor.connect(host)
        while self._supervisor.awaited and not self._signal:
            missing = self._supervisor.overdue()
            if missing:
                raise TimeoutError(
                    f"{', '.join(sorted(missing))} did not answer within {spec.start_timeout_s:g} "
                    "s: is it reachable with ssh, without a password? --start-timeout sets the time"
                )
            for event in self._supervisor.events(self._left_s()):
                if isinstance(event, Ready):
                    self._supervisor.note(event)
                elif isinstance(event, Lost):
                    raise RingError(f"{event.host} cannot run ranks: {event.reason}")
                elif isinstance(event, Going | Ended):
                    raise RingError(f"{event.host} cannot run ranks: its agent got SIGTERM")
                elif isinstance(event, Signal):
                    self._take_signal(event.number)

    # --- ranks

    def _grow(self) -> None:
        """Start and remove the ranks that are due."""
        growth = self._growth
        is_ending = self._signal or self._close_at is not None or not self._processes.living()
        if is_ending or self.finished:
            return  # after some ranks have finished, none would let a newcomer in
        now = time.monotonic()
        growth.note_hosts()
        resets = growth.resets_too_many()
        if resets:
            self._screen.say(
                f"the ranks have changed {resets} times (--reset-limit "
                f"{self._spec.options.reset_limit}): the job is ended"
            )
            self._code = 1
            self._end(FAILURE_GRACE_S)
            return
        for host in self._supervisor.overdue():
            self._lost(Lost(host, f"did not answer within {self._spec.start_timeout_s:g} s"))
        most = self._spec.options.max_num_proc
        for slot in growth.due(now):
            if most is not None and self._processes.count >= most:
                break
            if slot.host in self._supervisor.ready:
                self.results.pop(slot.rank, None)  # the failed process's result
                self._processes.add(slot)
            elif slot.host not in self._supervisor.awaited:
                self._supervisor.connect(slot.host)
        self._processes.add_standbys(self._supervisor.ready)
        self._processes.remove_vanished(len(self.finished))

    def _handle(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Output):
                self.results[event.rank] += event.data
            elif isinstance(event, Exited):
                self._exited(event)
            elif isinstance(event, Unstartable):
                self._fail(event.rank, event.code, event.text)
            elif isinstance(event, Ready):
                self._host_came(event)
            elif isinstance(event, Lost):
                self._lost(event)
            elif isinstance(event, Signal):
                self._take_signal(event.number)
            elif isinstance(event, Unread):
                self._screen.say(f"nobody reads the {event.stream} any more: the job is ended")
                self._take_signal(signal.SIGPIPE)
            elif isinstance(event, Note):
                self._screen.say(f"{event.host}: {event.text}")
            elif isinstance(event, Going):
                self._host_goes(event.host)
            elif isinstance(event, Ended):
                if event.left:
                    self._screen.say(
                        f"{event.host}: {event.left} processes could not be ended: see `ps` there"
                    )
                if not self._is_ending():
                    self._lost(Lost(event.host, "its agent has ended after SIGTERM"))

    def _exited(self, event: Exited) -> None:
        how = f"failed with exit code {event.code}"
        if event.code < 0:
            how = f"was ended by {_signal_name(-event.code)}"
        is_by_sigterm = event.code in (-signal.SIGTERM, exit_code(-signal.SIGTERM))
        has_left = is_by_sigterm and not self._is_ending() and self._processes.leaves(event.rank)
        if (event.code and not has_left) or event.rank < 0:
            self._fail(event.rank, event.code, how)
        else:
            slot = self._processes.finish(event.rank)
            self.finished += [] if slot is None else [slot]

    def _fail(self, rank: int, code: int, text: str) -> None:
        lost = self._processes.fail(rank, text, is_ending=self._is_ending())
        if lost is None or self.failure is not None or self._code:
            return
        failure = RankFailure(rank, lost.host, code, text)
        left = len(self._processes.living()) + len(self.finished)
        least = self._spec.options.least
        if not self._is_ending() and least is not None and left >= least:
            self._screen.say(f"{failure}: the other {left} go{'es' if left == 1 else ''} on")
            return
        self.failure = failure
        if not self._signal:
            others = ": the other ranks are ended" if self._processes.living() else ""
            self._screen.say(f"{self.failure}{others}")
            self._pieces = self._screen.pieces
            self._end(FAILURE_GRACE_S)

    def _is_ending(self) -> bool:
        return bool(self._signal) or self._close_at is not None

    def _host_came(self, event: Ready) -> None:
        try:
            self._supervisor.note(event)
        except InvalidArgumentError as error:
            self._lost(Lost(event.host, first_line(error)))

    def _host_goes(self, host: str) -> None:
        if not self._is_ending():
            self._screen.say(
                f"{host} got SIGTERM: its ranks have {self._spec.grace_s:g} s to leave"
            )
            self._growth.drain(host)

    def _lost(self, event: Lost) -> None:
        was_ready = event.host in self._supervisor.ready
        self._supervisor.lose(event.host)
        if any(map(self._processes.leaves, self._processes.on(event.host))):
            self._growth.drain(event.host)  # ssh ended before the agent could report it
        for rank in self._processes.on(event.host):
            self._fail(rank, 1, f"is lost with its host: {event.reason}")
        if not self._is_ending():
            if not was_ready:
                self._screen.say(f"{event.host} cannot run ranks: {event.reason}")
            self._growth.lose(event.host, time.monotonic())

    # --- the end

    def _take_signal(self, number: int) -> None:
        """Pass a signal on; a second ending signal ends the job at once."""
        if signal.Signals(number).name not in (*_ENDING, "SIGPIPE"):
            self._is_warned = True
            self._pass_on(number)
        elif self._signal or self._close_at is not None:
            self._end(0.0)
        else:
            self._signal = number
            if number == signal.SIGPIPE:
                self._end(FAILURE_GRACE_S)
                return
            if self._processes.living():
                self._screen.say(
                    f"{_signal_name(number)} is passed on to the ranks, which have "
                    f"{self._spec.grace_s:g} s; a second one ends them at once"
                )
            self._screen.is_dropping = True
            self._pass_on(number)
            self._end_at = time.monotonic() + self._spec.grace_s

    def _pass_on(self, number: int) -> None:
        for connection in self._supervisor.connections.values():
            connection.send(do="signal", signal=number)

    def _end(self, grace_s: float) -> None:
        self._screen.is_dropping = True
        for connection in self._supervisor.connections.values():
            connection.send(do="end", grace_s=grace_s)
        self._end_at = None
        self._close_at = time.monotonic() + grace_s + _AGENTS_PATIENCE_S

    def _left_s(self) -> float:
        now = time.monotonic()
        overdue_at = self._supervisor.next_at()
        if overdue_at is not None and overdue_at <= now:
            overdue_at = None  # those hosts no longer matter
        times = (self._end_at, self._close_at, overdue_at, self._growth.next_at(now))
        ends = [each for each in times if each is not None]
        return max(0.0, min(ends) - now) if ends else 3600.0

    def _check_time(self) -> None:
        if self._end_at is not None and time.monotonic() >= self._end_at:
            self._end(FAILURE_GRACE_S)

    def _has_given_up(self) -> bool:
        if self._close_at is None or time.monotonic() < self._close_at:
            return False
        hosts = ", ".join(self._processes.hosts())
        self._screen.say(f"{hosts}: cannot tell whether all ranks have ended: see `ps` there")
        return True

    def _leave(self) -> None:
        """End the processes that ranks have left behind, and show the rest of the output."""
        if self._close_at is None:
            for connection in self._supervisor.connections.values():
                connection.send(do="end", grace_s=_LEFT_GRACE_S)
            self._close_at = time.monotonic() + _LEFT_GRACE_S + _AGENTS_PATIENCE_S
        connections = self._supervisor.connections.values()
        while any(c.is_open and not c.has_ended for c in connections):
            if time.monotonic() >= self._close_at:
                break
            self._handle(self._supervisor.events(self._left_s()))
        self._processes.finish_all()
        if self.failure is not None and not self._signal and self._screen.pieces > self._pieces:
            self._screen.say(f"the first failure: {self.failure}")  # after its consequences
        was_ended = self._signal or self.failure
        self._supervisor.drain(_READERS_PATIENCE_S if was_ended else float("inf"))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
