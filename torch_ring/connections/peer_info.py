"""PeerInfo, parse_table: a rank's description of itself, and the table of those of all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from torch_ring.errors import RingError
from torch_ring.rendezvous import cards
from torch_ring.rendezvous.group_card import unpack_table

__all__ = ["PeerInfo", "PeerTable", "parse_table"]


@dataclass(frozen=True)
class PeerInfo:
    """A rank's description of itself for the others.

    Attributes:
        machine: "<kernel>/<network namespace>": ranks with the same one can pass descriptors to one
            another.
        shares: the bytes of its host's memory that the rank can map; 0: it shares none.
        node: the launcher's name of its node; None: the machine counts as the node.
        local_rank, local_size: as the launcher sets them; None if it does not.
        address, port: the TCP address for ranks on other hosts.
        socket: the name of the abstract Unix socket for ranks on its own host.
        cpus: the CPUs the rank may run on, as a hexadecimal bit mask.
    """

    rank: int
    machine: str
    shares: int
    node: str | None
    local_rank: int | None
    local_size: int | None
    pid: int
    address: str
    port: int
    socket: str
    cpus: str

    @property
    def kernel(self) -> str:
        """The kernel's boot id: ranks that share CPUs share it, even in different containers."""
        return self.machine.partition("/")[0]

    def card(self) -> dict[str, Any]:
        """Return the card to publish."""
        return asdict(self)

    def to_json(self) -> str:
        """Return the card as text."""
        return json.dumps(self.card())

    @classmethod
    def from_json(cls, rank: int, text: str) -> PeerInfo:
        """Parse the text of `rank`. Raises RingError if another version wrote it."""
        try:
            card = json.loads(text)
            if not isinstance(card, dict):
                raise ValueError("it is no card")
            (peer,) = _peers({field: [value] for field, value in card.items()}, 1)
            if peer.rank != rank:
                raise ValueError(f"it is rank {peer.rank}'s")
        except (ValueError, RecursionError) as error:
            raise RingError(f"rank {rank} runs another version of torch_ring: {error}") from None
        return peer


class PeerTable(NamedTuple):
    """What every rank gets from the meeting.

    Attributes:
        peers: all ranks, in order.
        secret: 32 bytes of this world.
        is_private: whether only its ranks know them, and nobody who can read its store.
    """

    peers: list[PeerInfo]
    secret: bytes
    is_private: bool


def parse_table(table: bytes, size: int) -> PeerTable:
    """Return the table of a world of `size` ranks, which `Meeting.table` has packed.

    Raises:
        RingError: it is damaged, or another version wrote it.
    """
    peers: dict[int, PeerInfo] = {}
    try:
        groups, secret, is_private = unpack_table(table, size)
        for group in groups:
            for peer in _peers(cards.rows(group.columns, group.count), group.count):
                peers[peer.rank] = peer
    except (ValueError, RecursionError) as error:
        raise RingError(f"a rank runs another version of torch_ring: {error}") from None
    return PeerTable([peers[rank] for rank in range(size)], secret, is_private)


def _peers(columns: dict[str, list[Any]], count: int) -> list[PeerInfo]:
    """Return the peers of columns that nobody has checked. Raises ValueError."""
    if columns.keys() != _CHECKS.keys():
        raise ValueError(
            f"fields are missing or unknown: {sorted(columns.keys() ^ _CHECKS.keys())}"
        )
    for field, is_good in _CHECKS.items():
        for value in columns[field][:1] if _is_constant(columns[field]) else columns[field]:
            if not is_good(value):
                raise ValueError(f"{field} is {value!r:.40}")
    ordered = [columns[field.name] for field in fields(PeerInfo)]
    return [PeerInfo(*values) for values in zip(*ordered, strict=True)][:count]


def _is_constant(values: list[Any]) -> bool:
    return all(value is values[0] for value in values)


def _whole(below: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 0 <= value < below


def _or_none(is_good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_good(value)


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) < 1024 and value.isprintable()


def _is_mask(value: Any) -> bool:
    try:
        return isinstance(value, str) and int(value, 16) >= 0
    except ValueError:
        return False


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "rank": _whole(1 << 31),
    "machine": _text,
    "shares": _whole(1 << 63),
    "node": _or_none(_text),
    "local_rank": _or_none(_whole(1 << 31)),
    "local_size": _or_none(_whole(1 << 31)),
    "pid": _whole(1 << 31),
    "address": _text,
    "port": _whole(1 << 16),
    "socket": _text,
    "cpus": _is_mask,
}
