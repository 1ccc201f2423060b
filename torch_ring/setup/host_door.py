# SPDX-License-Identifier: Apache-2.0
"""Door: the listener of a host's leader, and connections that have not said who they are."""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import sys
import time
from collections.abc import Sequence

from torch_ring.setup.frames import FrameSocket
from torch_ring.setup.network import require_same_user

if sys.platform != "win32":
    import resource

__all__ = ["Door"]

_log = logging.getLogger("torch_ring")

# Most connections that have not said their rank, and how long they may take while others wait.
_STRANGERS = 1024
_SILENCE_S = 0.25
_SHORTAGE_S = 2.0  # seconds for which accept() may lack descriptors
_PAUSE_S = 0.02


class Door:
    """Accepts connections, of which only so many may be silent that ranks still get in.

    Thread: one at a time. Blocking: for a moment, while there is no room.

    Args:
        selector: the listener and the connections are registered there.
        rank: of this process, for the log.
    """

    def __init__(self, selector: selectors.BaseSelector, rank: int) -> None:
        self._selector, self._rank = selector, rank
        self._listener: socket.socket | None = None
        self._strangers: dict[FrameSocket, float] = {}  # time of arrival; the oldest is first
        self._short_since: float | None = None  # since when descriptors are lacking

    @property
    def is_open(self) -> bool:
        """Whether there is a listener."""
        return self._listener is not None

    def open(self, listener: socket.socket) -> None:
        """Let connections in at `listener`, which the door owns from now on."""
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Stop accepting connections; drop those that have not said who they are."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for stranger in [*self._strangers]:
            self.drop(stranger)

    def forget(self, connection: FrameSocket) -> None:
        """Leave a connection, which has said who it is, to the caller."""
        self._strangers.pop(connection, None)

    def drop(self, connection: FrameSocket) -> None:
        """Close a connection that came in here, whoever has it now."""
        self.forget(connection)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
        connection.close()

    def accept(self, ready: Sequence[object]) -> None:
        """Accept the connections that wait, if the listener is one of the `ready` sockets.

        Raises:
            OSError: descriptors have been lacking for some seconds.
        """
        if self._listener is None or self._listener not in ready:
            return
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = min(_STRANGERS, limit // 4) if limit >= 0 else _STRANGERS
        while len(self._strangers) < room or self._make_room():
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                self._short_since = None
                return
            except OSError as error:
                if self._make_room():
                    continue
                self._bear(error)
                break
            self._short_since = None
            try:
                require_same_user(connection)
            except OSError as error:
                _log.debug("rank %d dropped a connection: %s", self._rank, error)
                connection.close()
                continue
            stranger = FrameSocket(connection)
            self._strangers[stranger] = time.monotonic()
            self._selector.register(stranger, selectors.EVENT_READ)
        time.sleep(_PAUSE_S)  # waiting connections would wake the selector again at once

    def _make_room(self) -> bool:
        """Drop the newest stranger that has had time to say hello; return whether there was one."""
        ripe = time.monotonic() - _SILENCE_S
        newest = next((s for s in reversed(self._strangers) if self._strangers[s] <= ripe), None)
        if newest is not None:
            self.drop(newest)
        return newest is not None

    def _bear(self, error: OSError) -> None:
        """Raise an error of accept() if it persists: descriptors may become free meanwhile."""
        now = time.monotonic()
        self._short_since = self._short_since or now
        if error.errno not in (errno.EMFILE, errno.ENFILE) or now > self._short_since + _SHORTAGE_S:
            raise error
