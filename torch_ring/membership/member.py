# SPDX-License-Identifier: Apache-2.0
"""Member, Channel, Server: a process of an elastic job, and authenticated messages to it."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_ring.membership.tls import TlsStream, load_openssl
from torch_ring.setup.frames import HEADER_BYTES, Kind, encode, payload_bytes
from torch_ring.setup.network import close_in_child

__all__ = [
    "Channel",
    "ForeignMessageError",
    "Member",
    "MessageKey",
    "Reach",
    "Server",
    "dial",
    "key_of",
    "member_id",
    "reach",
]

_HELLO = b"t-ring"  # of a caller without TLS: an end with TLS closes the connection at once
_NONCE_BYTES = 16
_TAG_BYTES = 32
_NUMBER = struct.Struct(">I")


@dataclass(frozen=True)
class MessageKey:
    """The key of an elastic job; `tls`: its messages are encrypted with it, too."""

    secret: bytes
    tls: bool = False


def key_of(secret: str, tls: str = "0") -> MessageKey:
    """Return the key derived from a job's secret.

    Args:
        secret: the secret.
        tls: the value of TORCH_RING_TLS.

    Raises:
        InvalidArgumentError: there is no OpenSSL for TLS.
    """
    if tls != "0":
        load_openssl()
    return MessageKey(
        hashlib.sha256(b"torch_ring elastic\0" + secret.encode()).digest(), tls != "0"
    )


class ForeignMessageError(ConnectionError):
    """The peer does not have the key of this job, or speaks another protocol."""


class Channel:
    """JSON messages over a connection, each with an HMAC-SHA256; encrypted if the key says so.

    The HMAC covers a random number of the accepting side, the direction and the message's number,
    so that no message can be replayed, on this connection or another.

    Thread: one. Blocking: for the socket's timeout. Errors: OSError.

    Args:
        connection: a connected socket; it is closed with the channel.
        key: the key of the job.
        address: the address of the accepting side, as it was told to others: "10.0.0.1:4711".
        accepted: whether this side has accepted the connection.
    """

    def __init__(
        self, connection: socket.socket, key: MessageKey, address: str, *, accepted: bool
    ) -> None:
        self._socket = connection
        self._stream: socket.socket | TlsStream = connection
        self._key = key
        self._accepted = accepted
        self._sent = self._received = 0
        if key.tls:
            self._stream = TlsStream(connection, key.secret, address, accepts=accepted)
        elif not accepted:
            connection.sendall(_HELLO)
        if accepted:
            self._nonce = os.urandom(_NONCE_BYTES)
            self._stream.sendall(self._nonce)
            if not key.tls and self._read(len(_HELLO)) != _HELLO:
                raise ForeignMessageError("the other end is no process of this job, or has TLS")
        else:
            self._nonce = self._read(_NONCE_BYTES)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        frame = encode(Kind.MESSAGE, json.dumps(message).encode())
        tag = self._tag(self._accepted, self._sent, frame)
        self._sent += 1
        self._stream.sendall(tag + frame)

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the next message.

        Raises:
            TimeoutError: no message came within `timeout_s`; the channel is then unusable.
            ConnectionError: the peer has closed the connection.
            ForeignMessageError: the message is not from a process of this job.
        """
        if timeout_s is not None:
            self._socket.settimeout(timeout_s)
        tag, header = self._read(_TAG_BYTES), self._read(HEADER_BYTES)
        try:
            data = self._read(payload_bytes(header, Kind.MESSAGE))
        except ValueError as error:
            raise ForeignMessageError(str(error)) from None
        if not hmac.compare_digest(
            tag, self._tag(not self._accepted, self._received, header + data)
        ):
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
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0)) and not self._socket.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):  # the descriptor is closed
            return True

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _tag(self, by_acceptor: bool, number: int, frame: bytes) -> bytes:
        head = self._nonce + bytes([by_acceptor]) + _NUMBER.pack(number)
        return hmac.new(self._key.secret, head + frame, hashlib.sha256).digest()

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._stream.recv(count - len(data))
            if not part:
                raise ConnectionResetError("the peer has closed the connection")
            data += part
        return bytes(data)


_HELLO_S = 5.0  # seconds that a caller has for its request
_MOST_CALLERS = 256  # served at a time; more wait in the kernel


