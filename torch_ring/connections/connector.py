"""Connector: opens and accepts the connections of one rank, and passes memory over them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch_ring._C import lane_peers
from torch_ring.connections import handshake
from torch_ring.connections.full_mesh import FullMesh
from torch_ring.connections.handshake import CONTROL
from torch_ring.errors import PeerLostError, TimeoutError
from torch_ring.rendezvous.exchange import SetupExchange
from torch_ring.rendezvous.network import receive_fds, require_same_user

__all__ = ["Connector", "run"]

_log = logging.getLogger("torch_ring")

_STRANGER_S = 5.0  # seconds within which an accepted connection must authenticate itself
_STRANGERS = 256  # accepted connections that may be unauthenticated at a time


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, even if an event loop runs already (a notebook, a Ray actor)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        _run_here(work)
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_run_here, work).result()


def _run_here(work: Coroutine[Any, Any, None]) -> None:
    # asyncio.run() would leave the program's main thread without an event loop.
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


class Connector:
    """Opens and accepts the connections of one rank.

    Each connection has a task of its own, so that a silent peer delays no other.

    Args:
        rank: this process.
        key: the key with which the ranks of this world authenticate one another.
        mesh: takes the connections.
        exchange: reports failures of other ranks, and has the deadline.
        data_connections: the number of them to each rank on the same lane of another host.
    """

    def __init__(
        self,
        rank: int,
        key: bytes,
        mesh: FullMesh,
        exchange: SetupExchange,
        data_connections: int,
    ) -> None:
        self._rank = rank
        self._key = key
        self._mesh = mesh
        self._exchange = exchange
        ranks = range(len(mesh.peers))
        data = range(CONTROL + 1, CONTROL + 1 + data_connections)
        self._missing = {(peer, CONTROL) for peer in ranks if peer != rank}
        self._missing |= {(peer, c) for peer in lane_peers(rank, mesh.host_of) for c in data}
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers = asyncio.Semaphore(_STRANGERS)
        self._ended = asyncio.Event()
        self._failure: BaseException | None = None
        self._reason: OSError | None = None  # why the last attempt to connect failed

    async def connect_all(self, listeners: Sequence[socket.socket]) -> None:
        """Open and accept all connections, and receive the descriptors that come over them."""
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
        """Raise failures of other ranks, and TimeoutError at the deadline."""
        while not self._exchange.deadline.passed():
            await asyncio.sleep(0.2)
            self._exchange.check()
        late = sorted({peer for peer, _ in self._missing})
        names = ", ".join(self._mesh.labels[peer] for peer in late[:8])
        raise TimeoutError(
            f"{self._mesh.labels[self._rank]} has no connection with {len(late)} of its peers, "
            f"{names}, {self._exchange.deadline}" + (f": {self._reason}" if self._reason else "")
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
                    # The peer listened before it published its address: it has stopped since.
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
        """Return an unconnected socket, and the address to connect it to."""
        info = self._mesh.peers[peer]
        address: Any = (info.address, info.port)
        family = socket.AF_INET6 if ":" in info.address else socket.AF_INET
        if self._mesh.host_of[peer] == self._mesh.host_of[self._rank]:
            family, address = socket.AF_UNIX, "\0" + info.socket
        connection = socket.socket(family)
        connection.setblocking(False)
        return connection, address

    async def _add(self, peer: int, channel: int, connection: socket.socket) -> None:
        if channel == CONTROL:
            if connection.family == socket.AF_UNIX:
                await self._share_memory(peer, connection)
            self._mesh.control[peer] = connection
        else:
            self._mesh.data.setdefault(peer, {})[channel] = connection
        self._missing.discard((peer, channel))
        if not self._missing:
            self._ended.set()

    async def _share_memory(self, peer: int, connection: socket.socket) -> None:
        """Pass the host's memory to a peer, if this rank has made it, or receive it."""
        mesh = self._mesh
        maker = mesh.ranks_of_host(self._rank)[0]
        if maker == self._rank:
            with contextlib.suppress(ConnectionError):  # the watchdog will see that it has exited
                socket.send_fds(connection, [b"M"], [mesh.memory])
        elif maker == peer:
            received: list[int] = []
            with contextlib.suppress(ConnectionError):  # treated like no descriptor
                await handshake.readable(connection)
                received = receive_fds(connection, 1)
            if not received:
                raise PeerLostError(f"{mesh.labels[peer]} has exited before it passed its memory")
            (mesh.memory,) = received
