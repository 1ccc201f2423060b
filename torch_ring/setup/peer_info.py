# SPDX-License-Identifier: Apache-2.0
"""PeerInfo, HostInfo: a rank's description of itself, and the table of all descriptions.

A description is a dictionary of plain values. Receivers check it.
"""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from torch_ring.errors import MismatchError
from torch_ring.setup.failure import other_version

__all__ = [
    "HostInfo",
    "PeerInfo",
    "difference",
    "host_info",
    "pack",
    "pack_table",
    "parse_table",
    "require_agreement",
    "unpack",
]

MOST_BYTES_A_RANK = 4096
"""The most bytes of a rank's description, as JSON; a real one has about 200."""

_MOST_BYTES_BESIDE = 1 << 16  # of data that are sent once: names of keys, settings, failures


def pack(value: Any) -> bytes:
    """Return a JSON value, compressed."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 6)


def unpack(data: bytes, count: int) -> Any:
    """Return a packed value; `data` is not trusted.

    Args:
        data: the received bytes.
        count: the most ranks that they may describe, which limits the memory used.

    Raises:
        ValueError: `data` is damaged, or larger than `count` descriptions can be.
    """
    most = count * MOST_BYTES_A_RANK + _MOST_BYTES_BESIDE
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


_SECRET_BYTES = 32


@dataclass
class HostInfo:
    """The description of the ranks of a host.

    Late ranks are a group of their own, as if they were on another host.

    Attributes:
        leader: the leader of the group.
        size: the number of ranks of the world, according to the group.
        settings: the settings that must be equal, as JSON.
        socket: the name of the leader's socket, for the leaders of other groups of its machine;
            random, and so unique.
        infos: their descriptions; "rank" and "machine" are among the fields.
    """

    leader: int
    size: int
    settings: str
    socket: str
    infos: list[dict[str, Any]]

    @property
    def ranks(self) -> list[int]:
        """The ranks of the group."""
        return [info["rank"] for info in self.infos]

    @property
    def machine(self) -> Any:
        """A name that is equal only for ranks that can meet at a Unix socket."""
        return self.infos[0]["machine"]

    def apart(self) -> HostInfo:
        """Return the description with a machine name of its own."""
        machine = f"{self.socket}.{self.machine}"
        return replace(self, infos=[{**info, "machine": machine} for info in self.infos])

    def to_value(self) -> dict[str, Any]:
        """Return the JSON value to send."""
        return dict(vars(self))

    @classmethod
    def of_value(cls, value: Any, size: int) -> HostInfo:
        """Return a description that was sent in a world of `size`. Raises ValueError if damaged.

        Its `size` may differ: that is an error of the sender, and no damage.
        """
        try:
            info = cls(**value)
        except TypeError as error:
            raise ValueError(f"it has other fields: {error}") from None
        if not all(type(number) is int for number in (info.leader, info.size)):
            raise ValueError("its numbers are wrong")
        if not isinstance(info.settings, str) or not isinstance(info.socket, str):
            raise ValueError("its names are wrong")
        if not isinstance(info.infos, list) or not 1 <= len(info.infos) <= size:
            raise ValueError("its descriptions are wrong")
        if not all(isinstance(each, dict) for each in info.infos):
            raise ValueError("its descriptions are wrong")
        ranks = [each.get("rank") for each in info.infos]
        if not all(type(rank) is int and rank >= 0 for rank in ranks):
            raise ValueError("its ranks are wrong")
        if len(set(ranks)) != len(ranks) or info.leader not in ranks:
            raise ValueError("its ranks are wrong")
        machines = {str(each.get("machine")) for each in info.infos}
        if "machine" not in info.infos[0] or len(machines) != 1:
            raise ValueError("it has not one machine")
        return info


def host_info(leader: int, size: int, sent: Mapping[int, Any]) -> tuple[HostInfo, dict[int, str]]:
    """Return the description of the ranks that have met, and their settings as JSON, by rank.

    Args:
        leader: the rank that leads them.
        size: the number of ranks of the world.
        sent: the description and the settings of each.

    Raises:
        RingError: the value of a rank has another format.
    """
    infos: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    for rank, value in sorted(sent.items()):
        try:
            info, text = value
            if not isinstance(info, dict) or info.get("rank") != rank or not isinstance(text, str):
                raise ValueError("its description is another's")
            if infos and info.keys() != infos[0].keys():
                raise ValueError("its description has other fields")
            if "machine" not in info or len(json.dumps(info)) > MOST_BYTES_A_RANK:
                raise ValueError("its description is incomplete, or too large")
        except (ValueError, TypeError) as error:
            raise other_version(f"rank {rank}", error) from None
        infos.append(info)
        texts[rank] = text
    return HostInfo(leader, size, texts[min(texts)], "", infos), texts


def require_agreement(texts: Mapping[int, str]) -> None:
    """Raise MismatchError if the settings, as JSON by rank, differ."""
    lowest = min(texts)
    for rank, text in sorted(texts.items()):
        if text != texts[lowest]:
            raise difference(lowest, texts[lowest], rank, text)


def pack_table(
    hosts: Sequence[HostInfo], secret: bytes | None = None, *, is_private: bool = False
) -> bytes:
    """Return the table of all hosts; see `PeerTable`. None: a new secret."""
    text = (secret or secrets.token_bytes(_SECRET_BYTES)).hex()
    sent = [{**host.to_value(), "settings": ""} for host in hosts]  # the same on all
    return pack({"secret": text, "private": is_private, "hosts": sent})


def difference(rank: int, text: str, other_rank: int, other_text: str) -> MismatchError:
    """Return the error of two ranks with different settings (as JSON); names the first of them."""
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
        addresses, ports: the TCP addresses for ranks on other hosts, of each network interface.
        socket: the name of the abstract Unix socket for ranks on its own host.
        cpus: the CPUs the rank may run on, as a hexadecimal bit mask.
        ucx: the version and transports of its UCX, or the reason why it has none; empty: not
            needed.
    """

    rank: int
    machine: str
    shares: int
    node: str | None
    local_rank: int | None
    local_size: int | None
    pid: int
    addresses: Sequence[str]
    ports: Sequence[int]
    socket: str
    cpus: str
    ucx: str

    @property
    def address(self) -> str:
        """The address of the first network interface."""
        return self.addresses[0]

    @property
    def kernel(self) -> str:
        """The kernel's boot id: ranks that share CPUs share it, even in different containers."""
        return self.machine.partition("/")[0]

    def to_value(self) -> dict[str, Any]:
        """Return the JSON value to send."""
        return asdict(self)


