"""PeerInfo, GroupCard: a rank's description of itself, and the table of those of all ranks.

A description is a dictionary of plain values. Those of a group travel as columns, and a column
whose values are all the same travels as one value; they are checked when they are read.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from torch_ring.errors import MismatchError, RingError

__all__ = [
    "GroupCard",
    "PeerInfo",
    "Table",
    "columns",
    "difference",
    "gather_group",
    "pack",
    "pack_table",
    "parse_table",
    "ranks_in",
    "require_agreement",
    "rows",
    "unpack",
    "unpack_table",
]

MOST_BYTES_A_CARD = 4096
"""Bytes that a rank's card has at most, as JSON; a real one has about 200."""

_MOST_BYTES_BESIDE = 1 << 16  # of what is told once: names of keys, settings, failures


def pack(value: Any) -> bytes:
    """Return a JSON value, compressed."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 6)


def unpack(data: bytes, count: int) -> Any:
    """Return the value that was packed; of `data` nothing is believed.

    Args:
        data: what was sent.
        count: the number of ranks whose cards it may have: it bounds the memory that is used.

    Raises:
        ValueError: `data` is damaged, or is larger than so many cards can be.
    """
    most = count * MOST_BYTES_A_CARD + _MOST_BYTES_BESIDE
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(data, most)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not inflate.eof:
        raise ValueError(f"more than {most} bytes" if len(text) == most else "it is cut off")
    if inflate.unused_data:
        raise ValueError("something follows it")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def columns(cards: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns of some cards: a list of one value, or of a value for each card.

    Raises:
        ValueError: the cards have different fields.
    """
    fields = list(cards[0])
    if any(card.keys() != cards[0].keys() for card in cards):
        raise ValueError("the cards have different fields")
    full = {field: [card[field] for card in cards] for field in fields}
    return {
        field: values[:1] if all(_same(value, values[0]) for value in values) else values
        for field, values in full.items()
    }


def rows(packed: Any, count: int) -> dict[str, list[Any]]:
    """Return the full columns, `count` values each, of what `columns` has made.

    Raises:
        ValueError: `packed` is something else.
    """
    if not isinstance(packed, dict):
        raise ValueError("there are no columns")
    full = {}
    for field, values in packed.items():
        if not isinstance(values, list) or len(values) not in (1, count):
            raise ValueError(f"column {field!r:.40} does not have {count} values")
        full[field] = values * count if len(values) < count else values
    return full


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)  # 1 == True


_SECRET_BYTES = 32


@dataclass
class GroupCard:
    """The card of a group: what its ranks have in common is in it once.

    Attributes:
        leader: the rank that speaks for the group.
        size: the number of ranks of the world, as the group believes.
        settings: a hash of the settings that must be equal.
        door: the name of the leader's socket, for the leaders of other groups of its machine.
        count: the number of ranks.
        columns: their cards, see `columns`; "rank" and "machine" are among them.
    """

    leader: int
    size: int
    settings: str
    door: str
    count: int
    columns: dict[str, list[Any]]

    @classmethod
    def of(
        cls, leader: int, size: int, settings: str, members: Sequence[Mapping[str, Any]]
    ) -> GroupCard:
        """Return the card of a group. Raises ValueError if its members' cards differ in form."""
        return cls(leader, size, settings, "", len(members), columns(members))

    @property
    def ranks(self) -> list[int]:
        """The group's ranks."""
        return rows({"rank": self.columns["rank"]}, self.count)["rank"]

    @property
    def machine(self) -> Any:
        """A name that only ranks have in common which can meet at a Unix socket."""
        return self.columns["machine"][0]

    def apart(self) -> GroupCard:
        """Return the card as of a machine of its own."""
        machine = f"{self.door}.{self.machine}"
        return replace(self, columns={**self.columns, "machine": [machine]})

    def to_bytes(self) -> bytes:
        """Return the card as it is sent."""
        return pack(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, size: int) -> GroupCard:
        """Return a card that was sent in a world of `size`. Raises ValueError for any other."""
        return cls._checked(unpack(data, size), size)

    @classmethod
    def _checked(cls, value: Any, size: int) -> GroupCard:
        """Return the card of unpacked values that nobody has checked."""
        try:
            card = cls(**value)
        except TypeError as error:
            raise ValueError(f"it has other fields: {error}") from None
        whole = (card.leader, card.size, card.count)
        if not all(type(number) is int for number in whole) or not 1 <= card.count <= size:
            raise ValueError("its numbers are wrong")
        if not isinstance(card.settings, str) or not isinstance(card.door, str):
            raise ValueError("its names are wrong")
        full = rows(card.columns, card.count)
        ranks = full.get("rank", [])
        if not all(type(rank) is int and rank >= 0 for rank in ranks):
            raise ValueError("its ranks are wrong")
        if len(set(ranks)) != card.count or card.leader not in ranks:
            raise ValueError("its ranks are wrong")
        if len({str(machine) for machine in full.get("machine", [])}) != 1:
            raise ValueError("it has not one machine")
        return card


