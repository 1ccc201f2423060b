"""Server: takes the requests of other processes of an elastic job, in threads of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from torch_ring.rendezvous.channel import Channel
from torch_ring.rendezvous.inherited import close_in_child

__all__ = ["Server"]

_HELLO_S = 5.0  # seconds that a caller has for its request
_MOST_CALLERS = 256  # at a time; more wait in the kernel


class Server:
    """A listening socket. Each caller sends one request, and gets its answers from `answer`.

    Thread: close() any. Blocking: no.

    Args:
        host: the address to listen at.
        key: the key of the job.
        answer: answers a request over the channel, which is closed afterwards. What it raises ends
            the call. Thread: one for each caller.

    Attributes:
        port: where it listens.
        closed: whether it was closed.
    """

    def __init__(
        self, host: str, key: bytes, answer: Callable[[Channel, dict[str, Any]], None]
    ) -> None:
        self.closed = False
        self._key = key
        self._answer = answer
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family, backlog=1024)
        self._socket = close_in_child(server)  # this process would seem to live after its end
        self.port: int = self._socket.getsockname()[1]
        self._callers = threading.BoundedSemaphore(_MOST_CALLERS)
        threading.Thread(target=self._accept, name="torch_ring elastic", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def _accept(self) -> None:
        while not self.closed:
            self._callers.acquire()
            try:
                connection, _ = self._socket.accept()
            except OSError:
                self._callers.release()
                continue  # the caller has gone; or this was closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_HELLO_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(connection, self._key, accepted=True)
            self._answer(channel, channel.receive())
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a stranger, or a process that has ended
        finally:
            connection.close()
            self._callers.release()
