# SPDX-License-Identifier: Apache-2.0
"""TORCH_RING_TLS: nobody on the way reads, changes or plays back the messages of an elastic job."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import torch_ring as hvd
from torch_ring.membership import tls
from torch_ring.membership.directory import Directory, ask_directory, tell_directory
from torch_ring.membership.member import Channel, Member, MessageKey, key_of

KEY = key_of("of this job", "1")
CLEAR = dataclasses.replace(KEY, tls=False)
NAME = "10.0.0.1:4711"
MEMBERS = [Member("0.1-abc", "10.20.30.40", 4711), Member("1.1-def", "10.20.30.41", 4712)]
WORDS = (b"kind", b"roster", b"0.1-abc", b"10.20.30.40", b"4712")
PATIENCE_S = 20.0
A_HANDSHAKE = b"\x16\x03\x01\x02\x00" + bytes(500)  # its length, and nonsense

Spoil = Callable[[bytes], bytes]


class Way:
    """Two connected sockets; a stranger between them keeps all bytes, and may change them.

    Args:
        of_caller, of_acceptor: change the n-th part that this end sends.
    """

    def __init__(
        self,
        of_caller: Callable[[int, bytes], bytes] = lambda _, data: data,
        of_acceptor: Callable[[int, bytes], bytes] = lambda _, data: data,
    ) -> None:
        self.caller, near = socket.socketpair()
        self.acceptor, far = socket.socketpair()
        self.seen = b""
        for end in (self.caller, self.acceptor):
            end.settimeout(PATIENCE_S)
        for source, target, change in ((near, far, of_caller), (far, near, of_acceptor)):
            threading.Thread(target=self._carry, args=(source, target, change), daemon=True).start()

    def _carry(
        self, source: socket.socket, target: socket.socket, change: Callable[[int, bytes], bytes]
    ) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(change(number, data))
                number += 1
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.caller.close()
        self.acceptor.close()


@dataclasses.dataclass
class End:
    key: MessageKey = KEY
    name: str = NAME

    def talk(self, connection: socket.socket, *, accepted: bool) -> list[object]:
        """Exchange some messages; return the received ones, or the error."""
        try:
            channel = Channel(connection, self.key, self.name, accepted=accepted)
            got: list[object] = []
            for number in range(3):
                channel.send(
                    {"kind": "roster", "of": accepted, "number": number, "members": PACKED}
                )
                got.append(channel.receive())
        except OSError as error:
            return [error]
        finally:
            connection.close()
        return got


PACKED = [list(member.packed()) for member in MEMBERS]


def talk(way: Way, caller: End | None = None, acceptor: End | None = None) -> list[list[object]]:
    """Return the outcomes of the two ends."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit((caller or End()).talk, way.caller, accepted=False)
        second = threads.submit((acceptor or End()).talk, way.acceptor, accepted=True)
        return [first.result(), second.result()]


@pytest.mark.parametrize("key", [KEY, CLEAR])
def test_nobody_on_the_way_can_read(key: MessageKey) -> None:
    way = Way()
    outcomes = talk(way, End(key), End(key))
    for is_acceptor, got in enumerate(outcomes):
        assert got == [
            {"kind": "roster", "of": not is_acceptor, "number": number, "members": PACKED}
            for number in range(3)
        ]
    assert [word for word in WORDS if word in way.seen] == ([] if key.tls else list(WORDS))


@pytest.mark.parametrize(
    ("caller", "acceptor"),
    [
        (End(key_of("of another job", "1")), End()),
        (End(name="10.0.0.2:4711"), End()),
        (End(CLEAR), End()),
        (End(), End(CLEAR)),
    ],
    ids=["another key", "another member", "caller in the clear", "acceptor in the clear"],
)
def test_others_are_refused_at_once(caller: End, acceptor: End) -> None:
    for (error,) in talk(Way(), caller, acceptor):
        assert isinstance(error, ConnectionError), error  # no TimeoutError


