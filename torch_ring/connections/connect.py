"""connect_full_mesh: sockets between all ranks of a world, and shared memory inside hosts.

Of two ranks the lower one accepts and the higher one connects. Every pair has a control connection:
TCP between hosts, inside a host a Unix socket, over which its lowest rank passes the memory of the
host. Pairs on the same lane (index within the host) of different hosts have data connections, too:
as many as TORCH_RING_CONNECTIONS says.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import resource
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_ring._C import make_memory
from torch_ring.config import Config
from torch_ring.connections import topology
from torch_ring.connections.connector import Connector, run
from torch_ring.connections.full_mesh import FullMesh
from torch_ring.connections.peer_info import PeerInfo
from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.rendezvous.exchange import SetupExchange
from torch_ring.rendezvous.launchers import Identity
from torch_ring.rendezvous.network import own_address, receive_fds
from torch_ring.rendezvous.store import Rendezvous

__all__ = ["connect_full_mesh", "sit_out"]

_log = logging.getLogger("torch_ring")

_HUGE_PAGE = 2 << 20
_BACKLOG = 4096  # the kernel's limit, /proc/sys/net/core/somaxconn, is lower as a rule

_PEER_INFO, _CONNECTED = "peer_info", "connected"  # the gathers of connect_full_mesh


def connect_full_mesh(
    identity: Identity,
    config: Config,
    rendezvous: Rendezvous,
    exchange: SetupExchange,
    *,
    labels: Sequence[str] = (),
    common: Mapping[str, Any] | None = None,
) -> FullMesh:
    """Connect this rank to all others.

    Args:
        identity: this process among those to connect.
        config: the settings.
        rendezvous: the store's host, and the secret of the job.
        exchange: gathers the ranks' `PeerInfo`.
        labels: the ranks' names in messages; by default made of their `PeerInfo`.
        common: values besides the settings that must be the same on all ranks, by name.

    Returns:
        The mesh; every rank has all of its connections by then.

    Raises:
        TimeoutError: ranks did not arrive, or did not connect, before the deadline; names them.
        RingError: another rank has failed, or this one has.
        InvalidArgumentError, MismatchError: the settings do not allow it, or differ.
    """
    mesh = FullMesh()
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(mesh.close)
        shares = config.transport != "tcp" and _can_share(identity, config)
        with _listen_tcp(identity, config, rendezvous) as tcp, _listen_unix() as unix:
            own = _own_info(identity, config, shares, tcp, unix, common or {})
            texts = exchange.gather(_PEER_INFO, own.to_json())
            peers = [PeerInfo.from_json(rank, text) for rank, text in enumerate(texts)]
            topology.require_agreement(peers)
            mesh.peers = peers
            mesh.host_of = topology.host_of(peers, config.transport)
            mesh.labels = list(labels) or topology.labels(peers)
            mesh.may_spin = topology.may_spin(identity.rank, peers)
            neighbours = mesh.ranks_of_host(identity.rank)
            if len(set(mesh.host_of)) < len(peers) and neighbours[0] == identity.rank:
                mesh.memory = make_memory(len(neighbours), b"")
            secret = (config.secret or rendezvous.secret).encode()
            key = hmac.digest(secret, bytes.fromhex(peers[0].nonce), hashlib.sha256)
            connector = Connector(identity.rank, key, mesh, exchange, config.connections)
            run(connector.connect_all([tcp, unix]))
        exchange.gather(_CONNECTED, "")
        cleanup.pop_all()
    return mesh


def sit_out(exchange: SetupExchange) -> None:
    """Take part in the gathers of `connect_full_mesh` with nothing to connect."""
    exchange.gather(_PEER_INFO, "")
    exchange.gather(_CONNECTED, "")


# --- whether this rank shares memory, its peer info and listeners


def _can_share(identity: Identity, config: Config) -> bool:
    """Return whether this rank can make, map and pass the memory of its host."""
    rank = identity.rank
    received: list[int] = []
    try:
        memory = make_memory(identity.local_size or identity.size, b"")
        try:
            # Room to align it, too.
            _require_address_space(os.fstat(memory).st_size + _HUGE_PAGE)
            ours, theirs = socket.socketpair()
            with ours, theirs:
                socket.send_fds(ours, [b"?"], [memory])
                received = receive_fds(theirs, 1)
        finally:
            for fd in (memory, *received):
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
            f"`ulimit -v` allows {limit - used >> 20} MiB of address space more, but the memory of "
            f"all ranks of the host needs {needed >> 20} MiB"
        )


def _own_info(
    identity: Identity,
    config: Config,
    shares: bool,
    tcp: socket.socket,
    unix: socket.socket,
    common: Mapping[str, Any],
) -> PeerInfo:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return PeerInfo(
        rank=identity.rank,
        # The namespace of abstract Unix sockets, over which memory is passed.
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
    """Listen on the interface of the job, and no other."""
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
