# SPDX-License-Identifier: Apache-2.0
"""ReconfigureStore: the ranks of a new group find one another without a store of the job.

The job's first store may have died with its rank 0. So every rank that may take part in a
reconfiguration serves a small store of its own, whose address is in the rank's handle. The ranks of
a new group meet in the store of its first rank.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from torch_ring.errors import InvalidArgumentError
from torch_ring.errors import TimeoutError as RingTimeoutError
from torch_ring.setup.network import own_address, own_loopback

__all__ = ["ReconfigureStore", "in_order"]


@dataclass(frozen=True)
class ReconfigureHandle:
    """The address of a rank before the ranks are a group: ``get_reconfigure_handle()``.

    Attributes:
        name: random; no other rank has it.
        host: an address of this rank's host.
        port: of this rank's store.
    """

    name: str
    host: str
    port: int

    def text(self) -> str:
        """Return the handle as the text that torch passes on."""
        return json.dumps(vars(self), sort_keys=True)

    @classmethod
    def of(cls, text: str) -> ReconfigureHandle:
        """Read a handle. Raises InvalidArgumentError."""
        try:
            values = json.loads(text)
            return cls(str(values["name"]), str(values["host"]), int(values["port"]))
        except (ValueError, KeyError, TypeError):
            raise InvalidArgumentError(
                f"{text!r} is no handle of a rank with the backend ring"
            ) from None


def in_order(handles: Collection[str]) -> list[ReconfigureHandle]:
    """Return the handles by rank: in the order of a list; those of a set are sorted."""
    texts = list(handles) if isinstance(handles, list) else sorted(handles)
    if not texts or len(set(texts)) < len(texts):
        raise InvalidArgumentError("reconfigure() needs one handle for each rank, none twice")
    return [ReconfigureHandle.of(text) for text in texts]


class ReconfigureStore:
    """This rank's store for groups of which it is the first rank.

    Args:
        interface: TORCH_RING_INTERFACE.
        towards: a host to which the route leads to the other ranks, if known.
        one_host: whether all ranks are on this host.
    """

    def __init__(self, interface: str, towards: str | None, *, one_host: bool) -> None:
        host = own_address(interface, towards, one_host=one_host)
        self._store = TCPStore(own_loopback(), 0, is_master=True, wait_for_workers=False)
        self.handle = ReconfigureHandle(secrets.token_hex(8), host, self._store.port)

    def store(self, uuid: int, ranks: list[ReconfigureHandle], timeout_s: float) -> Store:
        """Return the store in which the ranks of a new group meet: the first rank's.

        Raises:
            TimeoutError: the first rank's store does not answer in time.
        """
        first = ranks[0]
        if first == self.handle:
            return PrefixStore(f"reconfigure/{uuid}", self._store)
        timeout = timedelta(seconds=timeout_s)
        try:
            store = TCPStore(first.host, first.port, is_master=False, timeout=timeout)
        except RuntimeError as error:
            raise RingTimeoutError(
                f"reconfigure(): the store of the first rank, at {first.host}:{first.port}, does "
                f"not answer: {error}"
            ) from None
        return PrefixStore(f"reconfigure/{uuid}", store)
