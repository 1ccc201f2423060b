"""Job: ranks that start together; when one has failed, all end, or the others go on."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_ring.errors import InvalidArgumentError, RingError, TimeoutError
from torch_ring.rendezvous.network import is_loopback, is_loopback_name, own_address
from torch_ring.run.assignment import Slot
from torch_ring.run.events import (
    Ended,
    Event,
    Exited,
    Lost,
    Note,
    Output,
    Ready,
    Signal,
    Unread,
    Unstartable,
)
from torch_ring.run.host_connection import HostConnection, Ssh
from torch_ring.run.hosts import is_this_host
from torch_ring.run.rank_environment import JobFacts, rank_environment
from torch_ring.run.replacements import Replacements
from torch_ring.run.supervisor import Supervisor

__all__ = ["Failure", "Job", "JobSpec", "exit_code"]

FAILURE_GRACE_S = 10.0  # for the other ranks, from SIGTERM to SIGKILL, when one has failed
SIGNAL_GRACE_S = 30.0  # for ranks that have got the launcher's signal, until SIGTERM
_LEFT_GRACE_S = 5.0  # for what ranks that have ended have left
_AGENTS_PATIENCE_S = 15.0  # more than the grace: agents say when they have ended their ranks
_READERS_PATIENCE_S = 5.0  # for the readers of our output, when the job was ended
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class JobSpec:
    """What a job runs.

    Attributes:
        slots: of all ranks, by rank.
        command: of each rank.
        environment: of the launcher, without the variables of launchers.
        folder: in which the ranks start.
        secret: by which the ranks know one another.
        interface, variables, unset: as in `JobFacts`.
        start_timeout_s: for all hosts to be reached.
        least: the fewest ranks that go on when others have failed; None: none may fail.
        replaces: whether ranks that have failed are started again, if the others go on.
        given: what each rank reads from standard input.
        has_result: whether a rank gets the number of a descriptor, as its last argument, to which
            it writes its result.
        is_verbose: whether more is said.
    """

    slots: Sequence[Slot]
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    secret: str = field(repr=False)
    interface: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()
    start_timeout_s: float = 30.0
    least: int | None = None
    replaces: bool = False
    given: bytes = field(default=b"", repr=False)
    has_result: bool = False
    is_verbose: bool = False


@dataclass(frozen=True)
class Failure:
    """How the first rank has failed.

    Attributes:
        rank, host: which one.
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
    """Return an exit code as shells count: 128 and the number of a signal."""
    return 128 - code if code < 0 else code


