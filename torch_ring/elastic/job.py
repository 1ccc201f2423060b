"""ElasticJob: the processes of an elastic training, as one of them knows them."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torch_ring.collectives.objects import allgather_object, broadcast_object
from torch_ring.elastic.directory import ask_directory, tell_directory
from torch_ring.elastic.listener import Listener
from torch_ring.elastic.member import Member
from torch_ring.elastic.regroup import Group, Limits, come, regroup
from torch_ring.errors import RingError
from torch_ring.world import current

__all__ = ["ElasticJob", "key_of"]

_log = logging.getLogger("torch_ring")

_KEY_BYTES = 32


def key_of(secret: str) -> bytes:
    """Return the key that follows from a job's secret."""
    return hashlib.sha256(b"torch_ring elastic\0" + secret.encode()).digest()


class ElasticJob:
    """What a process keeps while worlds end: its listener, and the processes of the last world.

    Making one is collective, but for a newcomer. `regroup` makes the world that comes next.

    Thread: the training's. Blocking: as `torch_ring.elastic.regroup` says.

    Args:
        on_newcomer: called when a process asks this one to be let in. Thread: any.

    Attributes:
        members: the processes of the last world that was made, by rank; none yet for a newcomer.
    """

    def __init__(self, on_newcomer: Callable[[], None]) -> None:
        config = self._config = current.config()
        self.members: Sequence[Member] = ()
        self._generation = 1
        self._store: TCPStore | None = None  # served here, for the present world
        key = key_of(config.secret) if config.secret else self._common_key()
        host = current.world().address
        self._listener = Listener(host, key, self._knows, on_newcomer)
        self._own = Member(secrets.token_hex(8), host, self._listener.port)
        self._limits = Limits(
            config.elastic_timeout_s, config.heartbeat_timeout_s, config.min_ranks, config.max_ranks
        )
        if config.is_newcomer:
            return
        try:
            self.members = allgather_object(self._own, name="elastic.members")
            self._tell_directory()
        except BaseException:
            self.close()
            raise

    @property
    def has_newcomers(self) -> bool:
        """Whether processes wait here to be let in."""
        return not self._listener.newcomers.empty()

    def close(self) -> None:
        """Stop listening: this process has left the job."""
        self._listener.close()
        self._store = None

    def regroup(self, cause: BaseException | None) -> None:
        """Make a world of the processes that live, and of newcomers. Collective of those.

        Args:
            cause: why the last world has ended; None: this process is a newcomer.

        Raises:
            RingError: too few processes live; or they go on without this one.
        """
        began = time.monotonic()
        current.shutdown()
        before = len(self.members)
        while True:
            group = self._next_group()
            try:
                self._join(group)
                break
            except RingError as error:  # another one has died meanwhile
                if time.monotonic() - began > self._limits.timeout_s:
                    raise
                _log.debug("the next world was not made: %s", error)
        self.members, self._generation = group.members, group.generation
        self._listener.dismiss_strangers()
        self._tell_directory()
        if current.rank() == 0:
            _log.warning(
                "%d ranks go on, of %d, after %.0f ms: %s",
                *(len(self.members), before, 1e3 * (time.monotonic() - began), cause),
            )

    def _next_group(self) -> Group:
        if self.members:
            return regroup(
                *(self.members, self._generation, self._own),
                *(self._listener, self._limits, self._serve),
            )
        directory, key = self._config.directory, self._listener.key
        return come(lambda: ask_directory(directory, key), self._own, key, self._limits)

    def _common_key(self) -> bytes:
        own = secrets.token_hex(_KEY_BYTES)
        return bytes.fromhex(broadcast_object(own, 0, "elastic.key"))

    def _tell_directory(self) -> None:
        if self._config.directory and current.rank() == 0:
            key = self._listener.key
            tell_directory(self._config.directory, key, self._generation, self.members)

    def _knows(self, process: Member) -> bool:
        return process in self.members

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
