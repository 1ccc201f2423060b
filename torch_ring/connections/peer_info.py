"""PeerInfo: a rank's description of itself, published before the others connect to it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from torch_ring.errors import RingError

__all__ = ["PeerInfo"]


@dataclass(frozen=True)
class PeerInfo:
    """A rank's description of itself for the others.

    Attributes:
        machine: "<kernel>/<network namespace>": ranks with the same one can pass descriptors to one
            another.
        shares: whether the rank has shared memory for the others.
        node: the launcher's name of its node; None: the machine counts as the node.
        local_rank, local_size: as the launcher sets them; None if it does not.
        address, port: the TCP address for ranks on other hosts.
        socket: the name of the abstract Unix socket for ranks on its own host.
        cpus: the CPUs the rank may run on, as a hexadecimal bit mask.
        nonce: random bytes in hexadecimal; rank 0's is part of this world's key.
        settings: the settings that must be the same on all ranks, by variable.
    """

    rank: int
    machine: str
    shares: bool
    node: str | None
    local_rank: int | None
    local_size: int | None
    pid: int
    address: str
    port: int
    socket: str
    cpus: str
    nonce: str
    settings: dict[str, Any]

    @property
    def kernel(self) -> str:
        """The kernel's boot id: ranks that share CPUs share it, even in different containers."""
        return self.machine.partition("/")[0]

    def to_json(self) -> str:
        """Return the text to publish."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, rank: int, text: str) -> PeerInfo:
        """Parse the text that `rank` published. Raises RingError if another version wrote it."""
        try:
            peer = cls(**json.loads(text))
            int(peer.cpus, 16)
            bytes.fromhex(peer.nonce)
            if peer.rank != rank:
                raise ValueError(f"it is rank {peer.rank}'s")
        except (ValueError, TypeError) as error:
            raise RingError(f"rank {rank} runs another version of torch_ring: {error}") from None
        return peer
