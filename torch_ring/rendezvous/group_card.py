"""GroupCard: what the ranks that have met on a host tell the others; and the table of all."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from torch_ring.errors import MismatchError, RingError
from torch_ring.rendezvous import cards

__all__ = [
    "GroupCard",
    "Table",
    "difference",
    "gather_group",
    "pack_table",
    "ranks_in",
    "require_agreement",
    "unpack_table",
]


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
        columns: their cards, see `cards.columns`; "rank" and "machine" are among them.
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
        return cls(leader, size, settings, "", len(members), cards.columns(members))

    @property
    def ranks(self) -> list[int]:
        """The group's ranks."""
        return cards.rows({"rank": self.columns["rank"]}, self.count)["rank"]

    @property
    def machine(self) -> Any:
        """What the ranks have in common that can meet at a Unix socket."""
        return self.columns["machine"][0]

    def apart(self) -> GroupCard:
        """Return the card as of a machine of its own."""
        machine = f"{self.door}.{self.machine}"
        return replace(self, columns={**self.columns, "machine": [machine]})

    def to_bytes(self) -> bytes:
        """Return the card as it is sent."""
        return cards.pack(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, size: int) -> GroupCard:
        """Return a card that was sent in a world of `size`. Raises ValueError for any other."""
        return cls._checked(cards.unpack(data, size), size)

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
        full = cards.rows(card.columns, card.count)
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
            if "machine" not in row or len(data) - len(text) > cards.MOST_BYTES_A_CARD:
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
    """What the ranks of a world know of one another.

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
    return cards.pack({"secret": text, "private": is_private, "groups": told})


def unpack_table(table: bytes, size: int) -> Table:
    """Return a table that was packed.

    Raises:
        ValueError: it is no table, or not of all `size` ranks, once each.
    """
    value = cards.unpack(table, size)
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
