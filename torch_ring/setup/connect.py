# SPDX-License-Identifier: Apache-2.0
"""listen, connect: the control plane and the shared memory of this process, in a new world.

The leader of a host makes its memory, with the table of all ranks in it, and passes it to the
others. The control plane then connects to O(log n) ranks, and makes connections for data when they
are first used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import importlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from weakref import WeakSet

from torch_ring._C import (
    ControlPlane,
    Engine,
    HostMemory,
    LaunchOrder,
    least_memory,
    make_memory,
    mappable_bytes,
    memory_table,
)
from torch_ring.config import Config
from torch_ring.errors import InvalidArgumentError, RingError, TimeoutError
from torch_ring.setup import topology
from torch_ring.setup.exchange import FailurePath
from torch_ring.setup.failure import lacking
from torch_ring.setup.frames import FrameSocket, Kind
from torch_ring.setup.host_follower import HostFollower
from torch_ring.setup.host_socket import HostLeader
from torch_ring.setup.launchers import Identity, watched_launcher
from torch_ring.setup.network import (
    BACKLOG,
    Deadline,
    close_in_child,
    is_loopback,
    lack_of_loopback,
    own_addresses,
    pauses,
)
from torch_ring.setup.peer_info import PeerInfo, parse_table
from torch_ring.setup.ucx import own_ucx, ucx_library, uses_ucx

if sys.platform != "win32":
    import resource

__all__ = [
    "Connections",
    "Listeners",
    "Queries",
    "abandon_all_in_child",
    "answer_with",
    "close_all_at_exit",
    "connect",
    "listen",
]

_log = logging.getLogger("torch_ring")


_answer: Callable[[], str] = str  # returns ""


def answer_with(answer: Callable[[], str]) -> None:
    """Set the function that answers other ranks' questions about this process's activity.

    Args:
        answer: returns a text of 4096 bytes of UTF-8 at most. Thread: not the trainer's.
    """
    global _answer
    _answer = answer


class Queries:
    """Answers the questions of other ranks, and asks them. Logs answers to the engine's questions.

    The engine asks late ranks. A thread of its own answers, since the question may be about the
    trainer's thread; it lives while there are questions.

    Args:
        plane: this process's control plane. When it stops, no question is answered any more.
        labels: the name of each rank in messages.
    """

    def __init__(self, plane: ControlPlane, labels: Sequence[str]) -> None:
        self._plane, self._labels = plane, labels
        self._changed = threading.Condition()
        self._awaited: dict[int, str | None] = {}  # by number of the question
        plane.read_queries(self._read)

    def ask(self, ranks: Sequence[int], timeout_s: float) -> dict[int, str]:
        """Return the activities of the ranks that answer within `timeout_s` seconds."""
        numbers = {rank: self._ask(rank) for rank in ranks}
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(
                lambda: all(self._awaited[number] is not None for number in numbers.values()),
                max(0.0, deadline - time.monotonic()),
            )
            answers = {rank: self._awaited.pop(number) for rank, number in numbers.items()}
        return {rank: answer for rank, answer in answers.items() if answer is not None}

    def _ask(self, rank: int) -> int:
        with self._changed:  # before the answer comes
            number = self._plane.ask(rank)
            self._awaited[number] = None
            return number

    def _read(self, is_question: bool, rank: int, number: int, text: str) -> None:
        if is_question:
            self._plane.answer(rank, number, _answer_of(_answer))
            return
        with self._changed:
            if number in self._awaited:
                self._awaited[number] = text
                self._changed.notify_all()
                return
        if text:
            _log.warning("%s: %s", self._labels[rank], text)


def _answer_of(answer: Callable[[], str]) -> str:
    try:
        text = answer()
    except Exception as error:  # it matters only to the rank that asks
        text = f"cannot tell its activity: {error}"
    return text.encode(errors="replace").decode()  # a path may be no UTF-8


# TCP retransmits a lost segment five times within 6 s, and six times within 13 s.
FAREWELL_S = 10.0


@dataclass(eq=False)
class Connections:
    """One process's connections to the other ranks of its world, for all of its process sets.

    Attributes:
        rank: this process's rank.
        peers: every rank's description of itself.
        host_of: the host index of each rank.
        labels: the name of each rank in messages.
        token: an identifier shared by the ranks of this world alone; not secret.
        plane: the control plane, which knows the living ranks and makes connections for data; None
            in a world of one.
        is_private: whether only the ranks can know the key with which they connect.
        queries: the questions between ranks; None in a world of one.
        memory: the memory that the ranks of this host share; None if no host has several ranks.
        ucx_library: the UCX library for data between hosts; None: they travel over TCP.
        launch_order: the order in which the process sets use this process's devices.
        farewell_s: seconds for which a leaving rank waits for peers that do not hear its goodbye.
        engines: the engines of the running process sets.
        on_engine: functions that are called with each new engine.
    """

    rank: int = 0
    peers: Sequence[PeerInfo] = ()
    host_of: Sequence[int] = (0,)
    labels: Sequence[str] = field(default_factory=lambda: [f"rank 0 (pid {os.getpid()})"])
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    plane: ControlPlane | None = None
    queries: Queries | None = None
    memory: HostMemory | None = None
    is_private: bool = True
    ucx_library: str | None = None
    launch_order: LaunchOrder = field(default_factory=LaunchOrder)
    farewell_s: float = FAREWELL_S
    engines: WeakSet[Engine] = field(default_factory=WeakSet)
    on_engine: Callable[[Engine], None] | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.labels)

    @property
    def network(self) -> str:
        """The network between hosts, as the log names it.

        "TCP"; "TCP, TLS 1.3 (AES-128-GCM),"; "UCX 1.22.0 (rc_mlx5, tcp)".
        """
        if self.ucx_library is None:
            cipher = self.plane.cipher() if self.plane is not None else ""
            return f"TCP, TLS 1.3 ({cipher})," if cipher else "TCP"
        version, *transports = self.peers[self.rank].ucx.split()
        return f"UCX {version} ({', '.join(transports)})"

    def add_engine(self, engine: Engine) -> None:
        """Take note of a new engine."""
        self.engines.add(engine)
        if self.on_engine is not None:
            self.on_engine(engine)

    def close(self, why: str = "") -> None:
        """Say goodbye to the other ranks, with the reason `why`, and close all connections."""
        plane, self.plane, self.memory = self.plane, None, None
        if plane is not None:
            plane.stop(self.farewell_s, why)
        self.queries = None

    def abandon(self) -> None:
        """Abandon the parent's connections and memory in a forked child.

        While a child holds the connections, no other rank notices the parent's death; while it
        holds the memory, the host's shared memory stays allocated after its ranks have ended.
        """
        if self.plane is not None:
            self.plane.abandon()
        if self.memory is not None:
            self.memory.abandon()


# All unclosed connections, from their construction on: another thread may fork during init().
_open: WeakSet[Connections] = WeakSet()


def close_all_at_exit() -> None:
    """Close the connections of calls of daemon threads, which the interpreter ends next.

    OpenSSL frees its memory when the process exits: a control plane that still shakes hands would
    crash it.
    """
    for connections in list(_open):
        connections.farewell_s = 0.0
        connections.close()


def abandon_all_in_child() -> None:
    """Abandon the parent's connections. Call in a forked child."""
    for connections in list(_open):
        connections.abandon()
    _open.clear()