def test_a_certificate_is_no_key(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("certificate.pem", "key.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=a"]
    with contextlib.suppress(FileNotFoundError):
        subprocess.run([*command, "-out", files[0], "-keyout", files[1]], check=True, timeout=60)
    if not Path(files[0]).exists():
        pytest.skip("there is no `openssl` to make a certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    way = Way()

    def pose() -> None:
        with contextlib.suppress(OSError):
            context.wrap_socket(way.acceptor, server_side=True).sendall(bytes(16))

    stranger = threading.Thread(target=pose)
    stranger.start()
    (error,) = End().talk(way.caller, accepted=False)
    assert "TLS: the other end has not used the key" in str(error)
    stranger.join()


def flip(part: int, at: int) -> Callable[[int, bytes], bytes]:
    """Return a function that changes a bit of a part."""

    def change(number: int, data: bytes) -> bytes:
        if number != part:
            return data
        spoiled = bytearray(data)
        spoiled[at % len(data)] ^= 0x10
        return bytes(spoiled)

    return change


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("at", [0, 50])
@pytest.mark.parametrize("is_acceptors", [False, True])
def test_a_changed_bit_ends_the_call(part: int, at: int, is_acceptors: bool) -> None:
    """In the handshake, and in the messages after it; no message of a changed stream is taken."""
    change = flip(part, at)
    way = Way(of_acceptor=change) if is_acceptors else Way(of_caller=change)
    way.caller.settimeout(1.0)  # a changed length is waited for
    way.acceptor.settimeout(1.0)
    outcomes = talk(way)
    assert any(isinstance(got[-1], OSError) for got in outcomes), outcomes
    victim = outcomes[not is_acceptors]
    assert part > 1 or isinstance(victim[-1], OSError)


def test_bytes_that_trickle_into_the_handshake_end_in_time() -> None:
    way = Way()
    way.acceptor.settimeout(0.5)
    done = threading.Event()
    sent = 0

    def trickle() -> None:
        nonlocal sent
        for byte in A_HANDSHAKE:
            if done.wait(0.05):
                break
            way.caller.sendall(bytes([byte]))
            sent += 1

    threading.Thread(target=trickle, daemon=True).start()
    (error,) = End().talk(way.acceptor, accepted=True)
    done.set()
    assert isinstance(error, TimeoutError), error
    assert sent < len(A_HANDSHAKE)
    way.close()


@contextlib.contextmanager
def directory(key: MessageKey) -> Iterator[Directory]:
    made = Directory("127.0.0.1", key)
    try:
        tell_directory(made.address, key, 1, MEMBERS)
        yield made
    finally:
        made.close()


def test_a_directory_answers_in_spite_of_strangers() -> None:
    with directory(KEY) as ours, contextlib.ExitStack() as strangers:
        for data in (b"", b"\x16\x03\x01\x02\x00\x01", b"\xff" * 100, bytes(1 << 16)):
            port = int(ours.address.rpartition(":")[2])
            stranger = socket.create_connection(("127.0.0.1", port))
            strangers.enter_context(stranger)
            with contextlib.suppress(OSError):
                stranger.sendall(data)
        assert ask_directory(ours.address, KEY) == MEMBERS


@pytest.mark.parametrize("launcher", [KEY, CLEAR])
def test_a_process_that_disagrees_with_its_launcher_hears_why(launcher: MessageKey) -> None:
    with directory(launcher) as ours, pytest.raises(hvd.RingError) as raised:
        ask_directory(ours.address, KEY if launcher is CLEAR else CLEAR)
    assert "another TORCH_RING_TLS" in str(raised.value)
    assert "timed out" not in str(raised.value)


def test_no_openssl_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError("no such file")

    tls.load_openssl.cache_clear()
    monkeypatch.setattr(ctypes, "PyDLL", missing)
    with pytest.raises(hvd.InvalidArgumentError, match=r"needs OpenSSL 1\.1\.1b"):
        key_of("of this job", "1")
    assert not key_of("of this job").tls
