# SPDX-License-Identifier: Apache-2.0
"""ElasticJob: one process's view of the processes of an elastic training."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import secrets
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torch_ring.collectives.objects import allgather_object, broadcast_object
from torch_ring.elastic.regroup import (
    CallOverError,
    LeftOutError,
    Limits,
    NextWorld,
    come,
    leavers_of,
    regroup,
)
from torch_ring.errors import MismatchError, RingError, first_line
from torch_ring.membership.directory import ask_directory, notify, tell_directory, tell_leaving
from torch_ring.membership.listener import Listener
from torch_ring.membership.member import Member, MessageKey, Reach, key_of, member_id, reach
from torch_ring.setup.launchers import process_name
from torch_ring.setup.network import own_address
from torch_ring.setup.store_client import open_store
from torch_ring.world import current
from torch_ring.world.engine import EngineExchange
from torch_ring.world.join import World, on_join
from torch_ring.world.process_set import ProcessSetKeeper

__all__ = ["ENDED_BY_SIGTERM", "ElasticJob"]

_log = logging.getLogger("torch_ring")

ENDED_BY_SIGTERM = 128 + signal.SIGTERM  # the exit code, as in a shell

_SECRET_BYTES = 32
_GLANCE_S = 0.1  # wait for an answer of a living rank, while a world is made
_STORE_S = 5.0  # wait for an answer of the store of ranks that were alive a moment ago

_calls = 0  # elastic functions called in this process, with those that the ranks ended without it
_generation = 0  # the generation of the last world of an elastic job that this process knows
_met: _Met | None = None  # taken by the first elastic function
_is_regrouping = False


class ElasticJob:
    """The part of a process that outlives worlds: its listener, and the last world's processes.

    The constructor is collective, with two exceptions: that of a newcomer, and the first one of a
    job of torch_ring.run. The processes of such a job exchange their addresses in init(), so that a
    process which dies after init() is noticed as missing. `regroup` makes the next world.

    Thread: the training thread. Blocking: see `torch_ring.elastic.regroup`.

    Args:
        on_change: called when a process asks this one to be let in (True), or the launcher says
            that hosts have gone (False). Thread: any.

    Attributes:
        members: the processes of the last world, by rank; empty in a newcomer.
        is_signalled: whether a signal has asked this process to leave.
    """

    def __init__(self, on_change: Callable[[bool], None]) -> None:
        _count(_calls + 1, _generation)
        config = self._config = current.config()
        self.members: Sequence[Member] = ()
        self.is_signalled = False
        self._store: TCPStore | None = None  # of the present world
        self._serves: tuple[str, int] | None = None  # the address of the last store served here
        self._process_sets = ProcessSetKeeper()
        self._limits = Limits(
            config.elastic_timeout_s, config.heartbeat_timeout_s, config.min_ranks
        )
        met = _take_met()
        if met is None:
            new = secrets.token_hex(_SECRET_BYTES)
            secret = config.secret or broadcast_object(new, 0, "elastic.key")
            met = _Met(current.world(), key_of(secret, config.tls))
        self._listener, self._own = met.listener, met.own
        self._listener.begin(self._knows, on_change, _calls)
        if config.is_newcomer:
            return
        try:
            if met.members:
                self._note(met.members, 1)
            else:
                own = self._own.packed(), _generation, _calls
                gathered = allgather_object(own, name="elastic.members")
                calls = [call for _, _, call in gathered]
                if calls != calls[:1] * len(calls):
                    raise MismatchError(
                        f"the ranks call elastic functions unequally often: {calls} times, by rank"
                    )
                generation = 1 + max(generation for _, generation, _ in gathered)
                self._note([Member(*packed) for packed, _, _ in gathered], generation)
            self._tell_directory(is_first=True)
        except BaseException:
            self.close()
            raise

    @property
    def has_newcomers(self) -> bool:
        """Whether processes wait here to be let in."""
        return not self._listener.newcomers.empty()

    @property
    def is_member(self) -> bool:
        """Whether this process belongs to a world; a newcomer that waits does not."""
        return bool(self.members)

    def leavers(self) -> Collection[int]:
        """Return the ranks that leave now. Collective, at one step.

        A process leaves if the launcher or a signal has asked it to.
        """
        own = self._listener.must_leave, self.has_newcomers
        return leavers_of(allgather_object(own, name="elastic.leave"), self._limits)

    def ask_to_leave(self) -> None:
        """Let this process leave, and tell the launcher and rank 0, which tells the others.

        Thread: any. Blocks for seconds if the host of one of them is gone.
        """
        self._listener.must_leave = self.is_signalled = True
        key, directory = self._listener.key, self._config.directory
        if directory and process_name():
            with contextlib.suppress(RingError):  # the launcher is gone, and this process will end
                tell_leaving(directory, key, process_name())
        if self.members:
            notify(self.members[0], key, "hosts")

    def close(self) -> None:
        """Stop listening: this process has left the job."""
        self._listener.close()
        self._store = None

    def regroup(self, cause: BaseException | None, leavers: Collection[int] = ()) -> None:
        """Make a world of the living processes and newcomers. Collective of all of them.

        Args:
            cause: why the last world has ended; None: this process is a newcomer.
            leavers: ranks that have left, as all ranks know.

        Raises:
            CallOverError: the others are in a later function than this newcomer.
            RingError: too few processes live; or they go on without this one.
        """
        began = time.monotonic()
        if self.members and current.is_initialized():
            self._process_sets.note(current.world().process_sets, _names(self.members))
        suspects = self._leave(self.members)
        before = len(self.members)
        self.members = [m for rank, m in enumerate(self.members) if rank not in leavers]
        limits = self._limits
        while True:
            group = self._next_group(limits, suspects)
            try:
                self._join(group)
                self._restore_process_sets(group.members)
                break
            except RingError as error:  # another rank has died meanwhile, or a newcomer differs
                has_newcomers = any(member not in self.members for member in group.members)
                is_ours = isinstance(error, MismatchError) and not has_newcomers
                if is_ours or time.monotonic() - began > self._limits.timeout_s:
                    raise
                suspects |= self._leave(group.members)
                limits = replace(limits, takes_newcomers=False)
                _log.warning("the next world was not made: %s", first_line(error))
        self._note(group.members, group.generation)
        self._listener.dismiss_strangers()
        self._tell_directory()
        if current.rank() == 0:
            ranks = f"{len(self.members)} rank{'s go' if len(self.members) != 1 else ' goes'} on"
            # The advice of an ended world is for programs without elastic.run.
            reason = str(cause).removesuffix(f". {self._config.words.remedy}")
            waited_ms = 1e3 * (time.monotonic() - began)
            _log.warning("%s, of %d, after %.0f ms: %s", ranks, before, waited_ms, reason)

    def _restore_process_sets(self, members: Sequence[Member]) -> None:
        kept = self._process_sets
        own = (kept.noted() if self.members else None, kept.has_levels)
        noted, have_levels = zip(*allgather_object(own, "elastic.process_sets"), strict=True)
        world = current.world()
        hosts = world.host_of if any(have_levels) else None
        kept.restore(world.process_sets, _names(members), noted, hosts)

    def _leave(self, members: Sequence[Member]) -> set[str]:
        """Leave the world of `members`; return the other hosts with ranks that were lost in it."""
        world = current.find_world()
        lost = world.process_sets.lost_ranks() if world is not None and members else []
        if world is not None and lost:
            world.process_sets.be_brief()
        current.shutdown()
        return {members[rank].host for rank in lost} - {self._own.host}

    def _next_group(self, limits: Limits, suspects: Collection[str]) -> NextWorld:
        if self.members:
            return regroup(
                self.members,
                _generation,
                self._own,
                self._listener,
                limits,
                self._serve,
                suspects,
            )
        directory, key = self._config.directory, self._listener.key
        try:
            return come(lambda: ask_directory(directory, key), self._own, key, self._limits, _calls)
        except CallOverError:
            with _regrouping():
                current.init()  # a world of one again, until the next function
            raise

    def _note(self, members: Sequence[Member], generation: int) -> None:
        self.members = members
        _count(_calls, generation)

    def _tell_directory(self, *, is_first: bool = False) -> None:
        if self._config.directory and current.rank() == 0:
            key = self._listener.key
            try:
                tell_directory(
                    self._config.directory, key, _generation, self.members, is_first=is_first
                )
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

    def _join(self, group: NextWorld) -> None:
        """Make the next world with the others."""
        if self._own not in group.members:
            raise LeftOutError("the other ranks go on without this one")
        rank = list(group.members).index(self._own)
        if len(group.members) > 1 and group.store != self._serves:
            self._store = self._open_store(group.store)
        missed = functools.partial(self._missed, group.members)
        with _regrouping():
            current.rejoin(
                rank, len(group.members), self._store, self._listener.key.secret.hex(), missed
            )

    def _missed(self, members: Sequence[Member], here: Collection[int]) -> Collection[int]:
        """Return ranks that have exited, if it finds any.

        It checks only the successors of the ranks in `here`. So each host checks few ranks, and if
        ranks are missing, some host checks one of them.
        """
        size, key = len(members), self._listener.key
        return [
            rank
            for rank in sorted({(rank + 1) % size for rank in here}.difference(here))
            if reach(members[rank], key, _GLANCE_S, is_suspect=True) is Reach.GONE
        ]

    def _open_store(
        self, address: tuple[str, int], listener: socket.socket | None = None
    ) -> TCPStore:
        store = open_store(address, "the store of the next world", listener)
        store.set_timeout(timedelta(seconds=min(_STORE_S, self._config.init_timeout_s)))
        return store


class _Met:
    """This process's listener, and the processes of the job as exchanged in init().

    Attributes:
        listener: this process's listener.
        own: this process.
        members: all processes, by rank; empty if they have exchanged nothing.
    """

    def __init__(self, world: World, key: MessageKey) -> None:
        config, address = world.config, world.address
        if config.directory:  # an address that later hosts can reach, as far as this one knows
            address = own_address(config.interface, config.directory.rpartition(":")[0])
        self.members: Sequence[Member] = ()
        self.listener = Listener(address, key, lambda process: process in self.members)
        self.own = Member(member_id(process_name()), address, self.listener.port)


def _meet(world: World) -> None:
    """Begin a job if this world is its first; in a job of torch_ring.run, learn the members."""
    global _met
    if _is_regrouping:
        return
    _count(0, 0)
    _met = None
    config = world.config
    if not (config.directory and config.secret and process_name()) or config.is_newcomer:
        return
    met = _Met(world, key_of(config.secret, config.tls))
    try:
        with EngineExchange(world.engine) as exchange:
            packed = exchange.texts(json.dumps(met.own.packed()))
    except BaseException:
        met.listener.close()
        raise
    met.members = [Member(*json.loads(text)) for text in packed]
    _met = met
    world.on_end.append(lambda _: _forget(met))


def _forget(met: _Met) -> None:
    """Stop listening, unless an elastic function has taken the listener."""
    if _met is met:
        _take_met()
        met.listener.close()


def _take_met() -> _Met | None:
    global _met
    met, _met = _met, None
    return met


@contextlib.contextmanager
def _regrouping() -> Iterator[None]:
    """Context in which a new world continues this job, and does not begin another one."""
    global _is_regrouping
    _is_regrouping = True
    try:
        yield
    finally:
        _is_regrouping = False


on_join(_meet)


def _count(calls: int, generation: int) -> None:
    global _calls, _generation
    _calls, _generation = calls, generation


def _names(members: Sequence[Member]) -> list[str]:
    return [member.id for member in members]
