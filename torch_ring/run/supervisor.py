# SPDX-License-Identifier: Apache-2.0
"""Supervisor: the loop that waits for events of hosts, ranks and the system."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence

from torch_ring.errors import InvalidArgumentError
from torch_ring.run.host_connection import Event, HostConnection, Output, Ready, Signal, Unread
from torch_ring.run.job_settings import JobSpec
from torch_ring.run.screen import Screen
from torch_ring.setup.network import is_loopback, is_loopback_name, own_address

__all__ = ["Supervisor"]

_BEAT_S = 5.0  # longest interval between signs of life to the hosts


class Supervisor:
    """Waits for events, and meanwhile moves bytes: requests to hosts, the ranks' output to readers.

    It connects to hosts, and knows which of them have answered. It makes no decisions; the caller
    of `events` does.

    Thread: one. Blocking: only `events` and `drain`. A slow stream does not hold up the others.

    Args:
        spec: the job.
        screen: the destination of the ranks' output.
        signals: a descriptor from which the numbers of signals can be read; -1: there is none.

    Attributes:
        connections: the connections to hosts, by name.
        ready: the answers of the hosts on which ranks can be started.
        awaited: the deadlines of the hosts that have not answered yet.
    """

    def __init__(self, spec: JobSpec, screen: Screen, signals: int = -1) -> None:
        self.screen = screen
        self.connections: dict[str, HostConnection] = {}
        self._spec, self._signals = spec, signals
        self._is_unread = False
        self.ready: dict[str, Ready] = {}
        self.awaited: dict[str, float] = {}

    def events(self, timeout_s: float) -> Sequence[Event]:
        """Return the new events; empty after `timeout_s`. Output goes to the screen."""
        poll = select.poll()
        connections = [each for each in self.connections.values() if each.is_open]
        for connection in connections:
            if not self.screen.is_full or self.screen.is_dropping:
                poll.register(connection.output, select.POLLIN)
            if connection.errors >= 0:
                poll.register(connection.errors, select.POLLIN)
            connection.beat()
            if connection.is_waiting:
                poll.register(connection.input, select.POLLOUT)
        sinks = [sink for sink in self.screen.sinks.values() if sink.waiting]
        for sink in sinks:
            poll.register(sink.fd, select.POLLOUT)
        if self._signals >= 0:
            poll.register(self._signals, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(1000 * max(0.0, min(timeout_s, _BEAT_S)))}

        found: list[Event] = []
        if self._signals in ready:
            found += [Signal(number) for number in os.read(self._signals, 1024)]
        for sink in sinks:
            if sink.fd in ready:
                found += self._flush(sink.fd)
        for connection in connections:
            if connection.input in ready and connection.is_open:
                connection.flush()
            if connection.errors in ready:
                self._read_errors(connection)
            if connection.output in ready:
                found += connection.read()
        for event in found:
            if isinstance(event, Output) and event.stream in self.screen.sinks:
                self.screen.write(event.rank, event.stream, event.data)
        return [e for e in found if not isinstance(e, Output) or e.stream == "result"]

    def drain(self, timeout_s: float) -> None:
        """Wait until all output has been read; a signal ends the wait, too."""
        deadline = time.monotonic() + timeout_s
        while any(sink.waiting for sink in self.screen.sinks.values()) and not self._is_unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or any(isinstance(e, Signal) for e in self.events(left_s)):
                return

    def close(self) -> None:
        """End all remaining agents, and so all remaining ranks."""
        for connection in self.connections.values():
            connection.close()
        self.screen.close()

    def _flush(self, fd: int) -> list[Event]:
        for name, sink in self.screen.sinks.items():
            if sink.fd == fd and sink.waiting:
                try:
                    sink.flush()
                except BrokenPipeError:
                    self.screen.mute(fd)
                    if not self._is_unread:
                        self._is_unread = True
                        return [Unread(name)]
                except OSError as error:
                    self.screen.lose(name, error)
                break  # standard output and standard error may be one descriptor
        return []

    def _read_errors(self, connection: HostConnection) -> None:
        text = connection.read_errors()
        if self._spec.options.verbose:
            for line in text.splitlines():
                self.screen.say(f"{connection.host}: {line}")

    # --- hosts

    def connect(self, host: str) -> None:
        """Begin to connect to a host.

        Raises:
            InvalidArgumentError: there is no ssh here.
        """
        before = self.connections.get(host)
        if before is not None:
            before.close()
        connection = HostConnection(host, self._spec)
        self.connections[host] = connection
        self.awaited[host] = time.monotonic() + self._spec.start_timeout_s
        if self._spec.options.verbose and not connection.is_local:
            self.screen.say(f"{host} is reached by: {connection.command}")

    def note(self, event: Ready) -> None:
        """Note that a host has answered.

        Raises:
            InvalidArgumentError: the host cannot run ranks.
        """
        self.awaited.pop(event.host, None)
        if event.problem:
            raise InvalidArgumentError(f"{event.host}: {event.problem}")
        self.ready[event.host] = event

    def lose(self, host: str) -> None:
        """Note that a host no longer answers, or has never answered."""
        if self.awaited.pop(host, None) is not None:
            self.connections[host].close()
        self.ready.pop(host, None)

    def overdue(self) -> list[str]:
        """Return the hosts that have not answered in time."""
        now = time.monotonic()
        return [host for host, deadline in self.awaited.items() if deadline <= now]

    def next_at(self) -> float | None:
        """The time when the next host will be overdue; None: all have answered."""
        return min(self.awaited.values(), default=None)

    def store(self) -> tuple[str, int]:
        """Return the address and the port at which rank 0 serves the store.

        Call it when all hosts of the ranks have answered.
        """
        hosts = [self.ready[slot.host] for slot in self._spec.slots]
        address, port = self._address(hosts[0], hosts), hosts[0].port
        if self._spec.options.verbose:
            self.screen.say(f"rank 0 serves at {address}, port {port}")
        return address, port

    def _address(self, first: Ready, hosts: Sequence[Ready]) -> str:
        """Return an address of rank 0's host that the other hosts can reach."""
        if all(host.host == first.host for host in hosts):
            return "127.0.0.1"
        if first.interface_address:
            return first.interface_address
        if not self.connections[first.host].is_local:
            # ssh may know the host by a name that only ssh resolves.
            is_usable = first.server and not is_loopback(first.server)
            return first.server if is_usable else first.host.rpartition("@")[2]
        if not is_loopback_name(first.host) and first.host.replace(".", "").isdecimal():
            return first.host  # an address chosen by the user
        other = next(host for host in hosts if host.host != first.host)
        return own_address("", other.server or other.host)
