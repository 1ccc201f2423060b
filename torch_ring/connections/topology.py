"""What the ranks tell one another about themselves, and what follows from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch_ring.errors import InvalidArgumentError, MismatchError, RingError

__all__ = [
    "Card",
    "Place",
    "cpu_sharers",
    "host_of",
    "labels",
    "may_spin",
    "place",
    "require_agreement",
]


@dataclass(frozen=True)
class Card:
    """What a rank tells the others.

    Attributes:
        machine: the same on ranks that can pass descriptors to one another: "<kernel>/<network
            namespace>".
        shares: whether it has shared memory to give.
        node: the launcher's name of its node; None: the machine.
        local_rank, local_size: as the launcher tells; None if it does not.
        address, port: where it listens for ranks on other hosts.
        socket: the name of the abstract Unix socket where it listens for those of its own.
        cpus: the CPUs it may run on, bit by bit, in hexadecimal.
        nonce: random; rank 0's makes this world's key.
        settings: what must be the same on all ranks, by variable.
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
        """The same on ranks that share CPUs: containers with networks of their own do, too."""
        return self.machine.partition("/")[0]

    def to_json(self) -> str:
        """Return the card as it is published."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, rank: int, text: str) -> Card:
        """Read the card of a rank. Raises RingError if it is none."""
        try:
            card = cls(**json.loads(text))
            int(card.cpus, 16)
            bytes.fromhex(card.nonce)
            if card.rank != rank:
                raise ValueError(f"it is rank {card.rank}'s")
        except (ValueError, TypeError) as error:
            raise RingError(f"rank {rank} runs another version of torch_ring: {error}") from None
        return card


@dataclass(frozen=True)
class Place:
    """Where a rank is, as the user sees it."""

    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    is_homogeneous: bool = True


def place(rank: int, cards: Sequence[Card]) -> Place:
    """Return the place of `rank`: as the launchers tell, where they do.

    A local rank that is not told is the index among the ranks of the node. The cross rank is the
    index of the node, in the order of their first ranks, among those that have this local rank.
    """
    nodes: dict[str, list[Card]] = {}
    for card in cards:
        nodes.setdefault(card.machine if card.node is None else card.node, []).append(card)

    def local_rank(card: Card, node: Sequence[Card]) -> int:
        return node.index(card) if card.local_rank is None else card.local_rank

    def local_size(card: Card, node: Sequence[Card]) -> int:
        return len(node) if card.local_size is None else card.local_size

    own = next(node for node in nodes.values() if cards[rank] in node)
    mine = local_rank(cards[rank], own)
    across = [node for node in nodes.values() if mine in (local_rank(c, node) for c in node)]
    return Place(
        mine,
        local_size(cards[rank], own),
        across.index(own),
        len(across),
        len({local_size(card, node) for node in nodes.values() for card in node}) == 1,
    )


def host_of(cards: Sequence[Card], transport: str) -> list[int]:
    """Return the host of each rank, as far as transports go: ranks of a host share memory.

    Where one rank has no shared memory to give, all go by TCP.

    Raises:
        InvalidArgumentError: TORCH_RING_TRANSPORT=shm cannot be.
    """
    machines: dict[str, int] = {}
    hosts = [machines.setdefault(card.machine, len(machines)) for card in cards]
    if transport == "shm" and len(machines) > 1:
        raise InvalidArgumentError(
            f"TORCH_RING_TRANSPORT=shm, but the ranks are on {len(machines)} hosts (or in "
            "containers with networks of their own)"
        )
    if transport == "tcp" or not all(card.shares for card in cards):
        return list(range(len(cards)))
    return hosts


def labels(cards: Sequence[Card]) -> list[str]:
    """Return what to call each rank: "rank 2 (pid 4711)", with an address if there are several."""
    if len({card.machine for card in cards}) == 1:
        return [f"rank {card.rank} (pid {card.pid})" for card in cards]
    return [f"rank {card.rank} ({card.address}, pid {card.pid})" for card in cards]


def may_spin(rank: int, cards: Sequence[Card]) -> bool:
    """Return whether every rank that shares this one's CPUs has one of its own."""
    neighbours = [card for card in cards if card.kernel == cards[rank].kernel]
    cpus = 0
    for card in neighbours:
        cpus |= int(card.cpus, 16)
    return cpus.bit_count() >= len(neighbours)


def cpu_sharers(rank: int, cards: Sequence[Card]) -> int:
    """Return how many ranks, `rank` included, may run on CPUs of `rank`'s."""
    mine = cards[rank]
    return sum(
        card.kernel == mine.kernel and int(card.cpus, 16) & int(mine.cpus, 16) != 0
        for card in cards
    )


def require_agreement(cards: Sequence[Card]) -> None:
    """Raise MismatchError if a setting that must be the same everywhere is not."""
    first = cards[0]
    for card in cards:
        for variable, value in first.settings.items():
            if card.settings.get(variable) != value:
                raise MismatchError(
                    f"{variable} must be the same on all ranks: it is {value} on rank 0 and "
                    f"{card.settings.get(variable)} on rank {card.rank}"
                )
