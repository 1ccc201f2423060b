"""Connects the ranks: who is on which host, sockets between them, shared memory inside hosts.

A rank publishes a *card* in the store (JSON), reads everybody's, and connects to the ranks below
it; those above connect to it. Each connection begins with a challenge both ways: whoever does not
know the job's secret is dropped before anything it sends is believed.
"""

from __future__ import annotations

import builtins
import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from torch_ring import _C
from torch_ring.config import Config
from torch_ring.errors import InvalidArgumentError, RingError, TimeoutError
from torch_ring.rendezvous import Identity, peer_user

__all__ = ["Card", "Mesh", "connect"]

_HELLO = struct.Struct("!8sIB16s")  # magic, rank, purpose, nonce
_MAGIC = b"tchring1"
_CONTROL, _DATA = 0, 1
_STRANGER_S = 5.0  # what a connection that says nothing may cost


@dataclass(frozen=True)
class Card:
    """What a rank tells the others about itself.

    Attributes:
        machine: equal on ranks that can pass descriptors to one another.
        shares: whether it has memory to share.
        address, port: where it accepts connections from other hosts.
        socket: the name of its abstract Unix socket.
        cpus: the CPUs that it may run on.
    """

    rank: int
    machine: str
    shares: bool
    local_rank: int
    local_size: int
    pid: int
    address: str
    port: int
    socket: str
    cpus: tuple[int, ...]


@dataclass
class Mesh:
    """Everything that the native engine needs; it owns the descriptors until `release`."""

    cards: list[Card]
    host_of: list[int]
    labels: list[str]
    may_spin: bool
    data: dict[int, socket.socket] = field(default_factory=dict)
    control: dict[int, socket.socket] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)
    doorbells: dict[int, int] = field(default_factory=dict)

    @classmethod
    def alone(cls) -> Mesh:
        """Return the mesh of a world of one rank."""
        return cls([], [0], [f"rank 0 (pid {os.getpid()})"], may_spin=True)

    def release(self) -> dict[str, list[int]]:
        """Return the descriptors by rank, -1 where there is none; the caller owns them now."""
        ranks = range(len(self.host_of))
        sockets = {
            name: [by_rank[r].detach() if r in by_rank else -1 for r in ranks]
            for name, by_rank in (("data", self.data), ("control", self.control))
        }
        memory = [self.memory.pop(r, -1) for r in ranks]
        doorbells = [self.doorbells.pop(r, -1) for r in ranks]
        return {**sockets, "memory": memory, "doorbells": doorbells}

    def close(self) -> None:
        """Close what has not been released."""
        for connection in (*self.data.values(), *self.control.values()):
            connection.close()
        for fd in (*self.memory.values(), *self.doorbells.values()):
            os.close(fd)


def connect(identity: Identity, config: Config, store: Store, store_host: str) -> Mesh:
    """Connect this rank to all others.

    Raises:
        TimeoutError: ranks did not arrive within ``config.init_timeout_s``; names them.
        RingError: a rank failed while it connected; says which, and why.
        InvalidArgumentError: only shared memory is allowed, and there are several hosts.
    """
    deadline = time.monotonic() + config.init_timeout_s
    memory = _own_memory(config)
    mesh = None
    try:
        with _listen_unix() as unix, _listen_tcp(config, store_host) as tcp:
            card = _own_card(identity, memory is not None, unix, tcp)
            store.set(f"card/{identity.rank}", json.dumps(asdict(card)))
            cards = _read_cards(store, identity, deadline)
            mesh = _plan(identity.rank, cards, config)
            secret = _secret(identity, config, store, deadline)
            _Connector(identity.rank, secret, mesh, deadline).run(unix, tcp)
            if memory is not None:
                _share_memory(identity.rank, mesh, memory, deadline)
        return mesh
    except BaseException:
        if mesh is not None:
            mesh.close()
        raise
    finally:
        if memory is not None:
            os.close(memory)


# --- cards


def _own_memory(config: Config) -> int | None:
    """Return a descriptor of this rank's shared memory, or None if it cannot have any."""
    if config.transport == "tcp":
        return None
    try:
        return _C.make_memory()
    except RingError:
        if config.transport == "shm":
            raise
        # The others learn it from this rank's card, and all of them use TCP.
        logging.getLogger("torch_ring").warning("no shared memory, using TCP", exc_info=True)
        return None


def _own_card(
    identity: Identity,
    shares: bool,
    unix: socket.socket,
    tcp: socket.socket,
) -> Card:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Abstract Unix sockets, by which memory is passed, are known within a network namespace.
    machine = f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"
    return Card(
        rank=identity.rank,
        machine=machine,
        shares=shares,
        local_rank=identity.local_rank,
        local_size=identity.local_size,
        pid=os.getpid(),
        address=tcp.getsockname()[0],
        port=tcp.getsockname()[1],
        socket=unix.getsockname()[1:].decode(),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
    )


