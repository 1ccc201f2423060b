# SPDX-License-Identifier: Apache-2.0
"""Frame: one message between ranks during init(), over a Unix socket or in a store.

A frame is a header (magic, kind, number of descriptors, bytes) and its payload. Over a socket
(`FrameSocket`) the descriptors come with the header's first byte. In a store and between
hosts there are none, and a tag, an HMAC-SHA256, comes before the frame
(`job_key.AuthenticatedStore`, `membership.member.Channel`).
"""

from __future__ import annotations

import array
import enum
import os
import select
import socket
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch_ring.setup.network import Deadline, close_in_child

__all__ = ["HEADER_BYTES", "Frame", "FrameSocket", "Kind", "decode", "encode", "payload_bytes"]

_HEADER = struct.Struct("!6sBBI")
HEADER_BYTES = _HEADER.size
_MAGIC = b"tring1"
_MOST_FDS = 8
_READ_BYTES = 1 << 18
_MOST_READS = 64  # at a time: an endless sender must not keep the others waiting


class Kind(enum.IntEnum):
    """The kind of a frame."""

    HELLO = 1  # to the leader: its rank and size
    WELCOME = 2  # from the leader, which accepts the rank: its rank and size
    VALUE = 3  # to the leader: the rank's value in an exchange; in a store: a host's
    SERVE = 4  # to the first rank of a host: other hosts need the store
    NOTE = 5  # to rank 0: a line for its log
    DATA = 6  # from the leader: a broadcast
    FAILURE = 7  # either way: this init() has failed
    BYE = 8  # either way, this end no longer needs the connection
    VALUES = 9  # in a store: the values of all hosts
    MESSAGE = 10  # between processes of an elastic job


_MOST_BYTES = {
    Kind.HELLO: 64,
    Kind.WELCOME: 64,
    Kind.VALUE: 4 << 20,
    Kind.SERVE: 0,
    Kind.NOTE: 1 << 16,
    Kind.DATA: 1 << 28,
    Kind.FAILURE: 1 << 17,
    Kind.BYE: 0,
    Kind.VALUES: 1 << 23,
    Kind.MESSAGE: 1 << 22,  # more than a table of 20,000 members
}
_FOREIGN = "the other end is no rank of this version of torch_ring"


@dataclass
class Frame:
    """One frame; its receiver owns its descriptors."""

    kind: Kind
    payload: bytes = b""
    fds: list[int] = field(default_factory=list)


def encode(kind: Kind, payload: bytes = b"", fds: int = 0) -> bytes:
    """Return a frame as bytes; `fds` descriptors come with it."""
    return _HEADER.pack(_MAGIC, kind, fds, len(payload)) + payload


def decode(data: bytes, kinds: Collection[Kind]) -> tuple[Kind, bytes]:
    """Return kind and payload of a whole frame. Raises ValueError if it is none of these kinds."""
    header = _header(data)
    if header is None or header[0] not in kinds or len(data) != _HEADER.size + header[2]:
        raise ValueError("it is no frame of this version of torch_ring")
    return header[0], data[_HEADER.size :]


def payload_bytes(header: bytes, kind: Kind) -> int:
    """Return the bytes that follow the header of a frame. Raises ValueError if it is no `kind`."""
    found = _header(header)
    if found is None or found[0] is not kind:
        raise ValueError(_FOREIGN)
    return found[2]


def _header(data: bytes | bytearray) -> tuple[Kind, int, int] | None:
    """Return kind, descriptors and bytes of the frame that begins here; None: still incomplete.

    Raises:
        ValueError: the bytes are no frame.
    """
    if len(data) < _HEADER.size:
        if not _MAGIC.startswith(data[: len(_MAGIC)]):
            raise ValueError(_FOREIGN)
        return None
    magic, number, fds, size = _HEADER.unpack_from(data)
    if magic != _MAGIC or number not in set(Kind):
        raise ValueError(_FOREIGN)
    kind = Kind(number)
    if size > _MOST_BYTES[kind] or fds > (_MOST_FDS if kind == Kind.DATA else 0):
        raise ValueError(f"a frame of {size} bytes and {fds} descriptors is no {kind.name}")
    return kind, fds, size


class FrameSocket:
    """Frames over a connected Unix socket, which it owns.

    Thread: one at a time. Blocking: `send`, until the deadline; `receive`, for `wait_s`.
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
        rest = memoryview(encode(kind, payload, len(fds)))
        while rest:
            try:
                if fds:
                    sent = socket.send_fds(self.socket, [rest], list(fds))
                    fds = ()
                else:
                    sent = self.socket.send(rest, socket.MSG_NOSIGNAL)
                rest = rest[sent:]
            except BlockingIOError:
                if deadline.passed():
                    raise OSError("the other end takes nothing") from None
                self._wait(select.POLLOUT, min(1.0, 0.001 + deadline.left_s()))

    def receive(self, wait_s: float = 0.0) -> list[Frame]:
        """Return the frames that have arrived; if there are none, wait for the first.

        Raises:
            EOFError: the other end has closed the connection, and all its frames were taken.
            OSError: the connection is broken.
            ValueError: the received bytes are no frame.
        """
        self._wait(select.POLLIN, wait_s)
        end: Exception | None = None
        for _ in range(_MOST_READS):
            try:
                if not self._read():
                    end = EOFError("the connection was closed")
            except BlockingIOError:
                break
            except OSError as error:  # the other end closed early, but may have sent the reason
                end = error
            if end is not None:
                break
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        if end is not None and not frames:
            raise end
        return frames

    def close(self) -> None:
        """Close the connection, and the received descriptors that were not taken."""
        self.socket.close()
        while self._fds:
            os.close(self._fds.pop())

    def _read(self) -> int:
        room = socket.CMSG_LEN(_MOST_FDS * array.array("i").itemsize)
        data, ancillary, _, _ = self.socket.recvmsg(_READ_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, passed in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(passed[: len(passed) - len(passed) % fds.itemsize])
                self._fds.extend(fds)
        self._received += data
        _header(self._received)  # raises early if the bytes are no frame
        return len(data)

    def _next(self) -> Frame | None:
        header = _header(self._received)
        if header is None or len(self._received) < _HEADER.size + header[2]:
            return None
        kind, count, size = header
        if count > len(self._fds):
            raise ValueError(f"{count - len(self._fds)} descriptors of a frame are missing")
        payload = bytes(self._received[_HEADER.size : _HEADER.size + size])
        del self._received[: _HEADER.size + size]
        fds, self._fds = self._fds[:count], self._fds[count:]
        return Frame(kind, payload, fds)

    def _wait(self, event: int, seconds: float) -> None:
        if seconds > 0:
            poll = select.poll()
            poll.register(self.socket, event)
            poll.poll(1000 * seconds)
