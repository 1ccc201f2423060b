"""Connects the ranks: sockets between all of them, shared memory among those of a host.

Of two ranks the lower one accepts and the higher one connects. Every pair has a control connection
(a Unix socket inside a host, by which memory and doorbells are passed, TCP otherwise); pairs on the
same lane of different hosts have data connections, too: one, unless the settings say otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import resource
import secrets
import socket
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_ring import _C, cards, handshake
from torch_ring.cards import Card
from torch_ring.config import Config
from torch_ring.errors import InvalidArgumentError, PeerLostError, RingError, TimeoutError
from torch_ring.handshake import CONTROL
from torch_ring.launchers import Identity
from torch_ring.meeting import Meeting
from torch_ring.network import own_address, receive_fds, require_same_user
from torch_ring.rendezvous import Rendezvous
from torch_ring.set_meeting import SetMeeting

__all__ = ["Mesh", "connect"]

_log = logging.getLogger("torch_ring")

_STRANGER_S = 5.0  # what a connection may cost before it has proved who it is
_STRANGERS = 256  # how many of those may be here at a time
_BACKLOG = 4096  # the kernel's limit, /proc/sys/net/core/somaxconn, is lower as a rule


@dataclass
class Mesh:
    """What the native engine needs to know; owns the descriptors until release().

    Attributes:
        cards: by rank; empty if this is the only one.
        control: connections by rank.
        data: connections by rank and channel.
        memory, doorbells: memfds and eventfds by rank, of this host, this rank's included.
    """

    cards: list[Card] = field(default_factory=list)
    host_of: list[int] = field(default_factory=lambda: [0])
    labels: list[str] = field(default_factory=lambda: [f"rank 0 (pid {os.getpid()})"])
    may_spin: bool = True
    data: dict[int, dict[int, socket.socket]] = field(default_factory=dict)
    control: dict[int, socket.socket] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)
    doorbells: dict[int, int] = field(default_factory=dict)

    def release(self) -> dict[str, list[Any]]:
        """Return the descriptors by rank; the caller owns them now.

        Where there is none stands -1, but for data, of which each rank has a list.
        """
        ranks = range(len(self.host_of))
        by_channel = [sorted(self.data.pop(r, {}).items()) for r in ranks]
        data = [[connection.detach() for _, connection in channels] for channels in by_channel]
        control = [self.control.pop(r).detach() if r in self.control else -1 for r in ranks]
        memory, doorbells = (
            [fds.pop(r, -1) for r in ranks] for fds in (self.memory, self.doorbells)
        )
        return {"data": data, "memory": memory, "doorbells": doorbells, "control": control}

    def close(self) -> None:
        """Close what has not been released."""
        for sockets in (self.control, *self.data.values()):
            while sockets:
                sockets.popitem()[1].close()
        for fds in (self.memory, self.doorbells):
            while fds:
                os.close(fds.popitem()[1])


def connect(
    identity: Identity,
    config: Config,
    rendezvous: Rendezvous,
    meeting: Meeting | SetMeeting,
    *,
    labels: Sequence[str] = (),
    common: Mapping[str, Any] | None = None,
) -> Mesh:
    """Connect this rank to all others.

    Args:
        identity: this process among those to connect.
        config: the settings.
        rendezvous: where they met, and the secret that they share.
        meeting: what they tell one another by.
        labels: what to call the ranks; else they are called by their cards.
        common: what must be the same on all ranks besides settings, by name.

    Returns:
        The mesh, when those of all ranks are complete.

    Raises:
        TimeoutError: ranks did not arrive, or did not connect, before the deadline; names them.
        RingError: another rank has failed, or this one has.
        InvalidArgumentError, MismatchError: the settings do not allow it, or differ.
    """
    mesh = Mesh()
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(mesh.close)
        shares = config.transport != "tcp" and _make_memory(identity, mesh, config)
        with _listen_tcp(identity, config, rendezvous) as tcp, _listen_unix() as unix:
            card = _make_card(identity, config, shares, tcp, unix, common or {})
            texts = meeting.gather("cards", card.to_json())
            mesh.cards = [Card.from_json(rank, text) for rank, text in enumerate(texts)]
            cards.require_agreement(mesh.cards)
            mesh.host_of = cards.host_of(mesh.cards, config.transport)
            mesh.labels = list(labels) or cards.labels(mesh.cards)
            mesh.may_spin = cards.may_spin(identity.rank, mesh.cards)
            nonce = bytes.fromhex(mesh.cards[0].nonce)
            secret = (config.secret or rendezvous.secret).encode()
            key = hmac.digest(secret, nonce, hashlib.sha256)
            connector = _Connector(identity.rank, key, mesh, meeting, config.connections)
            _run(connector.connect_all([tcp, unix]))
        meeting.gather("connected", "")
        cleanup.pop_all()
    return mesh


# --- what this rank has to offer


def _make_memory(identity: Identity, mesh: Mesh, config: Config) -> bool:
    """Make this rank's memory and doorbell; return whether they can be had, and passed on."""
    rank = identity.rank
    try:
        mesh.memory[rank] = _C.make_memory()
        each = os.fstat(mesh.memory[rank]).st_size
        _require_address_space(each * (identity.local_size or identity.size))
        mesh.doorbells[rank] = _C.make_doorbell()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(ours, [b"?"], [mesh.memory[rank]])
            received = receive_fds(theirs, 1)
        for fd in received:
            os.close(fd)
        return bool(received)
    except (OSError, RingError) as error:
        if config.transport == "shm":
            raise RingError(
                f"TORCH_RING_TRANSPORT=shm, but there is no shared memory: {error}"
            ) from error
        _log.warning("rank %d has no shared memory, so all ranks use TCP: %s", rank, error)
        return False


