"""FrameSocket: frames over a Unix socket between a host's leader and another rank.

A frame is a header (magic, kind, number of descriptors, bytes) and its payload. The descriptors
come with the header's first byte.
"""

from __future__ import annotations

import array
import contextlib
import enum
import os
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_ring.setup.network import Deadline, close_in_child

__all__ = ["Frame", "FrameSocket", "Kind"]

_HEADER = struct.Struct("!6sBBI")
_MAGIC = b"tring1"
_MOST_FDS = 8
_READ_BYTES = 1 << 18
_MOST_READS = 64  # at a time: nobody who sends without end keeps the others waiting


class Kind(enum.IntEnum):
    """The kind of a frame."""

    HELLO = 1  # to the leader: rank, size and start
    WELCOME = 2  # from the leader: its rank and size; this meeting takes the rank in
    CARD = 3  # to the leader: the rank's card and settings
    SERVE = 4  # to rank 0: other hosts need the store
    NOTE = 5  # to rank 0: a line for its log
    DATA = 6  # from the leader: what it passes down
    FAILURE = 7  # either way: this init() has failed
    BYE = 8  # either way: this end needs the connection no more
    APART = 9  # from the leader: the ranks of this start meet without it


_MOST_BYTES = {
    Kind.HELLO: 64,
    Kind.WELCOME: 64,
    Kind.CARD: 4 << 20,
    Kind.SERVE: 0,
    Kind.NOTE: 1 << 16,
    Kind.DATA: 1 << 28,
    Kind.FAILURE: 1 << 17,
    Kind.BYE: 0,
    Kind.APART: 0,
}


@dataclass
class Frame:
    """One frame; whoever takes it owns its descriptors."""

    kind: Kind
    payload: bytes = b""
    fds: list[int] = field(default_factory=list)


class FrameSocket:
    """Frames over a connected Unix socket, which it owns.

    Thread: one at a time. Blocking: `send` only.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = close_in_child(connection)
        self._received = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self.socket.fileno()

    def send(
        self, kind: Kind, deadline: Deadline, payload: bytes = b"", fds: Sequence[int] = ()
    ) -> None:
        """Send a frame.

        Raises:
            OSError: the other end is gone, or has not taken it before the deadline.
        """
        header = _HEADER.pack(_MAGIC, kind, len(fds), len(payload))
        rest = memoryview(header + payload)
        while rest:
            try:
                if fds:
                    sent = socket.send_fds(self.socket, [rest], list(fds))
                    fds = ()
                else:
                    sent = self.socket.send(rest, socket.MSG_NOSIGNAL)
                rest = rest[sent:]
            except BlockingIOError:
                self._wait_for_room(deadline)

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived, without waiting.

        Raises:
            EOFError: the other end has closed the connection, and all its frames were taken.
            OSError: the connection is broken.
            ValueError: what has come is no frame.
        """
        end: Exception | None = None
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_READS):
                end = self._read_or_end()
                if end is not None:
                    break
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        if end is not None and not frames:
            raise end
        return frames

    def close(self) -> None:
        """Close the connection, and the descriptors that nobody has taken."""
        self.socket.close()
        while self._fds:
            os.close(self._fds.pop())

    def _read_or_end(self) -> Exception | None:
        """Read once; return how the connection has ended, if it has.

        It is reset if the other end has not read everything: its last words may be here all the
        same.
        """
        try:
            return None if self._read() else EOFError("the connection was closed")
        except BlockingIOError:
            raise
        except OSError as error:
            return error

    def _read(self) -> int:
        room = socket.CMSG_LEN(_MOST_FDS * array.array("i").itemsize)
        data, ancillary, _, _ = self.socket.recvmsg(_READ_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, passed in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(passed[: len(passed) - len(passed) % fds.itemsize])
                self._fds.extend(fds)
        self._received += data
        self._check_header()  # before more of a frame is kept that is none
        return len(data)

    def _check_header(self) -> tuple[Kind, int, int] | None:
        if len(self._received) < _HEADER.size:
            if not _MAGIC.startswith(self._received[: len(_MAGIC)]):
                raise ValueError("the other end is no rank of this version of torch_ring")
            return None
        magic, number, fds, size = _HEADER.unpack_from(self._received)
        if magic != _MAGIC or number not in set(Kind):
            raise ValueError("the other end is no rank of this version of torch_ring")
        kind = Kind(number)
        if size > _MOST_BYTES[kind] or fds > (_MOST_FDS if kind == Kind.DATA else 0):
            raise ValueError(f"a frame of {size} bytes and {fds} descriptors is no {kind.name}")
        return kind, fds, size

    def _next(self) -> Frame | None:
        header = self._check_header()
        if header is None or len(self._received) < _HEADER.size + header[2]:
            return None
        kind, count, size = header
        if count > len(self._fds):
            raise ValueError(f"{count - len(self._fds)} descriptors of a frame are missing")
        payload = bytes(self._received[_HEADER.size : _HEADER.size + size])
        del self._received[: _HEADER.size + size]
        fds, self._fds = self._fds[:count], self._fds[count:]
        return Frame(kind, payload, fds)

    def _wait_for_room(self, deadline: Deadline) -> None:
        if deadline.passed():
            raise OSError("the other end takes nothing")
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        poll.poll(min(1000.0, 1 + 1000 * deadline.left_s()))
