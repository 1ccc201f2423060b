"""Supervisor: the loop that waits for events of hosts, ranks and the system."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence

from torch_ring.run.events import Event, Output, Signal, Unread
from torch_ring.run.host_connection import HostConnection
from torch_ring.run.screen import Screen

__all__ = ["Supervisor"]

_BEAT_S = 5.0  # how often hosts are told that the launcher lives, at least


class Supervisor:
    """Waits for events, and meanwhile moves bytes: requests to hosts, the ranks' output to readers.

    It decides nothing: whoever asks for the events does. Hosts may be added at any time.

    Thread: one.
    Blocking: `events` only; its streams may be slow, or stop, at no other one's cost.

    Args:
        screen: where the ranks' output goes.
        signals: a descriptor from which the numbers of signals can be read; -1: there is none.
        show_errors: whether what ssh and agents write to standard error is shown.
    """

    def __init__(self, screen: Screen, signals: int = -1, show_errors: bool = False) -> None:
        self.screen = screen
        self.connections: dict[str, HostConnection] = {}
        self._signals, self._show_errors = signals, show_errors
        self._is_unread = False

    def add(self, connection: HostConnection) -> None:
        """Listen to a host."""
        self.connections[connection.host] = connection

    def events(self, timeout_s: float) -> Sequence[Event]:
        """Return what has happened; nothing, if nothing does in time. Output is on the screen."""
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
        """Wait until everything that was written has been read; a signal ends the wait, too."""
        deadline = time.monotonic() + timeout_s
        while any(sink.waiting for sink in self.screen.sinks.values()) and not self._is_unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or any(isinstance(e, Signal) for e in self.events(left_s)):
                return

    def close(self) -> None:
        """End all agents, and so all ranks, that have not ended."""
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
        if self._show_errors:
            for line in text.splitlines():
                self.screen.say(f"{connection.host}: {line}")