def _require_address_space(needed: int) -> None:
    """Raise RingError if this process may not map `needed` more bytes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if limit != resource.RLIM_INFINITY and used + needed > limit:
        raise RingError(
            f"`ulimit -v` allows {limit - used >> 20} MiB of addresses more, and to map the memory "
            f"of all ranks of the host takes {needed >> 20} MiB"
        )


def _make_card(
    identity: Identity,
    config: Config,
    shares: bool,
    tcp: socket.socket,
    unix: socket.socket,
    common: Mapping[str, Any],
) -> Card:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Card(
        rank=identity.rank,
        # Where abstract Unix sockets are known: by which memory is passed.
        machine=f"{boot}/{os.stat('/proc/self/ns/net').st_ino}",
        shares=shares,
        node=identity.node,
        local_rank=identity.local_rank,
        local_size=identity.local_size,
        pid=os.getpid(),
        address=tcp.getsockname()[0],
        port=tcp.getsockname()[1],
        socket=unix.getsockname()[1:].decode(),
        cpus=f"{sum(1 << cpu for cpu in os.sched_getaffinity(0)):x}",
        nonce=secrets.token_hex(32),
        settings={**config.common(), **common},
    )


def _listen_tcp(identity: Identity, config: Config, rendezvous: Rendezvous) -> socket.socket:
    """Listen on the interface of the job only."""
    address = own_address(config.interface, rendezvous.host, one_host=identity.on_one_node())
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        if config.interface:
            raise InvalidArgumentError(
                f"TORCH_RING_INTERFACE={config.interface}: cannot listen there: {error}"
            ) from None
        raise
    listener.setblocking(False)
    return listener


def _listen_unix() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0torch_ring/{secrets.token_hex(16)}")
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


# --- connections


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, also where an event loop runs already (a notebook, a Ray actor)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        _run_here(work)
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_run_here, work).result()


def _run_here(work: Coroutine[Any, Any, None]) -> None:
    # Not asyncio.run(), which leaves the program's main thread without an event loop.
    loop = asyncio.SelectorEventLoop()
    try:
        task = loop.create_task(work)
        try:
            loop.run_until_complete(task)
        finally:
            task.cancel()  # it is pending after a KeyboardInterrupt
            loop.run_until_complete(asyncio.wait([task]))
    finally:
        loop.close()


class _Connector:
    """Makes the connections of one rank, each in a task of its own: a silent one delays nobody."""

    def __init__(
        self,
        rank: int,
        key: bytes,
        mesh: Mesh,
        meeting: Meeting | SetMeeting,
        data_connections: int,
    ) -> None:
        self._rank = rank
        self._key = key
        self._mesh = mesh
        self._meeting = meeting
        ranks = range(len(mesh.cards))
        data = range(CONTROL + 1, CONTROL + 1 + data_connections)
        self._missing = {(peer, CONTROL) for peer in ranks if peer != rank}
        self._missing |= {(peer, c) for peer in _C.lane_peers(rank, mesh.host_of) for c in data}
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers = asyncio.Semaphore(_STRANGERS)
        self._ended = asyncio.Event()
        self._failure: BaseException | None = None
        self._reason: OSError | None = None  # why the last attempt to connect failed

    async def connect_all(self, listeners: Sequence[socket.socket]) -> None:
        """Return when every connection is there, and the descriptors that come over it."""
        for listener in listeners:
            self._start(self._accept(listener))
        for peer, channel in sorted(self._missing):
            if peer < self._rank:
                self._start(self._connect(peer, channel))
        self._start(self._watch())
        try:
            await self._ended.wait()
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if self._failure:
            raise self._failure

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        def finished(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and task.exception():
                self._failure = self._failure or task.exception()
                self._ended.set()

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(finished)

    async def _watch(self) -> None:
        """Look out for failures of other ranks, and for the time."""
        while not self._meeting.deadline.passed():
            await asyncio.sleep(0.2)
            self._meeting.check()
        late = sorted({peer for peer, _ in self._missing})
        names = ", ".join(self._mesh.labels[peer] for peer in late[:8])
        raise TimeoutError(
            f"{self._mesh.labels[self._rank]} has no connection with {len(late)} of its peers, "
            f"{names}, {self._meeting.deadline}" + (f": {self._reason}" if self._reason else "")
        )

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await self._strangers.acquire()
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            self._start(self._welcome(connection))

    async def _welcome(self, connection: socket.socket) -> None:
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(connection.close)
            try:
                if connection.family == socket.AF_UNIX:
                    require_same_user(connection)
                peer, channel = await asyncio.wait_for(
                    handshake.accept(connection, self._key, self._rank), _STRANGER_S
                )
                if peer < self._rank or (peer, channel) not in self._missing:
                    raise ValueError(f"rank {peer} is not expected to connect")
            except (OSError, ValueError, asyncio.TimeoutError) as error:
                _log.debug("rank %d dropped a connection: %s", self._rank, error)
                return
            finally:
                self._strangers.release()
            await self._add(peer, channel, connection)
            cleanup.pop_all()

    async def _connect(self, peer: int, channel: int) -> None:
        while True:
            with contextlib.ExitStack() as cleanup:
                try:
                    connection, address = self._socket_for(peer)
                    cleanup.callback(connection.close)
                    await asyncio.get_running_loop().sock_connect(connection, address)
                    await handshake.connect(connection, self._key, self._rank, peer, channel)
                except ConnectionRefusedError as error:
                    # It listened before its card was published, and stops when all is done.
                    raise PeerLostError(
                        f"{self._mesh.labels[peer]} has exited during init: {error}"
                    ) from None
                except OSError as error:
                    self._reason = error
                    await asyncio.sleep(0.05)
                    continue
                await self._add(peer, channel, connection)
                cleanup.pop_all()
                return

    def _socket_for(self, peer: int) -> tuple[socket.socket, Any]:
        """Return an unconnected socket, and what to connect it to."""
        card = self._mesh.cards[peer]
        address: Any = (card.address, card.port)
        family = socket.AF_INET6 if ":" in card.address else socket.AF_INET
        if self._mesh.host_of[peer] == self._mesh.host_of[self._rank]:
            family, address = socket.AF_UNIX, "\0" + card.socket
        connection = socket.socket(family)
        connection.setblocking(False)
        return connection, address

    async def _add(self, peer: int, channel: int, connection: socket.socket) -> None:
        if channel == CONTROL:
            if connection.family == socket.AF_UNIX:
                await self._swap_memory(peer, connection)
            self._mesh.control[peer] = connection
        else:
            self._mesh.data.setdefault(peer, {})[channel] = connection
        self._missing.discard((peer, channel))
        if not self._missing:
            self._ended.set()

    async def _swap_memory(self, peer: int, connection: socket.socket) -> None:
        """Pass this rank's memory and doorbell to a peer, and take its."""
        mesh = self._mesh
        own = [mesh.memory[self._rank], mesh.doorbells[self._rank]]
        received: list[int] = []
        with contextlib.suppress(ConnectionError):  # the same as if nothing comes
            socket.send_fds(connection, [b"M"], own)
            await handshake.readable(connection)
            received = receive_fds(connection, 2)
        if len(received) != 2:
            for fd in received:
                os.close(fd)
            raise PeerLostError(f"{mesh.labels[peer]} has exited before it passed its memory")
        mesh.memory[peer], mesh.doorbells[peer] = received
