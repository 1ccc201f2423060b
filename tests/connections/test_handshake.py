"""The handshake of a connection: only a peer that knows the key is let in."""

import asyncio
import contextlib
import socket

import pytest

from torch_ring.connections import handshake


@pytest.mark.parametrize("lie", ["wanted", "magic"])
def test_a_false_hello_is_refused(lie):
    """Also from a peer that knows the key."""
    fields = {"magic": handshake._MAGIC, "channel": 1, "rank": 1, "wanted": 0, "nonce": bytes(32)}
    fields[lie] = {"wanted": 5, "magic": b"somebody"}[lie]
    hello = handshake._HELLO.pack(*fields.values())

    async def shake_hands():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            theirs.send(hello)
            accepting = asyncio.create_task(handshake.accept(ours, b"key", 0))
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                nonce = (await asyncio.wait_for(handshake._receive(theirs, 64), 1))[:32]
                theirs.send(handshake._proof(b"key", b"connect", hello, nonce))
            theirs.close()
            await accepting

    with pytest.raises((OSError, ValueError)):
        asyncio.run(shake_hands())


def test_the_proof_of_the_accepting_side_is_no_proof():
    """A peer that sends back the proof it received is refused."""

    async def shake_hands():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            theirs.send(handshake._HELLO.pack(handshake._MAGIC, 1, 1, 0, bytes(32)))
            accepting = asyncio.create_task(handshake.accept(ours, b"key", 0))
            theirs.send((await handshake._receive(theirs, 64))[32:])
            await accepting

    with pytest.raises(ValueError, match="not the secret"):
        asyncio.run(shake_hands())