@dataclass
class Listeners:
    """The listening sockets of this rank.

    Attributes:
        info: this rank's description of itself, with the names of the listeners.
        tcp: the sockets for ranks of other hosts, one for each network interface.
        unix: the socket for ranks of this host.
    """

    info: PeerInfo
    tcp: list[socket.socket]
    unix: socket.socket


@contextlib.contextmanager
def listen(
    identity: Identity, config: Config, towards: str | None, unix: socket.socket
) -> Iterator[Listeners]:
    """Context in which this rank listens for the others; `connect` copies the listeners.

    Args:
        identity: this process.
        config: the settings.
        towards: a host to which the route leads to the other ranks, if known.
        unix: the socket for ranks of this host.

    Raises:
        InvalidArgumentError, RingError: the settings do not allow it, or a resource is missing.
    """
    _raise_descriptor_limit()
    shares = 0 if config.transport == "tcp" else _bytes_to_share(identity.rank, config)
    addresses = own_addresses(config.interface, towards, one_host=identity.on_one_node())
    with contextlib.ExitStack() as closing:
        tcp = [closing.enter_context(_listen_tcp(each, identity, config)) for each in addresses]
        ucx = own_ucx(config) if config.network != "tcp" else ""
        yield Listeners(_own_info(identity, shares, tcp, unix, ucx), tcp, unix)


