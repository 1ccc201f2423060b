"""Listener: answers the other processes of an elastic job, in threads of its own."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from torch_ring.elastic.channel import Channel
from torch_ring.world.current import disable_in_child

__all__ = ["JoinRequest", "Listener"]

_HELLO_S = 5.0  # seconds that a caller has for its request
_MOST_CALLERS = 256  # at a time; more wait in the kernel
_ALIVE_EVERY_S = 0.2


@dataclass(frozen=True)
class JoinRequest:
    """A process that waits for this one to lead a regrouping.

    Attributes:
        id: the process.
        channel: leads to it; its thread says every moment that this process lives.
        answer: sends the last message, after which the channel is closed. Thread: any. Errors:
            OSError.
    """

    id: str
    channel: Channel
    answer: Callable[[dict[str, object]], None]


class Listener:
    """A socket at which the other processes ask whether this one lives, and to join it.

    Requests to join are put into `requests`, until somebody takes them. `knows` says of a process
    whether it still belongs to this one's job; one that does not hears that it was left out.

    Thread: close() any; the requests are for one thread. Blocking: no.

    Args:
        host: the address to listen at.
        key: the key of the job.
        knows: whether a process, given by its id, belongs to the job. Thread: any.

    Attributes:
        port: where it listens.
    """

    def __init__(self, host: str, key: bytes, knows: Callable[[str], bool]) -> None:
        self.requests: queue.Queue[JoinRequest] = queue.Queue()
        self.key = key
        self._knows = knows
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._callers = threading.BoundedSemaphore(_MOST_CALLERS)
        self._closed = False
        disable_in_child(self)
        threading.Thread(target=self._accept, name="torch_ring elastic", daemon=True).start()

    def close(self) -> None:
        """Stop listening. Those that wait for an answer find the connection closed."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        while not self.requests.empty():
            self.requests.get().channel.close()

    def dismiss_strangers(self) -> None:
        """Tell those that wait, and do not belong to the job any more, that they were left out."""
        for _ in range(self.requests.qsize()):
            request = self.requests.get()
            if self._knows(request.id):
                self.requests.put(request)
                continue
            with contextlib.suppress(OSError):
                request.answer({"kind": "left out"})

    def disable(self) -> None:
        """Let go of the parent's socket in a forked child: it would seem to live after its end."""
        self._closed = True
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            self._callers.acquire()
            try:
                connection, _ = self._socket.accept()
            except OSError:
                self._callers.release()
                if self._closed:
                    return
                continue  # the caller has gone
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_HELLO_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(connection, self.key, accepted=True)
            request = channel.receive()
            if request.get("kind") != "join":
                channel.send({"kind": "alive"})
            elif self._knows(str(request.get("id"))):
                self._hold(str(request["id"]), channel)
            else:
                channel.send({"kind": "left out"})
        except (OSError, ValueError):
            pass  # a stranger, or a process that has ended
        finally:
            connection.close()
            self._callers.release()

    def _hold(self, process: str, channel: Channel) -> None:
        """Keep a process that wants to join, and tell it that this one lives, until the answer."""
        answered = threading.Event()
        sending = threading.Lock()

        def answer(message: dict[str, object]) -> None:
            with sending:
                try:
                    channel.send(message)
                finally:
                    answered.set()  # only now: the thread closes the connection then

        self.requests.put(JoinRequest(process, channel, answer))
        while not answered.wait(_ALIVE_EVERY_S) and not self._closed:
            with sending:
                if not answered.is_set():
                    channel.send({"kind": "alive"})
