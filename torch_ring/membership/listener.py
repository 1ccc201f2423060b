# SPDX-License-Identifier: Apache-2.0
"""Listener: answers the other processes of an elastic job."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_ring.membership.member import Channel, Member, MessageKey, Server

__all__ = ["JoinRequest", "Listener"]

_ALIVE_EVERY_S = 0.2


@dataclass(frozen=True)
class JoinRequest:
    """A process that waits for this one to lead a regrouping.

    Attributes:
        member: the process.
        channel: leads to the process; a thread keeps telling it that this process lives.
        answer: sends the last message, after which the channel is closed. Thread: any. Errors:
            OSError.
    """

    member: Member
    channel: Channel
    answer: Callable[[dict[str, object]], None]


class Listener:
    """The server of this process, where others check that it lives, and ask to join it.

    Requests of members wait in `requests`, and those of processes that want to become members in
    `newcomers`.

    Thread: close() any; one thread takes the requests. Blocking: no.

    Args:
        host: the address to listen at.
        key: the key of the job.
        knows: returns whether a process belongs to the job; other processes are told that they were
            left out. Thread: any.

    Attributes:
        port: the port at which it listens.
        must_leave: whether the launcher or a signal has asked this process to leave the job.
    """

    def __init__(
        self,
        host: str,
        key: MessageKey,
        knows: Callable[[Member], bool],
    ) -> None:
        self.requests: queue.Queue[JoinRequest] = queue.Queue()
        self.newcomers: queue.Queue[JoinRequest] = queue.Queue()
        self.key = key
        self._knows = knows
        self.must_leave = False
        self._on_change: Callable[[bool], None] = lambda _: None
        self._call = 0
        self._server = Server(host, key, self._answer)
        self.port = self._server.port

    def begin(
        self, knows: Callable[[Member], bool], on_change: Callable[[bool], None], call: int
    ) -> None:
        """Answer for an elastic function from now on.

        Args:
            knows: as above.
            on_change: called with True when a newcomer has asked, and with False when a message
                says that ranks should leave. Thread: any.
            call: the number of elastic functions that this process has called. A newcomer that has
                called fewer is told that the ranks are further.
        """
        self._knows, self._on_change, self._call = knows, on_change, call
        if not self.newcomers.empty():
            on_change(True)

    def close(self) -> None:
        """Stop listening. Processes that wait for an answer find the connection closed."""
        self._server.close()
        for waiting in (self.requests, self.newcomers):
            while not waiting.empty():
                waiting.get().channel.close()

    def dismiss_strangers(self) -> None:
        """Tell waiting processes that no longer belong to the job that they were left out."""
        for _ in range(self.requests.qsize()):
            request = self.requests.get()
            if self._knows(request.member):
                self.requests.put(request)
                continue
            with contextlib.suppress(OSError):
                request.answer({"kind": "left out"})

    def take_newcomers(self) -> list[JoinRequest]:
        """Return the newcomers that still wait, in the order of the launcher's numbers.

        So of ranks that come at once, the one whose output begins with "[3]" is rank 3.
        """
        waiting: list[JoinRequest] = []
        while not self.newcomers.empty():
            request = self.newcomers.get()
            if not request.channel.is_closed():
                waiting.append(request)
        return sorted(waiting, key=lambda request: request.member.number)

    def _answer(self, channel: Channel, request: dict[str, Any]) -> None:
        if request["kind"] not in ("join", "newcomer"):
            self.must_leave = self.must_leave or request["kind"] == "leave"
            channel.send({"kind": "alive"})
            if request["kind"] == "hosts":
                self._on_change(False)
            return
        member = Member(*request["member"])
        if request["kind"] == "newcomer" and request["call"] < self._call:
            channel.send({"kind": "over"})
        elif request["kind"] == "newcomer":
            self._hold(member, channel, self.newcomers)
        elif self._knows(member):
            self._hold(member, channel, self.requests)
        else:
            channel.send({"kind": "left out"})

    def _hold(self, member: Member, channel: Channel, waiting: queue.Queue[JoinRequest]) -> None:
        """Keep a waiting process, and keep telling it that this one lives, until the answer."""
        answered = threading.Event()
        sending = threading.Lock()

        def answer(message: dict[str, object]) -> None:
            with sending:
                try:
                    channel.send(message)
                finally:
                    answered.set()  # last, since the thread then closes the connection

        waiting.put(JoinRequest(member, channel, answer))
        if waiting is self.newcomers:
            self._on_change(True)
        while not answered.wait(_ALIVE_EVERY_S) and not self._server.closed:
            with sending:
                if not answered.is_set():
                    channel.send({"kind": "alive"})
