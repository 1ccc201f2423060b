"""Connections: the control plane and the shared memory of one process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

from torch_ring._C import ControlPlane, Engine, HostMemory, LaunchOrder
from torch_ring.connections.inquiries import Inquiries
from torch_ring.connections.peer_info import PeerInfo

__all__ = ["FAREWELL_S", "Connections", "abandon_all_in_child", "abandon_in_child", "before_fork"]

# TCP sends a segment that is lost five times again in 6 s, and six times in 13 s.
FAREWELL_S = 10.0


@dataclass(eq=False)
class Connections:
    """One process's way to the other ranks of its world, for all of its process sets.

    Attributes:
        rank: this process.
        peers: what every rank has told of itself.
        host_of: the host index of each rank.
        labels: the name of each rank in messages.
        token: the same on the ranks of this world, and of no other; anybody may know it.
        plane: who lives and who has left, and connections for data; None in a world of one.
        is_private: whether nobody but the ranks can know the key with which they connect.
        inquiries: what the ranks ask one another; None in a world of one.
        memory: the memory that the ranks of this host share; None if no host has several ranks.
        launch_order: in which the process sets use this process's devices.
        farewell_s: how long a rank that leaves waits for peers that do not hear its goodbye.
        engines: those of the process sets that run.
        on_engine: what is called with each new one of them.
    """

    rank: int = 0
    peers: Sequence[PeerInfo] = ()
    host_of: Sequence[int] = (0,)
    labels: Sequence[str] = field(default_factory=lambda: [f"rank 0 (pid {os.getpid()})"])
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    plane: ControlPlane | None = None
    inquiries: Inquiries | None = None
    memory: HostMemory | None = None
    is_private: bool = True
    launch_order: LaunchOrder = field(default_factory=LaunchOrder)
    farewell_s: float = FAREWELL_S
    engines: WeakSet[Engine] = field(default_factory=WeakSet)
    on_engine: Callable[[Engine], None] | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.labels)

    def add_engine(self, engine: Engine) -> None:
        """Take note of a new engine."""
        self.engines.add(engine)
        if self.on_engine is not None:
            self.on_engine(engine)

    def close(self) -> None:
        """Tell the other ranks that this one leaves, and close all connections."""
        plane, self.plane, self.memory = self.plane, None, None
        if plane is not None:
            plane.stop(self.farewell_s)
        self.inquiries = None

    def abandon(self) -> None:
        """Let go of the parent's connections and memory in a forked child.

        While a child holds the connections, no other rank notices the parent's death; while it
        holds the memory, that of all ranks of the host stays although they have ended.
        """
        if self.plane is not None:
            self.plane.abandon()
        if self.memory is not None:
            self.memory.abandon()


# Those that nobody has closed, from when they are made: another thread may fork during init().
_open: WeakSet[Connections] = WeakSet()


def abandon_in_child(connections: Connections) -> None:
    """Let every child that is forked from now on abandon the connections, unless it is too late."""
    _open.add(connections)


def before_fork() -> None:
    """Take note of what a child is about to inherit."""
    for connections in list(_open):
        if connections.plane is not None:
            connections.plane.before_fork()


def abandon_all_in_child() -> None:
    """Let go of the parent's connections. Call in a forked child."""
    for connections in list(_open):
        connections.abandon()
    _open.clear()