def connect(
    config: Config,
    table: bytes,
    listeners: Listeners,
    path: FailurePath,
) -> Connections:
    """Connect this process to the other ranks.

    Args:
        config: the settings.
        table: the table of all ranks, on the leader of this machine; empty on other ranks.
        listeners: this rank's listening sockets.
        path: the path of failures. The leader passes the memory over its exchange of this host.

    Returns:
        The connections; those of the control plane are established.

    Raises:
        TimeoutError: ranks did not connect before the deadline; names them.
        RingError: this rank or another one has failed.
        InvalidArgumentError: the settings do not allow it.
    """
    rank, size = path.identity.rank, path.identity.size
    with contextlib.ExitStack() as cleanup:
        table, fd = _share_memory(path.host, table, config, rank, size)
        if fd >= 0:
            cleanup.enter_context(close_in_child(FileIO(fd)))
        peers, secret, is_private = parse_table(table, size)
        _require_addresses(peers)
        host_of = topology.host_of(peers, config.transport)
        shares = listeners.info.shares
        if config.transport != "tcp" and shares and (lack := topology.lack_of_memory(peers)):
            _log.log(logging.DEBUG if rank else logging.WARNING, "all ranks use TCP: %s", lack)
        labels = topology.labels(peers)
        is_ucx = len(set(host_of)) > 1 and uses_ucx(config, peers, labels)
        tls = config.tls != "0" and len(set(host_of)) > 1
        # A secret that MPI has sent came over the network that TLS is to protect from.
        if tls and not config.secret and len({peer.machine for peer in peers}) > 1:
            raise InvalidArgumentError(
                f"TORCH_RING_TLS={config.tls} needs a secret: set TORCH_RING_SECRET to the same "
                "random text on all ranks (`openssl rand -hex 32`; docs/security.md)"
            )
        if tls:
            with contextlib.suppress(ImportError):
                importlib.import_module("ssl")  # its OpenSSL, which may lie in Python's own folder
        token = hmac.digest(secret, b"token", hashlib.sha256).hex()[:32]
        connections = Connections(rank, peers, host_of, labels, token, is_private=is_private)
        connections.ucx_library = ucx_library(config) if is_ucx else None
        _open.add(connections)
        here = [other for other in range(size) if host_of[other] == host_of[rank]]
        with contextlib.ExitStack() as unless_connected:
            # Without this, the traceback of the error would keep the memory.
            unless_connected.callback(connections.close)
            if fd >= 0:
                connections.memory = HostMemory(os.dup(fd), here, rank)
            watched = watched_launcher(path.identity) if config.exit_with_launcher else (-1, "")
            connections.plane = ControlPlane(
                rank,
                host_of,
                connections.labels,
                [
                    (peer.socket, list(zip(peer.addresses, peer.ports, strict=True)))
                    for peer in peers
                ],
                hmac.digest(os.fsencode(config.secret), secret, hashlib.sha256),
                listeners.unix.fileno(),
                [each.fileno() for each in listeners.tcp] if len(here) < size else [],
                config.heartbeat_timeout_s,
                *watched,
                tls,
            )
            _wait_for_neighbours(connections, connections.plane, path)
            connections.queries = Queries(connections.plane, connections.labels)
            unless_connected.pop_all()
    return connections


def _wait_for_neighbours(connections: Connections, plane: ControlPlane, path: FailurePath) -> None:
    """Wait until the plane has all of its connections."""
    checked = time.monotonic()
    missing: list[int] = []
    for _ in pauses(path.deadline, connections.size):
        missing = plane.missing()
        if not missing:
            return
        if time.monotonic() > checked + 0.2:
            path.check()
            checked = time.monotonic()
    names = ", ".join(connections.labels[peer] for peer in missing[:8])
    reason = plane.trouble()
    is_on_loopback = is_loopback(connections.peers[connections.rank].address)
    if is_on_loopback and (lack := lack_of_loopback()):
        reason = (
            f"{socket.gethostname()} has {lack}, or set TORCH_RING_INTERFACE to another interface"
        )
    raise TimeoutError(
        f"{connections.labels[connections.rank]} has no connection with {len(missing)} of its "
        f"peers, {names}, {path.deadline}" + (f": {reason}" if reason else "")
    )


# --- the memory of this host


def _bytes_to_share(rank: int, config: Config) -> int:
    """Return the number of bytes of shared memory that this process can map; 0: it shares none."""
    try:
        memory = make_memory(1, b"", least_memory(1))
        try:
            _require_to_pass(memory)
        finally:
            os.close(memory)
        if not (shares := mappable_bytes()):
            raise RingError("no address space is left: raise `ulimit -v`")
        return shares
    except (OSError, RingError) as error:
        reason = str(lacking(error, rank) or error).removeprefix(f"rank {rank}: ")
        if config.transport == "shm":
            raise RingError(
                f"rank {rank}: TORCH_RING_TRANSPORT=shm, but there is no shared memory: {reason}"
            ) from error
        _log.warning("rank %d has no shared memory, so all ranks use TCP: %s", rank, reason)
        return 0


def _require_to_pass(fd: int) -> None:
    """Raise RingError if descriptors cannot be passed over Unix sockets."""
    ours, theirs = map(FrameSocket, socket.socketpair())
    with contextlib.closing(ours), contextlib.closing(theirs):
        ours.send(Kind.DATA, Deadline(0.0), fds=[fd])
        try:
            os.close(theirs.receive()[0].fds[0])
        except ValueError:
            os.close(os.dup(fd))  # OSError: there is none left to receive it
            raise RingError("descriptors cannot be passed over Unix sockets") from None


