"""ElasticJob: the processes of an elastic training, as one of them knows them."""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torch_ring.collectives.objects import allgather_object, broadcast_object
from torch_ring.elastic.listener import Listener
from torch_ring.elastic.regroup import Group, LeftOutError, Limits, come, regroup
from torch_ring.errors import MismatchError, RingError, first_line
from torch_ring.rendezvous.channel import key_of
from torch_ring.rendezvous.directory import ask_directory, tell_directory
from torch_ring.rendezvous.launchers import process_name
from torch_ring.rendezvous.member import Member, member_id
from torch_ring.rendezvous.network import own_address
from torch_ring.rendezvous.open_store import open_store
from torch_ring.world import current
from torch_ring.world.process_set_keeper import ProcessSetKeeper

__all__ = ["ElasticJob"]

_log = logging.getLogger("torch_ring")

_KEY_BYTES = 32
_STORE_S = 5.0  # for an answer of the store of ranks that were alive a moment ago


class ElasticJob:
    """What a process keeps while worlds end: its listener, and the processes of the last world.

    Making one is collective, but for a newcomer. `regroup` makes the world that comes next.

    Thread: the training's. Blocking: as `torch_ring.elastic.regroup` says.

    Args:
        on_change: called when a process asks this one to be let in (True), or the launcher says
            that hosts have gone (False). Thread: any.

    Attributes:
        members: the processes of the last world that was made, by rank; none yet for a newcomer.
    """

    others_may_have_trained = False  # when a process that is no newcomer begins

    def __init__(self, on_change: Callable[[bool], None]) -> None:
        config = self._config = current.config()
        self.members: Sequence[Member] = ()
        self._generation = 1
        self._store: TCPStore | None = None  # of the present world
        self._serves: tuple[str, int] | None = None  # the address of the last store served here
        self._process_sets = ProcessSetKeeper()
        key = key_of(config.secret) if config.secret else self._common_key()
        host = current.world().address
        if config.directory:  # where hosts that are to come find it, as far as it can know
            host = own_address(config.interface, config.directory.rpartition(":")[0])
        self._listener = Listener(host, key, self._knows, on_change)
        self._own = Member(member_id(process_name()), host, self._listener.port)
        self._limits = Limits(
            config.elastic_timeout_s, config.heartbeat_timeout_s, config.min_ranks, config.max_ranks
        )
        if config.is_newcomer:
            return
        try:
            packed = allgather_object(self._own.packed(), name="elastic.members")
            self.members = [Member(*each) for each in packed]
            self._tell_directory()
        except BaseException:
            self.close()
            raise

    @property
    def has_newcomers(self) -> bool:
        """Whether processes wait here to be let in."""
        return not self._listener.newcomers.empty()

    @property
    def must_leave(self) -> bool:
        """Whether the launcher has asked this process to leave: its host is to go."""
        return self._listener.must_leave

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
        if self.members and current.is_initialized():
            self._process_sets.note(current.world().process_sets, _names(self.members))
        suspects = self._leave(self.members)
        before = len(self.members)
        limits = self._limits
        while True:
            group = self._next_group(limits, suspects)
            try:
                self._join(group)
                self._restore_process_sets(group.members)
                break
            except RingError as error:  # another one has died meanwhile, or a newcomer is different
                has_newcomers = any(member not in self.members for member in group.members)
                is_ours = isinstance(error, MismatchError) and not has_newcomers
                if is_ours or time.monotonic() - began > self._limits.timeout_s:
                    raise
                suspects |= self._leave(group.members)
                limits = replace(limits, most=0)
                _log.warning("the next world was not made: %s", first_line(error))
        self.members, self._generation = group.members, group.generation
        self._listener.dismiss_strangers()
        self._tell_directory()
        if current.rank() == 0:
            _log.warning(
                "%d ranks go on, of %d, after %.0f ms: %s",
                *(len(self.members), before, 1e3 * (time.monotonic() - began), cause),
            )

    def _restore_process_sets(self, members: Sequence[Member]) -> None:
        own = self._process_sets.told() if self.members else None
        told = allgather_object(own, "elastic.process_sets")
        self._process_sets.restore(current.world().process_sets, _names(members), told)

    def _leave(self, members: Sequence[Member]) -> set[str]:
        """Leave the world of `members`; return the other hosts with ranks that were lost in it."""
        world = current.find_world()
        lost = world.process_sets.lost_ranks() if world is not None and members else []
        if world is not None and lost:
            world.process_sets.be_brief()
        current.shutdown()
        return {members[rank].host for rank in lost} - {self._own.host}

    def _next_group(self, limits: Limits, suspects: Collection[str]) -> Group:
        if self.members:
            return regroup(
                self.members,
                self._generation,
                self._own,
                self._listener,
                limits,
                self._serve,
                suspects,
            )
        directory, key = self._config.directory, self._listener.key
        return come(lambda: ask_directory(directory, key), self._own, key, self._limits)

    def _common_key(self) -> bytes:
        own = secrets.token_hex(_KEY_BYTES)
        return bytes.fromhex(broadcast_object(own, 0, "elastic.key"))

    def _tell_directory(self) -> None:
        if self._config.directory and current.rank() == 0:
            key = self._listener.key
            try:
                tell_directory(self._config.directory, key, self._generation, self.members)
            except RingError as error:
                _log.warning("newcomers cannot find the ranks: %s", error)

    def _knows(self, process: Member) -> bool:
        return process in self.members

    def _serve(self) -> tuple[str, int]:
        """Serve a store for the next world; return its address."""
        host = self._own.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port: int = listener.getsockname()[1]
        self._store = self._open_store((host, port), listener)
        self._serves = (host, port)
        return host, port

    def _join(self, group: Group) -> None:
        """Make the next world with the others."""
        if self._own not in group.members:
            raise LeftOutError("the other ranks go on without this one")
        rank = list(group.members).index(self._own)
        if group.store != self._serves:
            self._store = self._open_store(group.store)
        assert self._store is not None
        current.rejoin(rank, len(group.members), self._store, self._listener.key.hex())

    def _open_store(
        self, address: tuple[str, int], listener: socket.socket | None = None
    ) -> TCPStore:
        store = open_store(address, "the store of the next world", listener)
        store.set_timeout(timedelta(seconds=min(_STORE_S, self._config.init_timeout_s)))
        return store


def _names(members: Sequence[Member]) -> list[str]:
    return [member.id for member in members]
