"""Connects the ranks: sockets between all of them, shared memory among those of a host.

Of two ranks the lower one accepts and the higher one connects. Every pair has a control connection
(a Unix socket inside a host, by which memory and doorbells are passed, TCP otherwise); pairs on the
same lane of different hosts have data connections, too: one, unless the settings say otherwise.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_ring import _C, cards
from torch_ring.cards import Card
from torch_ring.config import Config
from torch_ring.connector import Connector, run
from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.launchers import Identity
from torch_ring.meeting import Meeting
from torch_ring.network import own_address, receive_fds
from torch_ring.rendezvous import Rendezvous
from torch_ring.set_meeting import SetMeeting

__all__ = ["Mesh", "connect"]

_log = logging.getLogger("torch_ring")

_HUGE_PAGE = 2 << 20
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
            connector = Connector(identity.rank, key, mesh, meeting, config.connections)
            run(connector.connect_all([tcp, unix]))
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
        mapped = each * (identity.local_size or identity.size)
        _require_address_space(mapped + _HUGE_PAGE)  # one is mapped with room to align it
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