def _read_cards(store: Store, identity: Identity, deadline: float) -> list[Card]:
    keys = [f"card/{rank}" for rank in range(identity.size)]
    while not _wait(store, keys, 0.5):
        if store.check(["failed"]):
            raise RingError(f"init failed on another rank: {store.get('failed').decode()}")
        if time.monotonic() > deadline:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(
                f"rank {identity.rank}: {_ranks(missing)} of {identity.size} did not arrive in time"
            )
    return [_parse_card(rank, store.get(key)) for rank, key in enumerate(keys)]


def _wait(store: Store, keys: Sequence[str], seconds: float) -> bool:
    try:
        store.wait(list(keys), timedelta(seconds=seconds))
    except DistError as error:
        if "imeout" not in str(error) and "imed out" not in str(error):
            raise RingError(f"the store of rank 0 is gone: {error}") from None
        return False
    return True


def _parse_card(rank: int, text: bytes) -> Card:
    try:
        card = json.loads(text)
        return Card(**{**card, "cpus": tuple(card["cpus"])})
    except (ValueError, TypeError, KeyError) as error:
        raise RingError(f"rank {rank} runs another version of torch_ring: {error}") from None


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _secret(identity: Identity, config: Config, store: Store, deadline: float) -> bytes:
    if config.secret:
        return config.secret.encode()
    if identity.rank == 0:
        store.set("secret", secrets.token_hex(32))
    if not _wait(store, ["secret"], max(0.5, deadline - time.monotonic())):
        raise TimeoutError("rank 0 did not hand out the job's secret in time")
    return store.get("secret")


def _plan(rank: int, cards: list[Card], config: Config) -> Mesh:
    """Number the hosts in the order of their first ranks; without memory each rank is a host."""
    shares = all(card.shares for card in cards)
    hosts: dict[str, int] = {}
    host_of = [
        hosts.setdefault(card.machine if shares else str(card.rank), len(hosts)) for card in cards
    ]
    if config.transport == "shm" and len(hosts) > 1:
        raise InvalidArgumentError(
            f"TORCH_RING_TRANSPORT=shm, but the ranks are on {len(hosts)} hosts (or containers "
            "with networks of their own): leave it unset"
        )
    addresses = {card.address for card in cards}
    labels = [
        f"rank {card.rank} (pid {card.pid})"
        if len(addresses) == 1
        else f"rank {card.rank} ({card.address}, pid {card.pid})"
        for card in cards
    ]
    neighbours = [card for card in cards if card.machine == cards[rank].machine]
    cpus = set().union(*(card.cpus for card in neighbours))
    return Mesh(cards, host_of, labels, may_spin=len(cpus) >= len(neighbours))


# --- sockets


def _listen_unix() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0torch_ring/{os.getpid()}/{secrets.token_hex(8)}")
    listener.listen(1024)
    return listener


def _listen_tcp(config: Config, store_host: str) -> socket.socket:
    """Listen on the interface of the job only."""
    address = _address_of(config.interface) if config.interface else _address_towards(store_host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=1024)


def _address_of(interface: str) -> str:
    """Return the address of an interface, given by name or by that address."""
    if interface not in (name for _, name in socket.if_nameindex()):
        return interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR
    return socket.inet_ntoa(answer[20:24])