def _share_memory(
    host: HostLeader | HostFollower, table: bytes, config: Config, rank: int, size: int
) -> tuple[bytes, int]:
    """Return the table of all ranks, and the descriptor of this host's memory, or -1.

    The leader of the host makes the memory; the others receive it, and read the table there.
    """
    if not table:
        frame = host.receive()
        return (memory_table(frame.fds[0]), frame.fds[0]) if frame.fds else (frame.payload, -1)
    assert isinstance(host, HostLeader)
    peers = parse_table(table, size).peers
    hosts = topology.host_of(peers, config.transport)
    if len(set(hosts)) == size:
        host.broadcast(table)
        return table, -1
    here = [peer for peer in peers if hosts[peer.rank] == hosts[rank]]
    fd = make_memory(len(here), table, min(peer.shares for peer in here))
    try:
        host.broadcast(fds=[fd])
    except BaseException:
        os.close(fd)
        raise
    return table, fd


# --- this rank's descriptors, peer info and listeners


def _raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors: each rank or stranger that connects needs some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a lack of descriptors is reported later
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _own_info(
    identity: Identity,
    shares: int,
    tcp: Sequence[socket.socket],
    unix: socket.socket,
    ucx: str,
) -> PeerInfo:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError as error:
        raise RingError(
            f"rank {identity.rank} on {socket.gethostname()} cannot tell which ranks share its "
            f"host: {error}. Mount /proc there (`mount -t proc proc /proc`)"
        ) from None
    return PeerInfo(
        rank=identity.rank,
        # The namespace of abstract Unix sockets, over which memory is passed.
        machine=f"{boot}/{namespace}",
        shares=shares,
        node=identity.node,
        local_rank=identity.local_rank,
        local_size=identity.local_size,
        pid=os.getpid(),
        addresses=[each.getsockname()[0] for each in tcp],
        ports=[each.getsockname()[1] for each in tcp],
        socket=unix.getsockname()[1:].decode(),
        cpus=f"{sum(1 << cpu for cpu in os.sched_getaffinity(0)):x}",
        ucx=ucx,
    )


def _listen_tcp(address: str, identity: Identity, config: Config) -> socket.socket:
    """Listen on an interface of the job, and no other."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        if config.interface:
            raise InvalidArgumentError(
                f"TORCH_RING_INTERFACE={config.interface}: cannot listen at {address}: {error}"
            ) from None
        if error.errno == errno.EADDRINUSE:
            cure = (
                "all ports that the system gives away are taken: see `ss -tan`, or widen "
                "net.ipv4.ip_local_port_range"
            )
        elif (
            error.errno == errno.EADDRNOTAVAIL
            and is_loopback(address)
            and (lack := lack_of_loopback())
        ):
            cure = f"it has {lack}"
        else:
            raise
        raise RingError(
            f"rank {identity.rank} cannot listen at {address} of its host {socket.gethostname()}: "
            f"{cure}"
        ) from None
    listener.setblocking(False)
    return close_in_child(listener)


def _require_addresses(peers: Sequence[PeerInfo]) -> None:
    """Raise RingError on all ranks if addresses do not reach other hosts, or do not pair up."""
    for peer in peers:
        counts = [len(each.addresses) for each in (peers[0], peer)]
        if counts[0] != counts[1]:
            raise RingError(
                f"the numbers of network interfaces differ: rank 0's host {peers[0].address} has "
                f"{counts[0]}, and rank {peer.rank}'s host {peer.address} has {counts[1]}: set "
                "TORCH_RING_INTERFACE to equally many on all hosts"
            )
        for one, another in zip(peers[0].addresses, peer.addresses, strict=True):
            if counts[0] > 1 and (":" in one) != (":" in another):
                raise RingError(
                    f"the connections of one network interface lead from {one} of rank 0's host to "
                    f"{another} of rank {peer.rank}'s, and only one of them is an IPv6 address: "
                    "set TORCH_RING_INTERFACE to interfaces, or addresses, of one kind"
                )
    if len({peer.machine for peer in peers}) == 1:
        return
    first: dict[str, PeerInfo] = {}
    for peer in peers:
        for address in peer.addresses:
            other = first.setdefault(address, peer)
            if is_loopback(address):
                wrong = f"rank {peer.rank}'s host has no other address than {address}, at which"
            elif other.machine != peer.machine:
                wrong = (
                    f"the hosts of rank {other.rank} and rank {peer.rank} have the same address "
                    f"{address}, at which"
                )
            else:
                continue
            raise RingError(
                f"{wrong} the ranks of other hosts do not find it: set TORCH_RING_INTERFACE there "
                "to the name or the address of an interface that they reach (`ip -br addr` lists "
                "them)"
            )
