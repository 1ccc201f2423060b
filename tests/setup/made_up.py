# SPDX-License-Identifier: Apache-2.0
"""Made-up descriptions of ranks, and whole exchanges between hosts as objects of one process."""

from __future__ import annotations

import hashlib
from typing import Any

from counting_store import CountingStore

from torch_ring.errors import RingError
from torch_ring.setup.network import Deadline
from torch_ring.setup.peer_info import HostInfo, unpack
from torch_ring.setup.store_exchange import StoreExchange


def info(rank: int, host: int = 0) -> dict[str, Any]:
    """Return a description like a real one, of a rank on `host`."""
    digest = hashlib.sha256(f"{rank}".encode()).hexdigest()
    return {
        "rank": rank,
        "machine": f"{hashlib.sha256(f'{host}'.encode()).hexdigest()[:36]}/4026531840",
        "shares": 1 << 45,
        "node": str(host),
        "local_rank": rank % 8,
        "local_size": 8,
        "pid": 1000 + int(digest[:5], 16) % 30000,
        "addresses": [f"10.{host >> 16}.{host >> 8 & 255}.{host & 255}"],
        "ports": [32768 + int(digest[5:10], 16) % 28000],
        "socket": digest[:16],
        "cpus": f"{3 << (2 * (rank % 8)):x}",
        "ucx": "",
    }


def group(ranks: range, size: int, host: int = 0) -> HostInfo:
    """Return the description of the ranks of a host."""
    return HostInfo(ranks[0], size, "00" * 16, "", [info(rank, host) for rank in ranks])


def ranks_in(size: int) -> Any:
    """Return a function that reads the ranks of a host's value."""

    def ranks_of(value: Any) -> list[int]:
        try:
            return HostInfo.of_value(value, size).ranks
        except ValueError as error:
            raise RingError(f"a host runs another version of torch_ring: {error}") from None

    return ranks_of


def exchange_on(store: Any, ranks: range, size: int, timeout_s: float = 30.0) -> StoreExchange:
    """Return a host's side of an exchange."""
    return StoreExchange(store, size, ranks, Deadline(timeout_s), ranks_in(size))


def exchange_between_hosts(size: int, local_size: int = 8) -> tuple[list[Any], list[Any]]:
    """Exchange the descriptions of all hosts, in any order but one after another.

    Returns:
        The values as rank 0's host got them, and as the others, if these are the same on all; the
        client of each host, with its counts.
    """
    server = CountingStore()
    starts = range(0, size, local_size)
    groups = [group(range(s, s + local_size), size, s // local_size) for s in starts]
    clients = [server.client() for _ in groups]
    order = sorted(range(len(groups)), key=lambda host: hashlib.sha256(b"%d" % host).digest())
    sides = {host: exchange_on(clients[host], groups[host].ranks, size) for host in order}
    for host in order:  # all values are there before a host looks for them
        sides[host]._send(groups[host].to_value())
    values = [sides[0]._receive(groups[0].to_value())]
    received = {side._await_values() for host, side in sides.items() if host != 0}
    return values + [unpack(data, size) for data in received], clients