def _address_towards(host: str) -> str:
    """Return the address from which packets to `host` would go; none is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class _Connector:
    """Makes the connections of one rank: to those below it, from those above it."""

    def __init__(self, rank: int, secret: bytes, mesh: Mesh, deadline: float) -> None:
        self._rank = rank
        self._secret = secret
        self._mesh = mesh
        self._deadline = deadline
        self._expected = {(peer.rank, _CONTROL) for peer in mesh.cards if peer.rank != rank}
        self._expected |= {(peer, _DATA) for peer in _C.lane_peers(rank, mesh.host_of)}
        self._changed = threading.Condition()
        self._closing = False

    def run(self, unix: socket.socket, tcp: socket.socket) -> None:
        """Return when every connection is there."""
        acceptors = ThreadPoolExecutor(18, "torch_ring connect")
        try:
            for listener in (unix, tcp):
                acceptors.submit(self._accept, listener, acceptors)
            for peer, purpose in sorted(self._expected):
                if peer < self._rank:
                    self._connect(peer, purpose)
            with self._changed:
                while not self._changed.wait_for(lambda: not self._expected, 0.5):
                    self._check_deadline()
        finally:
            self._closing = True
            acceptors.shutdown()

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            missing = sorted({peer for peer, _ in self._expected})
            raise TimeoutError(f"rank {self._rank}: {_ranks(missing)} did not connect in time")

    def _local(self, peer: int) -> bool:
        return self._mesh.host_of[peer] == self._mesh.host_of[self._rank]

    def _add(self, peer: int, purpose: int, connection: socket.socket) -> None:
        connection.settimeout(None)
        with self._changed:
            connections = self._mesh.control if purpose == _CONTROL else self._mesh.data
            connections[peer] = connection
            self._expected.discard((peer, purpose))
            self._changed.notify_all()

    # The handshake: hello and nonce; nonce and proof; proof; a byte that says "welcome".

    def _proof(self, side: bytes, lower: int, upper: int, purpose: int, nonces: bytes) -> bytes:
        text = side + struct.pack("!IIB", lower, upper, purpose) + nonces
        return hmac.digest(self._secret, text, hashlib.sha256)

    def _connect(self, peer: int, purpose: int) -> None:
        while True:
            connection = self._open(peer)
            try:
                connection.settimeout(max(0.1, self._deadline - time.monotonic()))
                nonce = secrets.token_bytes(16)
                connection.sendall(_HELLO.pack(_MAGIC, self._rank, purpose, nonce))
                answer = _receive(connection, 48)
                nonces = nonce + answer[:16]
                theirs = self._proof(b"lower", peer, self._rank, purpose, nonces)
                if not hmac.compare_digest(theirs, answer[16:]):
                    raise RingError(
                        f"rank {self._rank}: rank {peer} does not know this job's secret "
                        "(is TORCH_RING_SECRET the same on all ranks?)"
                    )
                connection.sendall(self._proof(b"upper", peer, self._rank, purpose, nonces))
                if _receive(connection, 1) != b"w":
                    raise OSError("no welcome")
            except OSError:
                connection.close()
                self._check_deadline()
                time.sleep(0.05)
            except BaseException:
                connection.close()
                raise
            else:
                self._add(peer, purpose, connection)
                return

    def _open(self, peer: int) -> socket.socket:
        card = self._mesh.cards[peer]
        left = max(0.1, self._deadline - time.monotonic())
        try:
            if not self._local(peer):
                return socket.create_connection((card.address, card.port), left)
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(left)
            connection.connect("\0" + card.socket)
            return connection
        except OSError as error:
            where = card.socket if self._local(peer) else f"{card.address}:{card.port}"
            raise RingError(
                f"rank {self._rank} cannot connect to {self._mesh.labels[peer]} at {where}: {error}"
            ) from None

    def _accept(self, listener: socket.socket, pool: ThreadPoolExecutor) -> None:
        listener.settimeout(0.05)
        while not self._closing and self._expected:
            try:
                connection, _ = listener.accept()
            except builtins.TimeoutError:
                continue
            except OSError:
                return
            pool.submit(self._welcome, connection)

    def _welcome(self, connection: socket.socket) -> None:
        """Let a peer in; drop a stranger."""
        try:
            connection.settimeout(_STRANGER_S)
            if connection.family == socket.AF_UNIX and peer_user(connection) != os.getuid():
                raise OSError("another user")
            hello = _receive(connection, _HELLO.size)
            magic, peer, purpose, nonce = _HELLO.unpack(hello)
            if magic != _MAGIC or (peer, purpose) not in self._expected or peer < self._rank:
                raise OSError("not a peer that is expected")
            nonces = nonce + secrets.token_bytes(16)
            mine = self._proof(b"lower", self._rank, peer, purpose, nonces)
            connection.sendall(nonces[16:] + mine)
            theirs = self._proof(b"upper", self._rank, peer, purpose, nonces)
            if not hmac.compare_digest(theirs, _receive(connection, 32)):
                raise OSError("does not know the secret")
            connection.sendall(b"w")
        except OSError:
            connection.close()
        else:
            self._add(peer, purpose, connection)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise OSError("the connection was closed")
        data += part
    return data


# --- shared memory


def _share_memory(rank: int, mesh: Mesh, memory: int, deadline: float) -> None:
    """Exchange memory and doorbells with the ranks of this host, over the control connections."""
    if len(set(mesh.host_of)) == len(mesh.host_of):
        return
    peers = [p for p, host in enumerate(mesh.host_of) if host == mesh.host_of[rank] and p != rank]
    mesh.memory[rank] = os.dup(memory)
    mesh.doorbells[rank] = _C.make_doorbell()
    for peer in peers:
        socket.send_fds(mesh.control[peer], [b"m"], [mesh.memory[rank], mesh.doorbells[rank]])
    for peer in peers:
        connection = mesh.control[peer]
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            text, fds, _, _ = socket.recv_fds(connection, 1, 2, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise RingError(f"{mesh.labels[peer]} did not pass its memory: {error}") from None
        connection.settimeout(None)
        if text != b"m" or len(fds) != 2:
            for fd in fds:
                os.close(fd)
            raise RingError(f"{mesh.labels[peer]} failed before it passed its memory")
        mesh.memory[peer], mesh.doorbells[peer] = fds
