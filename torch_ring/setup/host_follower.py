# SPDX-License-Identifier: Apache-2.0
"""HostFollower: the side of a rank that another rank of its host leads; see `host_socket`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from torch_ring.errors import RingError, TimeoutError
from torch_ring.setup.failure import Failure, gone
from torch_ring.setup.frames import Frame, FrameSocket, Kind
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import Deadline, close_in_child, require_same_user
from torch_ring.setup.proc import is_stopped

__all__ = ["HELLO", "SLICE_S", "TELL_S", "HostFollower", "Watch", "connect", "leader_name"]

_log = logging.getLogger("torch_ring")

TELL_S = 2.0  # seconds for telling others of a failure

HELLO = struct.Struct("!II")  # rank, size; in a welcome, the leader's


Watch = Callable[[float], object]
"""Handles the ranks' messages in all exchanges, waiting for some seconds; raises their failure.

Returns a reason not to wait for missing ranks, or None.
"""

_PATIENCE_S = 5.0  # seconds beyond the deadline in which failures travel
SLICE_S = 1.0  # longest single wait; longer waits are made of several


class HostFollower:
    """The exchange of a rank that is connected to its leader; see `exchange`.

    Thread: one at a time. Blocking: all but `close`, until the deadline.

    Attributes:
        must_serve: whether this rank must serve the store, because other hosts need it.
        failure: the failure of this init(), if it has failed.
        left: whether the leader has said goodbye.
        leader: the leader's name in messages; its welcome has its rank.
        pid: the leader's process; 0: it is not visible from here.
    """

    def __init__(
        self, connection: FrameSocket, deadline: Deadline, watch: Watch, pid: int = 0
    ) -> None:
        self.connection = connection
        self.pid = pid
        self.leader = leader_name()
        self.must_serve = False
        self.failure: Failure | None = None
        self.left = False
        self._deadline, self._watch = deadline, watch
        self._data: deque[Frame] = deque()  # broadcasts of the leader
        self._welcome = False

    def gather(self, value: Any) -> dict[int, Any]:
        """Send this rank's value to the leader; return an empty dictionary.

        Raises:
            PeerLostError: the leader is gone.
        """
        try:
            self.connection.send(Kind.VALUE, self._deadline, json.dumps(value).encode())
        except OSError as error:
            self.pump(0.0)  # the leader may have sent the reason
            raise gone(self.leader, error) from None
        return {}

    def receive(self) -> Frame:
        """Return the leader's `broadcast`; the descriptors are the caller's.

        Raises:
            PeerLostError: the leader is gone.
            TimeoutError: the leader has not answered in time.
            RingError: another rank has failed; says why.
        """
        # The leader knows the late ranks, and names them at its deadline, a moment after this one.
        patience = Deadline(self._deadline.left_s() + _PATIENCE_S)
        while not self._data:
            if self._deadline.passed() and is_stopped(self.pid):
                raise TimeoutError(
                    f"{self.leader} has not answered {self._deadline}: its process {self.pid} is "
                    "stopped (`kill -CONT` lets it go on)"
                )
            if patience.passed():
                raise TimeoutError(f"{self.leader} has not answered {self._deadline}")
            if self.left:
                raise gone(self.leader)
            self._watch(min(SLICE_S, self._deadline.left_s() or patience.left_s()))
        return self._data.popleft()

    def poll(self, wait_s: float) -> None:
        """Handle what has arrived; wait for it if there is nothing. Raises another's failure."""
        self.pump(wait_s)
        if self.failure is not None:
            raise self.failure.error()

    def pump(self, wait_s: float) -> None:
        """Handle what has arrived; wait for it if there is nothing. May set `failure`."""
        if self.left or self.failure is not None:
            return
        try:
            for frame in self.connection.receive(wait_s):
                self._take(frame)
        except (OSError, EOFError, ValueError) as error:
            if self.failure is None and not self.left:
                self.failure = Failure.of_all(gone(self.leader, error))

    def wait_for_welcome(self, until: Deadline) -> bool:
        """Return whether the leader has let this rank in before `until`.

        Raises:
            RingError: this init() has failed.
            EOFError: the leader has closed its listener.
        """
        while not self._welcome and not until.passed():
            for frame in self.connection.receive(min(SLICE_S, until.left_s())):
                self._take(frame)
            if self.failure is not None:
                raise self.failure.error()
        return self._welcome

    def fail(self, failure: Failure) -> None:
        """Report a failure to the leader, and so to all ranks, once."""
        if self.failure is None:
            self.failure = failure
            with contextlib.suppress(OSError):
                self.connection.send(Kind.FAILURE, Deadline(TELL_S), failure.to_bytes())

    def close(self) -> None:
        """Close the connection after a goodbye to the leader."""
        with contextlib.suppress(OSError):
            self.connection.send(Kind.BYE, Deadline(TELL_S))
        self.connection.close()
        while self._data:  # not received, because of a failure
            for fd in self._data.popleft().fds:
                os.close(fd)

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.WELCOME:
            if len(frame.payload) != HELLO.size:
                raise ValueError("it has sent a broken WELCOME")
            self.leader = leader_name(HELLO.unpack(frame.payload)[0])
            self._welcome = True
        elif frame.kind == Kind.DATA:
            self._data.append(frame)
        elif frame.kind == Kind.SERVE:
            self.must_serve = True
        elif frame.kind == Kind.NOTE:
            _log.info("%s", frame.payload.decode(errors="replace"))
        elif frame.kind == Kind.FAILURE:
            self.failure = self.failure or Failure.from_bytes(frame.payload)
        elif frame.kind == Kind.BYE:
            self.left = True
        else:
            raise ValueError(f"it has sent a {frame.kind.name}")


def connect(
    name: str, identity: Identity, deadline: Deadline, until: Deadline, watch: Watch
) -> HostFollower | None:
    """Return a connection to the leader that has let this rank in; None: it did not in time."""
    connection = close_in_child(socket.socket(socket.AF_UNIX))
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(connection.close)
        connection.setblocking(False)
        connection.connect(name)
        pid = require_same_user(connection)
        follower = HostFollower(FrameSocket(connection), deadline, watch, pid)
        cleanup.callback(follower.close)
        hello = HELLO.pack(identity.rank, identity.size)
        follower.connection.send(Kind.HELLO, deadline, hello)
        try:
            if not follower.wait_for_welcome(until):
                return None
        except (RingError, OSError, EOFError, ValueError):
            raise
        except BaseException as error:  # Ctrl-C: tell the leader, which has the hello
            follower.fail(Failure.of(error, identity.rank))
            raise
        cleanup.pop_all()
        return follower


def leader_name(rank: int | None = None) -> str:
    """Return the leader of this host in words, with its rank if it is known."""
    return "the leader of this host" + ("" if rank is None else f", rank {rank},")
