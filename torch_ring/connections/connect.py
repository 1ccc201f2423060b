"""connect_full_mesh: sockets between all ranks of a world, and shared memory inside hosts.

Of two ranks the lower one accepts and the higher one connects. Every pair has a control connection:
TCP between hosts, inside a host a Unix socket, over which memory and doorbells are passed. Pairs on
the same lane (index within the host) of different hosts have data connections, too: as many as
TORCH_RING_CONNECTIONS says.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_ring._C import make_doorbell, make_memory
from torch_ring.config import Config
from torch_ring.connections import topology
from torch_ring.connections.connector import Connector, run
from torch_ring.connections.full_mesh import FullMesh
from torch_ring.connections.peer_info import PeerInfo, parse_table
from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.rendezvous.exchange import SetupExchange
from torch_ring.rendezvous.launchers import Identity
from torch_ring.rendezvous.meeting import Meeting
from torch_ring.rendezvous.network import own_address, receive_fds

__all__ = ["Met", "connect_full_mesh", "meet"]

_log = logging.getLogger("torch_ring")

_HUGE_PAGE = 2 << 20
_BACKLOG = 4096  # the kernel's limit, /proc/sys/net/core/somaxconn, is lower as a rule


@dataclass(frozen=True)
class Met:
    """What the ranks know of one another before they connect.

    Attributes:
        peers: all ranks, in order.
        secret: known to these ranks.
    """

    peers: list[PeerInfo]
    secret: bytes


def meet(meeting: Meeting, config: Config, common: dict[str, object], own: PeerInfo) -> Met:
    """Tell the other ranks of this one in a meeting, and learn of all of them.

    Args:
        meeting: where the ranks meet.
        config: the settings.
        common: values besides them that must be the same on all ranks, by name.
        own: this rank.
    """
    meeting.meet(own.card(), {**config.common(), **common})
    table, _ = meeting.pass_down(meeting.table)
    return Met(*parse_table(table, meeting.size))


def connect_full_mesh(
    identity: Identity,
    config: Config,
    towards: str | None,
    exchange: SetupExchange,
    publish: Callable[[PeerInfo], Met],
    *,
    labels: Sequence[str] = (),
) -> FullMesh:
    """Connect this rank to all others.

    Args:
        identity: this process among those to connect.
        config: the settings.
        towards: a host to which the route leads to the other ranks, if known.
        exchange: reports failures of other ranks, and has the deadline.
        publish: tells the other ranks of this one; returns what they tell.
        labels: the ranks' names in messages; by default made of their `PeerInfo`.

    Returns:
        The mesh; this rank has all of its connections.

    Raises:
        TimeoutError: ranks did not arrive, or did not connect, before the deadline; names them.
        RingError: another rank has failed, or this one has.
        InvalidArgumentError, MismatchError: the settings do not allow it, or differ.
    """
    mesh = FullMesh()
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(mesh.close)
        shares = config.transport != "tcp" and _make_memory(identity, mesh, config)
        with _listen_tcp(identity, config, towards) as tcp, _listen_unix() as unix:
            met = publish(_own_info(identity, shares, tcp, unix))
            mesh.peers = peers = met.peers
            mesh.host_of = topology.host_of(peers, config.transport)
            mesh.labels = list(labels) or topology.labels(peers)
            mesh.may_spin = topology.may_spin(identity.rank, peers)
            key = hmac.digest(config.secret.encode(), met.secret, hashlib.sha256)
            connector = Connector(identity.rank, key, mesh, exchange, config.connections)
            run(connector.connect_all([tcp, unix]))
        cleanup.pop_all()
    return mesh


# --- this rank's memory, peer info and listeners


def _make_memory(identity: Identity, mesh: FullMesh, config: Config) -> bool:
    """Make this rank's memory and doorbell; return whether it can pass them to others."""
    rank = identity.rank
    try:
        mesh.memory[rank] = make_memory()
        each = os.fstat(mesh.memory[rank]).st_size
        mapped = each * (identity.local_size or identity.size)
        _require_address_space(mapped + _HUGE_PAGE)  # room to align one of them
        mesh.doorbells[rank] = make_doorbell()
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
            f"`ulimit -v` allows {limit - used >> 20} MiB of address space more, but the memory of "
            f"all ranks of the host needs {needed >> 20} MiB"
        )


def _own_info(
    identity: Identity, shares: bool, tcp: socket.socket, unix: socket.socket
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
    )


def _listen_tcp(identity: Identity, config: Config, towards: str | None) -> socket.socket:
    """Listen on the interface of the job, and no other."""
    address = own_address(config.interface, towards, one_host=identity.on_one_node())
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
    listener.bind(f"\0torch_ring/{secrets.token_hex(8)}")
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener
