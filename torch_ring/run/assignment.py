"""assign: which rank runs on which host. A pure function of hosts and their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_ring.errors import InvalidArgumentError
from torch_ring.run.hosts import Host

__all__ = ["Slot", "assign"]


@dataclass(frozen=True)
class Slot:
    """The place of a rank.

    Attributes:
        host: the name of its host.
        rank, size: as of the world.
        local_rank, local_size: the same among the ranks of the host.
        cross_rank, cross_size: the same among the ranks with this local rank.
        node, nodes: the index of the host among those that have a rank, and their number.
    """

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    node: int
    nodes: int


def assign(hosts: Sequence[Host], size: int) -> list[Slot]:
    """Return the slots of all ranks, by rank: hosts are filled one after the other.

    Args:
        hosts: in the order of their ranks.
        size: the number of ranks; hosts that are left over get none.

    Raises:
        InvalidArgumentError: there are too few slots, or no rank.
    """
    if size < 1:
        raise InvalidArgumentError(f"-np {size}: must be 1 or more")
    there = sum(host.slots for host in hosts)
    if size > there:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise InvalidArgumentError(
            f"-np {size}: there are only {there} slots ({listed}): give fewer ranks, or hosts and "
            "slots with -H"
        )
    taken: list[tuple[str, int]] = []
    left = size
    for host in hosts:
        if left:
            taken.append((host.name, min(left, host.slots)))
            left -= taken[-1][1]
    slots: list[Slot] = []
    for node, (name, local_size) in enumerate(taken):
        for local_rank in range(local_size):
            peers = [other for other, (_, count) in enumerate(taken) if count > local_rank]
            slots.append(
                Slot(
                    name,
                    len(slots),
                    size,
                    local_rank,
                    local_size,
                    peers.index(node),
                    len(peers),
                    node,
                    len(taken),
                )
            )
    return slots