class Server:
    """A listening socket. Each caller sends one request, and gets its answers from `answer`.

    Thread: close() any. Blocking: no.

    Args:
        host: the address to listen at.
        key: the key of the job.
        answer: answers a request over the channel, which is closed afterwards. An exception ends
            the call. Thread: one for each caller.

    Attributes:
        port: the port at which it listens.
        closed: whether it was closed.
    """

    def __init__(
        self, host: str, key: MessageKey, answer: Callable[[Channel, dict[str, Any]], None]
    ) -> None:
        self.closed = False
        self._key = key
        self._answer = answer
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family, backlog=1024)
        self._socket = close_in_child(server)  # else a child would seem to be this process
        self.port: int = self._socket.getsockname()[1]
        self._address = f"{host}:{self.port}"
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
                continue  # the caller is gone, or the server was closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_HELLO_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(connection, self._key, self._address, accepted=True)
            self._answer(channel, channel.receive())
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a stranger, or a process that has ended
        finally:
            connection.close()
            self._callers.release()


# The kernel accepts connections for its processes, so this limits the network alone. A lost packet
# is sent again after a second.
_CONNECT_S = 1.5
# For a host that is silent already: longer than a round trip between any two hosts of a job.
_SILENT_CONNECT_S = 0.1


@dataclass(frozen=True)
class Member:
    """A process of an elastic job.

    Attributes:
        id: a unique name, also among later processes; see `member_id`.
        host, port: the address of its listener.
    """

    id: str
    host: str
    port: int

    @property
    def process(self) -> str:
        """The launcher's name for the process; empty: it has none."""
        return self.id.rpartition("-")[0]

    @property
    def number(self) -> int:
        """The launcher's number for it: 3 of its process "3.1"; 0: it has no name."""
        number = self.process.partition(".")[0]
        return int(number) if number.isdecimal() else 0

    @property
    def address(self) -> str:
        """The address of its listener in one text."""
        return f"{self.host}:{self.port}"

    def packed(self) -> tuple[str, str, int]:
        """Return the member in the form that is sent: ``Member(*packed)`` restores it."""
        return self.id, self.host, self.port


def member_id(process: str) -> str:
    """Return a new unique name for a process, with the launcher's name in it, if any."""
    return f"{process}-{secrets.token_hex(8)}"


class Reach(enum.Enum):
    """Whether a process can be reached."""

    ALIVE = "answers"
    GONE = "has ended"  # its host refuses the connection
    CUT_OFF = "its host cannot be reached"
    SILENT = "does not answer"  # it is stopped, or its host is too busy


def dial(member: Member, key: MessageKey, answer_s: float, *, is_suspect: bool = False) -> Channel:
    """Return a channel to a member.

    Args:
        member: the process to reach.
        key: the key of the job.
        answer_s: seconds that the process has to answer, after its host has answered.
        is_suspect: whether its host seems silent already, and gets less time to answer.

    Raises:
        OSError: the member cannot be reached.
    """
    connection = _connect(member, is_suspect)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(answer_s)
        return Channel(connection, key, member.address, accepted=False)
    except BaseException:
        connection.close()
        raise


def reach(member: Member, key: MessageKey, answer_s: float, *, is_suspect: bool = False) -> Reach:
    """Return whether a member lives, as far as this process can tell. Arguments as for `dial`."""
    try:
        connection = _connect(member, is_suspect)
    except ConnectionRefusedError:
        return Reach.GONE
    except OSError:
        return Reach.CUT_OFF
    connection.settimeout(answer_s)
    channel = None
    try:
        channel = Channel(connection, key, member.address, accepted=False)
        channel.send({"kind": "probe"})
        channel.receive()
    except TimeoutError:
        return Reach.SILENT
    except OSError:  # it has ended meanwhile, or another program listens there now
        return Reach.GONE
    finally:
        connection.close()
    return Reach.ALIVE


# If Linux accepts a connection while the listening process dies, it may not reset it: this end
# would wait as for a stopped process. A keep-alive probe makes the host reset the connection.
# Probes go on for as long as possible, since the caller has its own deadline for a host without an
# answer.
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),  # seconds
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 127),
)


def _connect(member: Member, is_suspect: bool) -> socket.socket:
    timeout_s = _SILENT_CONNECT_S if is_suspect else _CONNECT_S
    connection = socket.create_connection((member.host, member.port), timeout_s)
    for level, option, value in _KEEP_ALIVE:
        connection.setsockopt(level, option, value)
    return connection
