"""connect and accept: mutual authentication of the two ends of a connection, by this world's key.

The connecting side sends a hello: its rank, the peer's rank, the channel, and a nonce. The
accepting side answers with a nonce of its own and a proof, the connecting side with its proof, the
accepting side with a welcome. A proof is an HMAC-SHA256, under the key of this world, of the hello,
the accepting side's nonce, and a tag for the side, so that it is valid in this handshake and
direction only. Data sent afterwards is not encrypted.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct

from torch_ring.errors import RingError

__all__ = ["CONTROL", "accept", "connect", "readable"]

CONTROL = 0  # the channel of the control connection; data connections count from 1

_MAGIC = b"t-ring/2"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HELLO = struct.Struct(f"!8sBII{_NONCE_BYTES}s")  # magic, channel, from, to, nonce
_WELCOME = b"W"


async def connect(
    connection: socket.socket, key: bytes, rank: int, peer: int, channel: int
) -> None:
    """Prove to be `rank` to `peer`, at the other end of a non-blocking socket.

    Raises:
        OSError: the other end has closed the connection.
        RingError: the other end does not know the key.
    """
    hello = _HELLO.pack(_MAGIC, channel, rank, peer, secrets.token_bytes(_NONCE_BYTES))
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, hello)
    nonce = await _receive(connection, _NONCE_BYTES)
    if not hmac.compare_digest(
        await _receive(connection, _PROOF_BYTES), _proof(key, b"accept", hello, nonce)
    ):
        raise RingError(
            f"rank {peer} does not know the secret that rank {rank} knows: is TORCH_RING_SECRET "
            "the same on all ranks?"
        )
    await loop.sock_sendall(connection, _proof(key, b"connect", hello, nonce))
    if await _receive(connection, len(_WELCOME)) != _WELCOME:
        raise OSError("no welcome")


async def accept(connection: socket.socket, key: bytes, rank: int) -> tuple[int, int]:
    """Authenticate a peer of `rank`; return its rank and the channel of the connection.

    Raises:
        OSError, ValueError: the other end is no peer; do not use its data.
    """
    loop = asyncio.get_running_loop()
    hello = await _receive(connection, _HELLO.size)
    magic, channel, peer, wanted, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or wanted != rank:
        raise ValueError("its hello is not torch_ring's, or is for another rank")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(connection, nonce + _proof(key, b"accept", hello, nonce))
    proof = await _receive(connection, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(key, b"connect", hello, nonce)):
        raise ValueError("the peer knows the protocol, but not the secret")
    await loop.sock_sendall(connection, _WELCOME)
    return peer, channel


async def readable(connection: socket.socket) -> None:
    """Wait until `connection` has data to receive."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


async def _receive(connection: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes: the byte after them could carry descriptors."""
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(connection, count - len(data))
        if not part:
            raise ConnectionResetError("the peer has closed the connection")
        data += part
    return data


def _proof(key: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, side + b"\0" + hello + nonce, hashlib.sha256)
