"""ElasticJob: the processes of an elastic training, as one of them knows them."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torch_ring.collectives.objects import allgather_object, broadcast_object
from torch_ring.elastic.listener import Listener
from torch_ring.elastic.member import Member
from torch_ring.elastic.regroup import Group, Limits, regroup
from torch_ring.errors import RingError
from torch_ring.world import current

__all__ = ["ElasticJob"]

_log = logging.getLogger("torch_ring")

_KEY_BYTES = 32


class ElasticJob:
    """What a process keeps while worlds end: its listener, and the processes of the last world.

    Making one is collective. `regroup` makes the world that comes after a failure.

    Thread: the training's. Blocking: as `torch_ring.elastic.regroup` says.

    Attributes:
        members: the processes of the last world that was made, by rank.
    """

    def __init__(self) -> None:
        self._config = current.config()
        key = broadcast_object(secrets.token_hex(_KEY_BYTES), 0, "elastic.key")
        self.members: Sequence[Member] = ()
        self._store: TCPStore | None = None  # served here, for the present world
        host = current.world().address
        self._listener = Listener(host, bytes.fromhex(key), self._knows)
        self._own = Member(secrets.token_hex(8), host, self._listener.port)
        try:
            self.members = allgather_object(self._own, name="elastic.members")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening: this process has left the job."""
        self._listener.close()
        self._store = None

    def regroup(self, cause: BaseException) -> None:
        """Make a world of the processes that live. Collective of those.

        Args:
            cause: why the last world has ended.

        Raises:
            RingError: too few processes live; or they go on without this one.
        """
        began = time.monotonic()
        current.shutdown()
        before = len(self.members)
        limits = Limits(
            self._config.elastic_timeout_s,
            self._config.heartbeat_timeout_s,
            self._config.min_ranks,
        )
        while True:
            group = regroup(self.members, self._own, self._listener, limits, self._serve)
            try:
                self._join(group)
                break
            except RingError as error:  # another one has died meanwhile
                if time.monotonic() - began > self._config.elastic_timeout_s:
                    raise
                _log.debug("the next world was not made: %s", error)
        self.members = group.members
        self._listener.dismiss_strangers()
        if current.rank() == 0:
            _log.warning(
                "%d of %d ranks go on, after %.0f ms: %s",
                *(len(self.members), before, 1e3 * (time.monotonic() - began), cause),
            )

    def _knows(self, process: str) -> bool:
        return any(member.id == process for member in self.members)

    def _serve(self) -> tuple[str, int]:
        """Serve a store for the next world; return its address."""
        self._store = TCPStore(
            self._own.host,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._config.init_timeout_s),
        )
        return self._own.host, self._store.port

    def _join(self, group: Group) -> None:
        """Make the next world with the others."""
        rank = list(group.members).index(self._own)
        if self._store is None or group.store != (self._own.host, self._store.port):
            self._store = TCPStore(
                *group.store,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._config.init_timeout_s),
            )
        current.rejoin(rank, len(group.members), self._store, self._listener.key.hex())