class Job:
    """Starts the ranks of a job, and ends all of them when too many have failed.

    Args:
        spec: what to run.
        supervisor: through which hosts are reached; the caller closes it.
        ssh: how other hosts are reached.

    Attributes:
        failure: how the rank has failed that has ended the job; None: it was not ended so.
        results: what the ranks have written as their results.
    """

    def __init__(self, spec: JobSpec, supervisor: Supervisor, ssh: Ssh) -> None:
        self.failure: Failure | None = None
        self.results = [bytearray() for _ in spec.slots]
        self._spec, self._supervisor, self._ssh = spec, supervisor, ssh
        self._screen = supervisor.screen
        self._running: dict[int, Slot] = {}
        self._began_at: dict[int, float] = {}
        self._replacements = Replacements()
        self._signal = 0  # that has ended the job
        self._end_at: float | None = None  # not None: ranks that live then are ended
        self._close_at: float | None = None  # not None: agents that live then are ended
        self._done = 0  # ranks whose exit code is 0
        self._pieces = 0  # on the screen when a rank failed

    def run(self) -> int:
        """Run the job; return its exit code: the first failing rank's, or that of a signal.

        Raises:
            InvalidArgumentError: a host cannot run ranks: it lacks the network interface, or ssh.
            TimeoutError: a host was not reached in time.
            RingError: a host cannot be reached.
        """
        ready = self._connect()
        if self._signal:
            return exit_code(-self._signal)
        facts = self._facts(ready)
        for slot in self._spec.slots:
            self._start(slot, facts)
        while self._running and not self._has_given_up():
            self._handle(self._supervisor.events(self._left_s()))
            self._check_time()
            self._replace(facts)
        self._leave()
        if self._signal and (self.failure or self._done < len(self._spec.slots)):
            return exit_code(-self._signal)
        return exit_code(self.failure.code) if self.failure else 0

    # --- hosts

    def _connect(self) -> dict[str, Ready]:
        """Return what all hosts say when they are reached."""
        spec = self._spec
        # An agent's own variables are those of its ranks, too.
        environment = {n: text for n, text in spec.environment.items() if n not in spec.unset}
        for host in dict.fromkeys(slot.host for slot in spec.slots):
            ssh = None if is_this_host(host) else self._ssh
            connection = HostConnection(host, ssh, environment, spec.interface.partition(",")[0])
            self._supervisor.add(connection)
            if spec.is_verbose and ssh is not None:
                self._screen.say(f"{host} is reached by: {connection.command}")
        ready: dict[str, Ready] = {}
        deadline = time.monotonic() + spec.start_timeout_s
        missing = set(self._supervisor.connections)
        while missing and not self._signal:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    f"{', '.join(sorted(missing))} did not answer within {spec.start_timeout_s:g} "
                    "s: is it reachable with ssh, without a password? --start-timeout sets the time"
                )
            for event in self._supervisor.events(left_s):
                if isinstance(event, Ready):
                    if event.problem:
                        raise InvalidArgumentError(f"{event.host}: {event.problem}")
                    ready[event.host] = event
                    missing.discard(event.host)
                elif isinstance(event, Lost):
                    raise RingError(f"{event.host} cannot run ranks: {event.reason}")
                elif isinstance(event, Signal):
                    self._take_signal(event.number)
        return ready

    def _facts(self, ready: Mapping[str, Ready]) -> JobFacts:
        spec = self._spec
        first = ready[spec.slots[0].host]
        facts = JobFacts(
            run_id=secrets.token_hex(8),
            secret=spec.secret,
            address=self._address(first, [ready[slot.host] for slot in spec.slots]),
            port=first.port,
            interface=spec.interface,
            variables=spec.variables,
            unset=spec.unset,
        )
        if spec.is_verbose:
            self._screen.say(f"rank 0 serves at {facts.address}, port {facts.port}")
        return facts

    def _address(self, first: Ready, hosts: Sequence[Ready]) -> str:
        """Return an address of rank 0's host that the other hosts reach."""
        if all(host.host == first.host for host in hosts):
            return "127.0.0.1"
        if first.interface_address:
            return first.interface_address
        if not self._supervisor.connections[first.host].is_local:
            # ssh may know the host by a name that nobody else resolves.
            is_usable = first.server and not is_loopback(first.server)
            return first.server if is_usable else first.host.rpartition("@")[2]
        if not is_loopback_name(first.host) and first.host.replace(".", "").isdecimal():
            return first.host  # an address, which the user has chosen
        other = next(host for host in hosts if host.host != first.host)
        return own_address("", other.server or other.host)

    # --- ranks

    def _start(self, slot: Slot, facts: JobFacts, *, is_newcomer: bool = False) -> None:
        spec = self._spec
        connection = self._supervisor.connections[slot.host]
        if spec.is_verbose or is_newcomer:
            self._screen.say(f"rank {slot.rank} starts on {slot.host}{' again' * is_newcomer}")
        environment = rank_environment(slot, facts, spec.environment, connection.is_local)
        if is_newcomer:
            environment["TORCH_RING_ELASTIC_NEWCOMER"] = "1"
        connection.send(
            spec.given,
            do="start",
            rank=slot.rank,
            command=list(spec.command),
            environment=environment,
            folder=spec.folder,
            local_size=slot.local_size,
            has_result=spec.has_result,
        )
        self._running[slot.rank] = slot
        self._began_at[slot.rank] = time.monotonic()

    def _replace(self, facts: JobFacts) -> None:
        """Start ranks again that have failed, where it is time."""
        if self._signal or self._close_at is not None or not self._running or self._done:
            return  # where ranks have finished, nobody would let one in
        for slot in self._replacements.take(time.monotonic()):
            if self._supervisor.connections[slot.host].is_open:
                self._start(slot, facts, is_newcomer=True)

    def _handle(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Output):
                self.results[event.rank] += event.data
            elif isinstance(event, Exited):
                self._exited(event)
            elif isinstance(event, Unstartable):
                self._fail(event.rank, event.code, event.text)
            elif isinstance(event, Lost):
                self._lost(event)
            elif isinstance(event, Signal):
                self._take_signal(event.number)
            elif isinstance(event, Unread):
                self._take_signal(signal.SIGPIPE)
            elif isinstance(event, Note):
                self._screen.say(f"{event.host}: {event.text}")
            elif isinstance(event, Ended) and event.left:
                self._screen.say(f"{event.host}: {event.left} processes could not be ended")

    def _exited(self, event: Exited) -> None:
        if event.rank not in self._running:
            return
        if event.code:
            how = f"failed with exit code {event.code}"
            if event.code < 0:
                how = f"was ended by {_signal_name(-event.code)}"
            self._fail(event.rank, event.code, how)
            return
        del self._running[event.rank]
        self._done += 1
        self._screen.finish(event.rank)

    def _fail(self, rank: int, code: int, text: str) -> None:
        slot = self._running.pop(rank, None)
        if slot is None:
            return
        self._screen.finish(rank)
        if self.failure is not None:
            return
        failure = Failure(rank, slot.host, code, text)
        if self._goes_on():
            self._screen.say(f"{failure}: the other {len(self._running) + self._done} go on")
            if self._spec.replaces:
                now = time.monotonic()
                self._replacements.add(slot, now - self._began_at[rank], now)
            return
        self.failure = failure
        if not self._signal:
            others = ": the other ranks are ended" if self._running else ""
            self._screen.say(f"{self.failure}{others}")
            self._pieces = self._screen.pieces
            self._end(FAILURE_GRACE_S)

    def _goes_on(self) -> bool:
        """Return whether enough ranks are left, and nobody has asked for the job's end."""
        least = self._spec.least
        is_wanted = not self._signal and self._close_at is None
        return is_wanted and least is not None and len(self._running) + self._done >= least

    def _lost(self, event: Lost) -> None:
        for slot in list(self._running.values()):
            if slot.host == event.host:
                self._fail(slot.rank, 1, f"is lost with its host: {event.reason}")

    # --- the end

    def _take_signal(self, number: int) -> None:
        """Pass a signal on; a second one that ends the job ends it at once."""
        if number not in (*_ENDING, signal.SIGPIPE):
            self._pass_on(number)
        elif self._signal or self._close_at is not None:
            self._end(0.0)
        else:
            self._signal = number
            if number == signal.SIGPIPE:
                self._end(FAILURE_GRACE_S)
                return
            if self._running:
                self._screen.say(
                    f"{_signal_name(number)} is passed on to the ranks, which have "
                    f"{SIGNAL_GRACE_S:g} s; a second one ends them at once"
                )
            self._screen.is_dropping = True
            self._pass_on(number)
            self._end_at = time.monotonic() + SIGNAL_GRACE_S

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
        times = (self._end_at, self._close_at, self._replacements.next_at)
        ends = [each for each in times if each is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else 3600.0

    def _check_time(self) -> None:
        if self._end_at is not None and time.monotonic() >= self._end_at:
            self._end(FAILURE_GRACE_S)

    def _has_given_up(self) -> bool:
        if self._close_at is None or time.monotonic() < self._close_at:
            return False
        hosts = ", ".join(dict.fromkeys(slot.host for slot in self._running.values()))
        self._screen.say(f"{hosts}: cannot tell whether all ranks have ended")
        return True

    def _leave(self) -> None:
        """End what the ranks have left, and show the rest of their output."""
        if self._close_at is None:
            for connection in self._supervisor.connections.values():
                connection.send(do="end", grace_s=_LEFT_GRACE_S)
            self._close_at = time.monotonic() + _LEFT_GRACE_S + _AGENTS_PATIENCE_S
        connections = self._supervisor.connections.values()
        while any(c.is_open and not c.has_ended for c in connections):
            if time.monotonic() >= self._close_at:
                break
            self._handle(self._supervisor.events(self._left_s()))
        for slot in self._spec.slots:
            self._screen.finish(slot.rank)
        if self.failure is not None and not self._signal and self._screen.pieces > self._pieces:
            self._screen.say(f"the first failure: {self.failure}")  # above are its consequences
        was_ended = self._signal or self.failure
        self._supervisor.drain(_READERS_PATIENCE_S if was_ended else float("inf"))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
