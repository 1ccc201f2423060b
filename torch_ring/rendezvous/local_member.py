"""LocalMember: a rank's connection to the leader of its host, while they meet."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import time
from collections import deque

from torch_ring.errors import PeerLostError, RingError, TimeoutError
from torch_ring.rendezvous.deadline import Deadline
from torch_ring.rendezvous.failure import Failure
from torch_ring.rendezvous.frames import Frame, FrameSocket, Kind
from torch_ring.rendezvous.inherited import close_in_child
from torch_ring.rendezvous.network import ForeignUserError, require_same_user

__all__ = ["HELLO", "ApartError", "LocalMember", "connect", "connect_to"]

_log = logging.getLogger("torch_ring")

HELLO = struct.Struct("!II")  # rank, size; of the leader in its welcome; a start comes after it
_TELL_S = 2.0  # seconds for telling the leader of a failure
_PAUSE_S = 0.005  # between two attempts to connect
_SLICE_S = 60.0  # a wait is made of shorter ones: poll() takes 24 days at most


class ApartError(Exception):
    """The ranks of this start are all here: they meet by themselves, at a name of their own."""


class LocalMember:
    """A rank that is connected to its leader.

    Thread: one at a time. Blocking: `pump` and `send`, for as long as they are told.

    Attributes:
        data: frames that the leader has passed down.
        must_serve: whether other hosts need rank 0's store.
        failure: why this init() has failed, when it has.
        left: whether the leader has gone in peace.
        leader: the leader's name in messages; it tells its rank with its welcome.
        pid: the leader's process; 0: it is not seen from here.
    """

    def __init__(self, connection: FrameSocket, deadline: Deadline, pid: int = 0) -> None:
        self.connection = connection
        self.pid = pid
        self.leader = _leader()
        self.data: deque[Frame] = deque()
        self.must_serve = False
        self.failure: Failure | None = None
        self._deadline = deadline
        self._welcome = False
        self.left = False
        self._selector = selectors.PollSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send a frame to the leader.

        Raises:
            PeerLostError: the leader is gone.
        """
        try:
            self.connection.send(kind, self._deadline, payload)
        except OSError as error:
            self.pump(0.0)  # it may have said why
            raise PeerLostError(f"{self.leader} has exited during init: {error}") from None

    def pump(self, wait_s: float) -> None:
        """Handle what has arrived; wait for it if there is nothing. May set `failure`."""
        if self.left or self.failure is not None:
            return
        try:
            if self._selector.select(wait_s):
                for frame in self.connection.receive():
                    self._take(frame)
        except (OSError, EOFError, ValueError) as error:
            if self.failure is None and not self.left:
                lost = PeerLostError(f"{self.leader} has exited during init: {error}")
                self.failure = Failure.of_all(lost)

    def wait_for_welcome(self, until: Deadline) -> bool:
        """Return whether the leader has let this rank in; it may not know, or be about to go.

        Raises:
            RingError: this init() has failed.
            ApartError: the leader belongs to another start.
            EOFError: the leader has closed its door.
        """
        while not self._welcome and not until.passed():
            if self._selector.select(min(_SLICE_S, until.left_s())):
                for frame in self.connection.receive():
                    self._take(frame)
            if self.failure is not None:
                raise self.failure.error()
        return self._welcome

    def fail(self, failure: Failure) -> None:
        """Tell the leader, and so everybody, once."""
        if self.failure is None:
            self.failure = failure
            with contextlib.suppress(OSError):
                self.connection.send(Kind.FAILURE, Deadline(_TELL_S), failure.to_bytes())

    def close(self) -> None:
        """Close the connection; the leader knows that this end has left in peace."""
        with contextlib.suppress(OSError):
            self.connection.send(Kind.BYE, Deadline(_TELL_S))
        self._selector.close()
        self.connection.close()
        while self.data:  # a failure came before anybody asked for it
            for fd in self.data.popleft().fds:
                os.close(fd)

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.WELCOME:
            if len(frame.payload) != HELLO.size:
                raise ValueError("it has sent a broken WELCOME")
            self.leader = _leader(HELLO.unpack(frame.payload)[0])
            self._welcome = True
        elif frame.kind == Kind.DATA:
            self.data.append(frame)
        elif frame.kind == Kind.SERVE:
            self.must_serve = True
        elif frame.kind == Kind.NOTE:
            _log.info("%s", frame.payload.decode(errors="replace"))
        elif frame.kind == Kind.FAILURE:
            self.failure = self.failure or Failure.from_bytes(frame.payload)
        elif frame.kind == Kind.BYE:
            self.left = True
        elif frame.kind == Kind.APART and not self._welcome:
            raise ApartError
        else:
            raise ValueError(f"it has sent a {frame.kind.name}")


def connect_to(name: str, leader: int, rank: int, size: int, deadline: Deadline) -> LocalMember:
    """Connect to the rank `leader` that listens at `name`, as its card says.

    Raises:
        ConnectionRefusedError: nobody listens there.
        ForeignUserError: the listener is a process of another user.
        PeerLostError: the leader has gone.
        TimeoutError: it has not answered before the deadline.
        RingError: this init() has failed on another rank.
    """
    while not deadline.passed():
        try:
            member = connect(name, rank, size, deadline, deadline)
        except BlockingIOError:  # its backlog is full
            time.sleep(_PAUSE_S)
            continue
        except (RingError, ConnectionRefusedError, ForeignUserError):
            raise
        except (OSError, EOFError, ValueError) as error:
            raise PeerLostError(f"{_leader(leader)} has exited during init: {error}") from None
        if member is not None:
            return member
    raise TimeoutError(f"{_leader(leader)} has not answered {deadline}")


def connect(
    name: str, rank: int, size: int, deadline: Deadline, until: Deadline, start: str = ""
) -> LocalMember | None:
    """Return a connection to the leader that has let this rank in; None: it has not, in time."""
    connection = close_in_child(socket.socket(socket.AF_UNIX))
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(connection.close)
        connection.setblocking(False)
        connection.connect(name)
        pid = require_same_user(connection)
        member = LocalMember(FrameSocket(connection), deadline, pid)
        cleanup.callback(member.close)
        member.connection.send(Kind.HELLO, deadline, HELLO.pack(rank, size) + start.encode())
        try:
            if not member.wait_for_welcome(until):
                return None
        except (RingError, ApartError, OSError, EOFError, ValueError):
            raise
        except BaseException as error:  # Ctrl-C: the leader reads of it after the hello
            member.fail(Failure.of(error, rank))
            raise
        cleanup.pop_all()
        return member


def _leader(rank: int | None = None) -> str:
    return "the leader of this host" + ("" if rank is None else f", rank {rank},")
