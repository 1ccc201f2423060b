"""FullMesh: one rank's connections to all others, and the memory of its host."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any

from torch_ring.connections.peer_info import PeerInfo

__all__ = ["FullMesh"]


@dataclass
class FullMesh:
    """One rank's connections, and the descriptors of its host; owns them until release().

    Attributes:
        peers: all ranks, in order; empty in a world of one.
        host_of: the host index of each rank.
        labels: the name of each rank in messages.
        may_spin: whether every rank on this kernel has a CPU of its own.
        control: control connections by rank.
        data: data connections by rank and channel.
        memory: the memfd of this host's ranks; -1 where no two ranks share a host.
    """

    peers: list[PeerInfo] = field(default_factory=list)
    host_of: list[int] = field(default_factory=lambda: [0])
    labels: list[str] = field(default_factory=lambda: [f"rank 0 (pid {os.getpid()})"])
    may_spin: bool = True
    data: dict[int, dict[int, socket.socket]] = field(default_factory=dict)
    control: dict[int, socket.socket] = field(default_factory=dict)
    memory: int = -1

    def ranks_of_host(self, rank: int) -> list[int]:
        """Return the ranks on the host of `rank`, in order; the first one makes the memory."""
        return [r for r, host in enumerate(self.host_of) if host == self.host_of[rank]]

    def release(self) -> dict[str, Any]:
        """Return the descriptors, those of connections by rank; the caller owns them now.

        A missing descriptor is -1. `data` has a list for each rank.
        """
        ranks = range(len(self.host_of))
        by_channel = [sorted(self.data.pop(r, {}).items()) for r in ranks]
        data = [[connection.detach() for _, connection in channels] for channels in by_channel]
        control = [self.control.pop(r).detach() if r in self.control else -1 for r in ranks]
        memory, self.memory = self.memory, -1
        return {"data": data, "memory": memory, "control": control}

    def close(self) -> None:
        """Close the descriptors that have not been released."""
        for sockets in (self.control, *self.data.values()):
            while sockets:
                sockets.popitem()[1].close()
        if self.memory >= 0:
            os.close(self.memory)
            self.memory = -1
