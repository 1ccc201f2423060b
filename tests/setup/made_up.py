# SPDX-License-Identifier: Apache-2.0
"""Made-up descriptions of ranks."""

from __future__ import annotations

import hashlib
from typing import Any

from torch_ring.errors import RingError
from torch_ring.setup.network import Deadline
from torch_ring.setup.peer_info import HostInfo
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