class PeerTable(NamedTuple):
    """The result of the exchange, the same on every rank.

    Attributes:
        peers: all ranks, in order.
        secret: the 32-byte secret of this world.
        is_private: whether only its ranks know the secret, and no other reader of its store.
    """

    peers: list[PeerInfo]
    secret: bytes
    is_private: bool


def parse_table(table: bytes, size: int) -> PeerTable:
    """Return the table of a world of `size` ranks from the result of `pack_table`.

    Raises:
        RingError: the table is damaged, or of another version.
    """
    peers: dict[int, PeerInfo] = {}
    try:
        value = unpack(table, size)
        if not isinstance(value, dict) or not isinstance(value.get("hosts"), list):
            raise ValueError("there are no hosts")
        for host in value["hosts"]:
            for peer in map(_peer, HostInfo.of_value(host, size).infos):
                if peer.rank in peers:
                    raise ValueError(f"rank {peer.rank} is there twice")
                peers[peer.rank] = peer
        if peers.keys() != set(range(size)):
            raise ValueError("its ranks are not those of the world")
        secret = bytes.fromhex(value["secret"])
        if len(secret) != _SECRET_BYTES:
            raise ValueError("its secret has another length")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise other_version("a rank", error) from None
    is_private = value.get("private") is True
    return PeerTable([peers[rank] for rank in range(size)], secret, is_private)


def _peer(info: dict[str, Any]) -> PeerInfo:
    """Return the peer of an unchecked description. Raises ValueError."""
    if info.keys() != _CHECKS.keys():
        raise ValueError(f"fields are missing or unknown: {sorted(info.keys() ^ _CHECKS.keys())}")
    for field, is_good in _CHECKS.items():
        if not is_good(info[field]):
            raise ValueError(f"{field} is {info[field]!r:.40}")
    if len(info["addresses"]) != len(info["ports"]):
        raise ValueError(f"rank {info['rank']} has not one port at each address")
    return PeerInfo(**info)


def _whole(below: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 0 <= value < below


def _or_none(is_good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_good(value)


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) < 1024 and value.isprintable()


def _some(is_good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and value != [] and all(map(is_good, value))


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
    "addresses": _some(_text),
    "ports": _some(_whole(1 << 16)),
    "socket": _text,
    "cpus": _is_mask,
    "ucx": _text,
}
