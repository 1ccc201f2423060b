"""Channel: authenticated messages between two processes of an elastic job."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import socket
import struct
from typing import Any

__all__ = ["Channel", "ForeignMessageError", "key_of"]

_NONCE_BYTES = 16
_TAG_BYTES = 32
_MOST_BYTES = 1 << 22  # a table of 20,000 members, with room to spare
_LENGTH = struct.Struct(">I")


def key_of(secret: str) -> bytes:
    """Return the key that follows from a job's secret."""
    return hashlib.sha256(b"torch_ring elastic\0" + secret.encode()).digest()


class ForeignMessageError(ConnectionError):
    """The peer does not have the key of this job, or speaks another language."""


class Channel:
    """JSON messages over a connection, each with an HMAC-SHA256.

    The code covers a number that the accepting side has drawn, the direction and the message's
    number, so that nobody can repeat a message, here or in another connection.

    Thread: one. Blocking: as the socket's timeout says. Errors: OSError.

    Args:
        connection: a connected socket; it is closed with the channel.
        key: the key of the job.
        accepted: whether this side has accepted the connection.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, accepted: bool) -> None:
        self._connection = connection
        self._key = key
        self._accepted = accepted
        self._sent = self._received = 0
        if accepted:
            self._nonce = os.urandom(_NONCE_BYTES)
            connection.sendall(self._nonce)
        else:
            self._nonce = self._read(_NONCE_BYTES)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        data = json.dumps(message).encode()
        tag = self._tag(self._accepted, self._sent, data)
        self._sent += 1
        self._connection.sendall(_LENGTH.pack(len(data)) + tag + data)

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the next message.

        Raises:
            TimeoutError: it did not come within `timeout_s`; the channel is of no use then.
            ConnectionError: the peer has closed the connection.
            ForeignMessageError: the message is not from a process of this job.
        """
        if timeout_s is not None:
            self._connection.settimeout(timeout_s)
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _MOST_BYTES:
            raise ForeignMessageError(f"a message of {length} bytes")
        tag = self._read(_TAG_BYTES)
        data = self._read(length)
        if not hmac.compare_digest(tag, self._tag(not self._accepted, self._received, data)):
            raise ForeignMessageError("a message is not from a process of this job")
        self._received += 1
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ForeignMessageError("a message is no object")
        return message

    def is_closed(self) -> bool:
        """Return whether the peer has closed the connection. Thread: any."""
        poll = select.poll()
        try:
            poll.register(self._connection, select.POLLIN)
            return bool(poll.poll(0)) and not self._connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):  # of a descriptor that is closed
            return True

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _tag(self, by_acceptor: bool, number: int, data: bytes) -> bytes:
        head = self._nonce + bytes([by_acceptor]) + _LENGTH.pack(number)
        return hmac.new(self._key, head + data, hashlib.sha256).digest()

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._connection.recv(count - len(data))
            if not part:
                raise ConnectionResetError("the peer has closed the connection")
            data += part
        return data
