# SPDX-License-Identifier: Apache-2.0
"""Topology: ranks that share a host, a node or CPUs. Pure functions of the ranks' `PeerInfo`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch_ring._C import least_memory
from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.setup.peer_info import PeerInfo

__all__ = [
    "Topology",
    "cpu_sharers",
    "host_of",
    "hosts_among",
    "labels",
    "lack_of_memory",
    "may_spin",
    "topology_of",
]


@dataclass(frozen=True)
class Topology:
    """The position of one rank among nodes, with Horovod's names."""

    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    is_homogeneous: bool = True


def topology_of(rank: int, peers: Sequence[PeerInfo]) -> Topology:
    """Return the topology as `rank` sees it.

    The local rank is the launcher's, or else the index among the ranks of the node. The cross rank
    is the index of the node among the nodes with this local rank, in the order of their first
    ranks.

    Args:
        rank: this process.
        peers: all ranks, in order.
    """
    nodes: dict[str, list[int]] = {}  # the ranks of each
    for index, peer in enumerate(peers):
        nodes.setdefault(peer.machine if peer.node is None else peer.node, []).append(index)
    local_ranks, local_sizes = [0] * len(peers), [0] * len(peers)
    for node in nodes.values():
        for index, other in enumerate(node):
            peer = peers[other]
            local_ranks[other] = index if peer.local_rank is None else peer.local_rank
            local_sizes[other] = len(node) if peer.local_size is None else peer.local_size
    mine = local_ranks[rank]
    across = [node for node in nodes.values() if any(local_ranks[r] == mine for r in node)]
    return Topology(
        mine,
        local_sizes[rank],
        next(index for index, node in enumerate(across) if rank in node),
        len(across),
        len(set(local_sizes)) == 1,
    )


def host_of(peers: Sequence[PeerInfo], transport: str) -> list[int]:
    """Return the host index of each rank: ranks of one host share memory.

    If one rank cannot map the memory of its host, every rank is a host of its own, and all use TCP.

    Raises:
        InvalidArgumentError: TORCH_RING_TRANSPORT=shm, but the ranks are on several hosts.
        RingError: TORCH_RING_TRANSPORT=shm, but a rank cannot map the memory.
    """
    machines: dict[str, int] = {}
    hosts = [machines.setdefault(peer.machine, len(machines)) for peer in peers]
    if transport == "shm" and len(machines) > 1:
        raise InvalidArgumentError(
            f"TORCH_RING_TRANSPORT=shm, but the ranks are on {len(machines)} hosts (or in "
            "containers with networks of their own)"
        )
    if transport == "tcp":
        return list(range(len(peers)))
    lack = lack_of_memory(peers)
    if lack and transport == "shm":
        raise RingError(f"TORCH_RING_TRANSPORT=shm, but {lack}")
    return list(range(len(peers))) if lack else hosts


def lack_of_memory(peers: Sequence[PeerInfo]) -> str:
    """Return a sentence on the rank that cannot map the memory of its host; "" if all can."""
    counts = Counter(peer.machine for peer in peers)
    needed = {count: least_memory(count) for count in set(counts.values())}
    for peer in peers:
        count = counts[peer.machine]
        if not peer.shares:
            return f"rank {peer.rank} has no shared memory: its log says why"
        if peer.shares < needed[count]:
            return (
                f"rank {peer.rank} can map {peer.shares >> 20} MiB of shared memory, and the "
                f"{count} ranks of its host need {needed[count] >> 20} MiB: raise `ulimit -v`"
            )
    return ""


def hosts_among(ranks: Sequence[int], host_of: Sequence[int]) -> list[int]:
    """Return the host index of some ranks, with hosts renumbered in the order of these ranks."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(host_of[rank], len(numbers)) for rank in ranks]


def labels(peers: Sequence[PeerInfo]) -> list[str]:
    """Return each rank's name in messages, "rank 2 (pid 4711)"; on several hosts with address."""
    if len({peer.machine for peer in peers}) == 1:
        return [f"rank {peer.rank} (pid {peer.pid})" for peer in peers]
    return [f"rank {peer.rank} ({peer.address}, pid {peer.pid})" for peer in peers]


def may_spin(rank: int, peers: Sequence[PeerInfo]) -> bool:
    """Return whether every rank on `rank`'s kernel has a CPU of its own."""
    neighbours = [peer for peer in peers if peer.kernel == peers[rank].kernel]
    cpus = 0
    for peer in neighbours:
        cpus |= int(peer.cpus, 16)
    return cpus.bit_count() >= len(neighbours)


def cpu_sharers(rank: int, peers: Sequence[PeerInfo]) -> int:
    """Return the number of ranks, `rank` included, that may run on `rank`'s CPUs."""
    mine = peers[rank]
    return sum(
        peer.kernel == mine.kernel and int(peer.cpus, 16) & int(mine.cpus, 16) != 0
        for peer in peers
    )