def ranks_in(card: bytes, size: int) -> list[int]:
    """Return the ranks of a card that was sent in a world of `size`; none if it is damaged."""
    try:
        return GroupCard.from_bytes(card, size).ranks
    except ValueError:
        return []


def gather_group(
    leader: int, size: int, sent: Mapping[int, bytes]
) -> tuple[GroupCard, dict[int, str]]:
    """Return the card of the ranks that have met, and their settings as JSON, by rank.

    Args:
        leader: the rank that leads them.
        size: the number of ranks of the world.
        sent: what each has sent: its card, and its settings.

    Raises:
        RingError: a rank has sent something else.
    """
    rows: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    for rank, data in sorted(sent.items()):
        try:
            row, text = json.loads(data)
            if not isinstance(row, dict) or row.get("rank") != rank or not isinstance(text, str):
                raise ValueError("its card is another's")
            if rows and row.keys() != rows[0].keys():
                raise ValueError("its card has other fields")
            if "machine" not in row or len(data) - len(text) > MOST_BYTES_A_CARD:
                raise ValueError("its card is incomplete, or too large")
        except (ValueError, TypeError, RecursionError) as error:
            raise RingError(f"rank {rank} runs another version of torch_ring: {error}") from None
        rows.append(row)
        texts[rank] = text
    digest = hashlib.sha256(texts[min(texts)].encode()).hexdigest()[:32]
    return GroupCard.of(leader, size, digest, rows), texts


def require_agreement(texts: Mapping[int, str]) -> None:
    """Raise MismatchError if the settings, as JSON by rank, differ."""
    lowest = min(texts)
    for rank, text in sorted(texts.items()):
        if text != texts[lowest]:
            raise difference(lowest, texts[lowest], rank, text)


class Table(NamedTuple):
    """The descriptions of all ranks of a world.

    Attributes:
        groups: the cards of all groups.
        secret: 32 random bytes, or a key that follows from them.
        is_private: whether only the ranks can know the secret.
    """

    groups: list[GroupCard]
    secret: bytes
    is_private: bool


def pack_table(
    groups: Sequence[GroupCard], secret: bytes | None = None, *, is_private: bool = False
) -> bytes:
    """Return the table of all groups; see `Table`. None: a new secret."""
    text = (secret or secrets.token_bytes(_SECRET_BYTES)).hex()
    told = [asdict(group) for group in groups]
    return pack({"secret": text, "private": is_private, "groups": told})


def unpack_table(table: bytes, size: int) -> Table:
    """Return a table that was packed.

    Raises:
        ValueError: it is no table, or not of all `size` ranks, once each.
    """
    value = unpack(table, size)
    if not isinstance(value, dict) or not isinstance(value.get("groups"), list):
        raise ValueError("there are no groups")
    groups = [GroupCard._checked(group, size) for group in value["groups"]]
    ranks = sorted(rank for group in groups for rank in group.ranks)
    if ranks != list(range(size)):
        raise ValueError("its ranks are not those of the world")
    try:
        secret = bytes.fromhex(value["secret"])
    except (KeyError, TypeError, ValueError):
        raise ValueError("there is no secret") from None
    if len(secret) != _SECRET_BYTES:
        raise ValueError("its secret has another length")
    return Table(groups, secret, value.get("private") is True)


def difference(rank: int, text: str, other_rank: int, other_text: str) -> MismatchError:
    """Return the error of two ranks whose settings, as JSON, differ; names the first that does."""
    try:
        one, other = json.loads(text), json.loads(other_text)
        variable = next(name for name in [*one, *other] if one.get(name) != other.get(name))
        values = one.get(variable), other.get(variable)
    except (ValueError, AttributeError, StopIteration, RecursionError):
        return MismatchError(
            f"the settings of rank {rank} and rank {other_rank} differ: do they run the same "
            "version of torch_ring?"
        )
    return MismatchError(
        f"{variable} must be the same on all ranks: it is {values[0]} on rank {rank} and "
        f"{values[1]} on rank {other_rank}"
    )


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
    """The result of the exchange, the same on every rank.

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
            for peer in _peers(rows(group.columns, group.count), group.count):
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
