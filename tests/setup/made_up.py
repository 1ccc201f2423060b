"""Made-up cards of ranks, and whole exchanges between hosts as objects of one process."""

from __future__ import annotations

import hashlib
from typing import Any

from counting_store import CountingStore

from torch_ring.setup.host_exchange import HostExchange
from torch_ring.setup.network import Deadline
from torch_ring.setup.peer_info import GroupCard, pack_table


def card(rank: int, host: int = 0) -> dict[str, Any]:
    """Return a card like a real one, of a rank on `host`."""
    digest = hashlib.sha256(f"{rank}".encode()).hexdigest()
    return {
        "rank": rank,
        "machine": f"{hashlib.sha256(f'{host}'.encode()).hexdigest()[:36]}/4026531840",
        "shares": 1 << 45,
        "node": str(host),
        "local_rank": rank % 8,
        "local_size": 8,
        "pid": 1000 + int(digest[:5], 16) % 30000,
        "address": f"10.{host >> 16}.{host >> 8 & 255}.{host & 255}",
        "port": 32768 + int(digest[5:10], 16) % 28000,
        "socket": digest[:16],
        "cpus": f"{3 << (2 * (rank % 8)):x}",
    }


def group(ranks: range, size: int, host: int = 0) -> GroupCard:
    """Return the card of the ranks of a host."""
    return GroupCard.of(ranks[0], size, "00" * 16, [card(rank, host) for rank in ranks])


def ranks_in(size: int) -> Any:
    """Return a function that reads the ranks of a group's card."""

    def ranks_of(data: bytes) -> list[int]:
        try:
            return GroupCard.from_bytes(data, size).ranks
        except ValueError:
            return []

    return ranks_of


def exchange_on(store: Any, ranks: range, size: int, timeout_s: float = 30.0) -> HostExchange:
    """Return a group's side of an exchange."""
    return HostExchange(store, size, ranks, Deadline(timeout_s), ranks_in(size))


def exchange_between_hosts(size: int, local_size: int = 8) -> tuple[list[bytes], list[Any]]:
    """Exchange the cards of all hosts, in any order but one after another.

    Returns:
        The table as each host got it; the client of each host, with its counts.
    """
    server = CountingStore()
    starts = range(0, size, local_size)
    groups = [group(range(s, s + local_size), size, s // local_size) for s in starts]
    clients = [server.client() for _ in groups]
    order = sorted(range(len(groups)), key=lambda host: hashlib.sha256(b"%d" % host).digest())
    sides = {host: exchange_on(clients[host], groups[host].ranks, size) for host in order}
    for host in order:
        if host != 0:
            sides[host].publish(groups[host].to_bytes())
    found = {sides[0].place: groups[0]}
    for place, data in sides[0].collect():
        found[place] = GroupCard.from_bytes(data, size)
    table = pack_table([found[place] for place in sorted(found)])
    sides[0].write_table(table)
    return [table if h == 0 else sides[h].await_table() for h in range(len(groups))], clients
