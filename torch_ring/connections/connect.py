"""connect: the control plane and the shared memory of this process, in a new world.

The leader of a host makes its memory, with the table of all ranks in it, and passes it to the
others. The control plane then connects to O(log n) ranks, and makes connections for data when they
are first used.
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
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_ring._C import ControlPlane, HostMemory, make_memory, memory_table
from torch_ring.config import Config
from torch_ring.connections import topology
from torch_ring.connections.connections import Connections
from torch_ring.connections.peer_info import PeerInfo, parse_table
from torch_ring.errors import InvalidArgumentError, RingError, TimeoutError
from torch_ring.rendezvous.deadline import pauses
from torch_ring.rendezvous.launchers import Identity
from torch_ring.rendezvous.meeting import Meeting
from torch_ring.rendezvous.network import own_address, receive_fds
from torch_ring.rendezvous.parent import watched_launcher

__all__ = ["connect"]

_log = logging.getLogger("torch_ring")

_HUGE_PAGE = 2 << 20
_BACKLOG = 4096  # the kernel's limit, /proc/sys/net/core/somaxconn, is lower as a rule
_SPARE_DESCRIPTORS = 512  # of this library's connections; twice log2(n), and those for data


def connect(
    identity: Identity,
    config: Config,
    towards: str | None,
    meeting: Meeting,
    common: Mapping[str, Any],
) -> Connections:
    """Connect this process to the other ranks.

    Args:
        identity: this process.
        config: the settings.
        towards: a host to which the route leads to the other ranks, if known.
        meeting: where the ranks meet; reports their failures, and has the deadline.
        common: values besides the settings that must be the same on all ranks, by name.

    Returns:
        The connections: the control plane's are made.

    Raises:
        TimeoutError: ranks did not arrive, or did not connect, before the deadline; names them.
        RingError: another rank has failed, or this one has.
        InvalidArgumentError, MismatchError: the settings do not allow it, or differ.
    """
    rank, size = identity.rank, identity.size
    _raise_descriptor_limit(identity, config)
    with contextlib.ExitStack() as cleanup:
        shares = config.transport != "tcp" and _can_share(identity, config)
        tcp = cleanup.enter_context(_listen_tcp(identity, config, towards))
        unix = cleanup.enter_context(_listen_unix())
        meeting.meet(_own_info(identity, shares, tcp, unix).card(), {**config.common(), **common})
        table, fd = _share_memory(meeting, config, rank, size)
        if fd >= 0:
            cleanup.callback(os.close, fd)
        peers, secret = parse_table(table, size)
        host_of = topology.host_of(peers, config.transport)
        connections = Connections(rank, peers, host_of, topology.labels(peers))
        here = [other for other in range(size) if host_of[other] == host_of[rank]]
        with contextlib.ExitStack() as unless_connected:
            # Otherwise the traceback of the error would keep the memory.
            unless_connected.callback(connections.close)
            if fd >= 0:
                connections.memory = HostMemory(os.dup(fd), here, rank)
            watched = watched_launcher(identity) if config.exit_with_launcher else (-1, "")
            connections.plane = ControlPlane(
                rank,
                host_of,
                connections.labels,
                [(peer.socket, peer.address, peer.port) for peer in peers],
                hmac.digest(config.secret.encode(), secret, hashlib.sha256),
                unix.detach() if len(here) > 1 else -1,
                tcp.detach() if len(here) < size else -1,
                config.heartbeat_timeout_s,
                *watched,
            )
            _wait_for_neighbours(connections, connections.plane, meeting)
            unless_connected.pop_all()
    return connections


def _wait_for_neighbours(connections: Connections, plane: ControlPlane, meeting: Meeting) -> None:
    """Wait until the plane has all of its connections."""
    checked = time.monotonic()
    missing: list[int] = []
    for _ in pauses(meeting.deadline, connections.size):
        missing = plane.missing()
        if not missing:
            return
        if time.monotonic() > checked + 0.2:
            meeting.check()
            checked = time.monotonic()
    names = ", ".join(connections.labels[peer] for peer in missing[:8])
    reason = plane.trouble()
    raise TimeoutError(
        f"{connections.labels[connections.rank]} has no connection with {len(missing)} of its "
        f"peers, {names}, {meeting.deadline}" + (f": {reason}" if reason else "")
    )


# --- the memory of this host


def _can_share(identity: Identity, config: Config) -> bool:
    """Return whether this process can share memory with others of its host."""
    rank = identity.rank
    try:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        limited = limit != resource.RLIM_INFINITY
        ranks = identity.local_size or identity.size
        memory = make_memory(ranks if limited else 1, b"")
        try:
            if limited:
                _require_address_space(os.fstat(memory).st_size + _HUGE_PAGE, limit)
            return _can_pass(memory)
        finally:
            os.close(memory)
    except (OSError, RingError) as error:
        if config.transport == "shm":
            raise RingError(
                f"TORCH_RING_TRANSPORT=shm, but there is no shared memory: {error}"
            ) from error
        _log.warning("rank %d has no shared memory, so all ranks use TCP: %s", rank, error)
        return False


def _can_pass(fd: int) -> bool:
    """Return whether descriptors can be passed over Unix sockets."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"?"], [fd])
        received = receive_fds(theirs, 1)
    for copy in received:
        os.close(copy)
    return bool(received)


def _require_address_space(needed: int, limit: int) -> None:
    """Raise RingError if this process may not map `needed` more bytes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if used + needed > limit:
        raise RingError(
            f"`ulimit -v` allows {limit - used >> 20} MiB of address space more, but the memory of "
            f"all ranks of the host needs {needed >> 20} MiB"
        )


def _share_memory(meeting: Meeting, config: Config, rank: int, size: int) -> tuple[bytes, int]:
    """Return the table of all ranks, and the descriptor of this host's memory, or -1.

    The leader of the host makes the memory; the others receive it, and read the table there.
    """
    if not meeting.leads:
        table, fds = meeting.pass_down()
        return (memory_table(fds[0]), fds[0]) if fds else (table, -1)
    peers, _ = parse_table(meeting.table, size)
    hosts = topology.host_of(peers, config.transport)
    if len(set(hosts)) == size:
        return meeting.pass_down(meeting.table)[0], -1
    fd = make_memory(hosts.count(hosts[rank]), meeting.table)
    try:
        meeting.pass_down(fds=[fd])
    except BaseException:
        os.close(fd)
        raise
    return meeting.table, fd


# --- this rank's descriptors, peer info and listeners


def _raise_descriptor_limit(identity: Identity, config: Config) -> None:
    """Raise the soft limit of descriptors, if it is too low for the connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(os.listdir("/proc/self/fd"))
    # The leader of a host has a connection to each of its ranks, until all have joined.
    needed = in_use + _SPARE_DESCRIPTORS + (identity.local_size or identity.size)
    needed += identity.size * config.connections  # of an alltoall between hosts
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):  # without it, what lacks one says so
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


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
