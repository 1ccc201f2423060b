# SPDX-License-Identifier: Apache-2.0
"""Group: one rank's membership of a group of torch.distributed.

The default group has a world: connections among all ranks, as ``torch_ring.init()`` makes them, but
over the store of torch.distributed. Groups of its ranks in ascending order are process sets of that
world: each has its own engine and memory, and they share the connections. Other groups have a world
of their own. A world ends with its last group; a thread that is still connecting a destroyed group
may keep the world alive for a moment. So a group takes the world of its parent group, and never
searches a list of worlds.

A store may outlive the groups, and torch reuses group names: after destroy_process_group(), and in
torch 2.13 for each group of the same ranks. So the keys of a process set in the store begin with
the token of the world and the number of groups that these ranks have made in it. A world needs no
such prefix: StoreExchange tells one world from the next.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import math
import multiprocessing
import multiprocessing.util
import operator
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from torch_ring._C import Engine
from torch_ring.c10d.reconfiguration import ReconfigureStore, in_order
from torch_ring.config import DEFAULT_GROUP, GROUP, Config
from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.errors import TimeoutError as RingTimeoutError
from torch_ring.setup.network import Deadline
from torch_ring.setup.store_client import host_of
from torch_ring.tracing.flight_recorder import trace_process
from torch_ring.world import current
from torch_ring.world.exit_reason import reason_at_exit, reason_to_leave
from torch_ring.world.join import World, join_world
from torch_ring.world.process_set_table import ProcessSetRecord, ProcessSetTable
from torch_ring.world.recorded import RecordedGroup, add_recorded

__all__ = ["Group"]

_log = logging.getLogger("torch_ring")

_CHECK_EVERY_S = 0.01  # interval between checks for the other members
_TIMEOUT_NAME = "the timeout of its group"
_SET_NUMBERS_FROM = 1 << 61  # above those that a world gives to its process sets


@dataclass(eq=False)
class _SharedWorld:
    """A world, and the groups that use it.

    Attributes:
        world: this process's view of it.
        global_ranks: the rank in torch.distributed, by rank of the world.
        users: the number of groups that have not left it.
        made: the number of process sets that this process has made, by their ranks. The members
            make their sets in the same order, so they agree on a set's number.
        left: process sets that this rank has left, and other members perhaps not.
    """

    world: World
    global_ranks: tuple[int, ...]
    users: int = 0
    made: Counter[tuple[int, ...]] = field(default_factory=Counter)
    left: list[_LeftSet] = field(default_factory=list)

    def let_go(self) -> None:
        """Free the memory and store keys of process sets that all members have left."""
        with _changing:
            left, self.left = self.left, []
        held = [each for each in left if not each.let_go(self.world.process_sets)]
        with _changing:
            self.left += held

    def release(self, why: str) -> None:
        """Leave the world, if no other group uses it."""
        self.users -= 1
        if self.users == 0:
            self.world.process_sets.close(why)


@dataclass(frozen=True)
class _MemberInfo:
    """A rank's description of itself for the other members of a process set."""

    slot: int = -1  # the offset of the rank's memory for the set
    nonce: int = 0  # the XOR of all ranks' nonces is the set's number
    failure: str = ""  # why the rank cannot take part


@dataclass
class _LeftSet:
    """A process set that this rank has left: other members may still use its memory.

    Attributes:
        store: has the descriptions of its members.
        rank, size: this process's rank in the set; the number of its members.
        slot: as in this rank's description.
        number: the set's number; None if this rank never used the set, and so does not know it.
        why: this rank's reason to leave it, for the other members; "": none.
    """

    store: Store
    rank: int
    size: int
    slot: int
    number: int | None
    why: str

    def let_go(self, process_sets: ProcessSetTable) -> bool:
        """Free the rank's memory and description, unless a member needs them; return whether."""
        if self.number is None:
            try:
                infos = _infos_in(self.store, self.size)
            except RuntimeError:  # the store is lost: no reason to fail the program's next group
                return False
            if infos is None:
                return False  # a member that has not made the set yet may still use it
            if any(info.failure for info in infos):  # all fail: no member uses the memory
                process_sets.release_slot(self.slot)
                return True  # keep the description: members may still have to read it
            self.number = _number_of(infos)
            process_sets.leave_unused_group(self.number, self.size, self.why)
        if not process_sets.has_ended(self.number):
            return False
        process_sets.release_slot(self.slot)
        with contextlib.suppress(RuntimeError):  # not every store can delete keys
            self.store.delete_key(f"member/{self.rank}")
        return True


_changing = threading.RLock()  # guards the variables below, and _SharedWorld
_groups: set[Group] = set()
_finalizer: multiprocessing.util.Finalize | None = None


class Group:
    """One rank's membership of a group.

    Thread: any.

    Args:
        rank: this process's rank in the group.
        size: the number of ranks in the group.
        global_ranks: the rank in torch.distributed, by rank of the group.
        store: used by this group alone.
        timeout_s: seconds for which an operation waits for a late rank, and the first operation for
            ranks that have not made the group. The ranks of the default group wait for one another
            in the constructor, at most for TORCH_RING_INIT_TIMEOUT.
        name: the group's name in torch.distributed; the same on all its ranks, and unique.
        is_default: whether init_process_group() makes the group. The default group connects at
            once, so that init_process_group() raises its errors; others connect at their first use.
        part_of: the parent group: the default group, or the one that is split; None: the default
            group has another backend.
        is_deferred: whether the group has no ranks before `reconfigure`.

    Attributes:
        rank, size: as the arguments, or as the last call of `reconfigure` has set them.

    Raises:
        RingError: the ranks of the default group could not connect; says why.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        global_ranks: tuple[int, ...],
        store: Store,
        timeout_s: float,
        *,
        name: str,
        is_default: bool,
        part_of: Group | None = None,
        is_deferred: bool = False,
    ) -> None:
        self.name = name
        self.rank, self.size, self._global_ranks = rank, size, global_ranks
        self._store = PrefixStore("torch_ring", store)
        config = Config.from_environment()
        if not is_default or timeout_s < config.init_timeout_s:
            config = replace(config, init_timeout_s=timeout_s, init_timeout_name=_TIMEOUT_NAME)
        self._config = replace(
            config,
            timeout_s=timeout_s,
            timeout_name=_TIMEOUT_NAME,
            words=DEFAULT_GROUP if is_default else GROUP,
            fusion_window_s=0.0,  # all ranks submit in the same order: nothing to wait for
        )
        self._home: _SharedWorld | None = None  # the world in which its parts are process sets
        if part_of is not None:
            self._home = part_of._home
        self._shared: _SharedWorld | None = None  # counts this group among its users
        self._record: ProcessSetRecord | None = None  # its process set; None: all ranks
        self._slot: int | None = None  # this rank's memory, if the group is a process set
        self._is_connected = False
        self._connecting = threading.Lock()
        self._deadline: Deadline | None = None  # for making the group's own world
        self._left: str | None = None  # the reason to leave, maybe ""; None: it has not left
        _prepare_exit(self._config)
        current.disable_in_child(self)
        trace_process(self._config.flight_dir)
        with _changing:
            _groups.add(self)
        self._own_store: ReconfigureStore | None = None
        self._is_deferred = is_deferred
        add_recorded(self)
        if is_deferred:
            return
        try:
            if is_default:
                self.connect()
                self._home = self._shared
            else:
                self._shared = self._find_world()
                if self._shared is not None:
                    self._post_info(self._shared)
        except BaseException:  # the caller gets no group, so it cannot leave it
            self._leave("")
            raise

    def connect(self) -> Engine:
        """Return the group's engine. Blocks until all its ranks have made the group.

        Raises:
            TimeoutError: a rank has not come in time; names it.
            RingError: another rank could not connect; says why.
        """
        try:
            with self._connecting:
                if self._is_deferred:
                    raise RingError("this group has no ranks yet: call reconfigure() first")
                self._check_member()
                if not self._is_connected:
                    self._join()
                    self._is_connected = True
                assert self._shared is not None
                record = self._record or self._shared.world.process_sets.everyone
        except RingError:
            self._check_member()  # leaving may have caused the error: then say so
            raise
        finally:
            self._release_if_left()
        self._check_member()
        return record.engine()

    def _release_if_left(self) -> None:
        if self._left is not None:  # while this thread held `_connecting`
            self._release(self._left)

    def _check_member(self) -> None:
        if self._left is not None:
            raise RingError("this group was destroyed or aborted")

    def among(self, ranks: Sequence[int], store: Store, timeout_s: float) -> Group:
        """Return the group of some ranks of this one, in the given order: ``split_group()``.

        Args:
            ranks: ranks of this group, with this process's own.
            store: used by the new group alone.
            timeout_s: as for this class.
        """
        global_ranks = tuple(self._global_ranks[rank] for rank in ranks)
        rank = list(ranks).index(self.rank)
        name = f"{self.name}/{','.join(map(str, global_ranks))}"
        return Group(
            rank,
            len(ranks),
            global_ranks,
            store,
            timeout_s,
            name=name,
            is_default=False,
            part_of=self,
        )

    def handle(self) -> str:
        """Return this rank's handle, by which other ranks reach it in `reconfigure`."""
        if self._own_store is None:
            world = self._shared.world if self._shared is not None else None
            one_host = world is not None and len(set(world.host_of)) == 1
            towards = host_of(self._store)
            self._own_store = ReconfigureStore(self._config.interface, towards, one_host=one_host)
        return self._own_store.handle.text()

    def reconfigure(
        self, uuid: int, handles: list[str] | set[str], timeout_s: float
    ) -> tuple[int, int]:
        """Leave the ranks of this group, and make a new one in its place.

        Args:
            uuid: the same on all ranks of the new group, and never used before.
            handles: those of the new group's ranks, this one included. A list gives their order.
            timeout_s: seconds for which the ranks wait for one another.

        Returns:
            This process's rank and the number of ranks.

        Raises:
            InvalidArgumentError: the handles are wrong.
            TimeoutError, RingError: a rank has not come.
        """
        ranks = in_order(handles)
        self.handle()
        assert self._own_store is not None
        if self._own_store.handle not in ranks:
            raise InvalidArgumentError("reconfigure(): this rank's own handle is not among them")
        try:
            with self._connecting:
                self._release(reason_to_leave() or "it called reconfigure()")
                with _changing:  # an aborted group can be used again
                    self._left = None
                    _groups.add(self)
                self._is_connected = False
                self._is_deferred = True
                store = self._own_store.store(uuid, ranks, timeout_s)
                self.rank, self.size = ranks.index(self._own_store.handle), len(ranks)
                self._global_ranks = tuple(range(self.size))
                self._store = PrefixStore("torch_ring", store)
                words = replace(self._config.words, join="reconfigure()")
                self._config = replace(self._config, init_timeout_s=timeout_s, words=words)
                self._shared = self._home = self._make_world()
                self._is_connected, self._is_deferred = True, False
        finally:
            self._release_if_left()
        self._check_member()
        return self.rank, self.size

    def leave(self, why: str = "") -> None:
        """Leave the group: its operations in flight fail, on all ranks.

        Args:
            why: the reason for the other ranks, unless an exception is being handled.
        """
        self._leave(reason_to_leave() or why)

    def recorded(self) -> RecordedGroup | None:
        """Return the group's record for the tracing, if it is connected."""
        shared, record = self._shared, self._record
        if shared is None or not self._is_connected:
            return None
        engine = (record or shared.world.process_sets.everyone).running
        if engine is None:
            return None
        ranks, folder, world = self._global_ranks, self._config.flight_dir, shared.world
        return RecordedGroup(self.name, ranks, folder, engine, world, shared.global_ranks)

    def disable(self) -> None:
        """Abandon the parent's engines in a forked child."""
        global _changing
        _changing = threading.RLock()
        _groups.clear()
        self._home = None
        if self._shared is not None:
            self._shared.world.process_sets.abandon()

    # --- joining

    def _find_world(self) -> _SharedWorld | None:
        """Return the world in which the group is a process set; None: it has one of its own.

        All members must get the same answer, so it must not depend on the other groups that are
        connected now.
        """
        if self.size == 1 or list(self._global_ranks) != sorted(self._global_ranks):
            return None
        with _changing:
            home = self._home
            if (
                home is None
                or home.users == 0
                or not set(self._global_ranks) <= set(home.global_ranks)
            ):
                return None
            home.users += 1
            return home

    def _post_info(self, shared: _SharedWorld) -> None:
        number = shared.made[self._global_ranks]
        shared.made[self._global_ranks] += 1
        self._store = PrefixStore(f"{shared.world.token}/{number}", self._store)
        shared.let_go()
        try:
            slot = shared.world.process_sets.reserve_slot(self._ranks_in(shared))
            info = _MemberInfo(slot, secrets.randbits(60))
            self._slot = slot
        except RingError as error:
            info = _MemberInfo(failure=str(error))
        self._store.set(f"member/{self.rank}", json.dumps(vars(info)))

    def _ranks_in(self, shared: _SharedWorld) -> tuple[int, ...]:
        return tuple(shared.global_ranks.index(rank) for rank in self._global_ranks)

    def _join(self) -> None:
        shared = self._shared
        if shared is None:
            self._shared = self._make_world()
            return
        infos = self._member_infos()
        for rank, info in enumerate(infos):
            if info.failure:
                raise RingError(
                    f"rank {self._global_ranks[rank]} could not make the group "
                    f"{list(self._global_ranks)}: {info.failure}"
                )
        self._record = shared.world.process_sets.add_group(
            self._ranks_in(shared),
            _number_of(infos),
            [info.slot for info in infos],
            self._config,
        )

    def _member_infos(self) -> list[_MemberInfo]:
        """Return the descriptions of all ranks, by rank."""
        keys = _info_keys(self.size)
        began = time.monotonic()
        warning_s = self._config.stall_warning_s
        told_s = warning_s or math.inf  # when to warn next, in seconds after the beginning
        try:
            # store.wait() would make torch log a warning when it times out.
            while (infos := _infos_in(self._store, self.size)) is None:
                self._check_member()
                waited_s = time.monotonic() - began
                if waited_s > self._config.init_timeout_s:
                    raise RingTimeoutError(
                        f"{self._late_members(keys, self._config.init_timeout_s)}: every member "
                        "calls new_group()"
                    )
                if waited_s > told_s:
                    _log.warning("%s", self._late_members(keys, told_s))
                    told_s += warning_s
                time.sleep(_CHECK_EVERY_S)
        except RuntimeError as error:
            if isinstance(error, RingError):
                raise
            raise RingError(f"the store of torch.distributed is lost: {error}") from None
        return infos

    def _late_members(self, keys: Sequence[str], waited_s: float) -> str:
        late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        ranks = ", ".join(str(self._global_ranks[rank]) for rank in late[:16])
        return (
            f"rank {self._global_ranks[self.rank]}: the ranks {ranks} of the group "
            f"{list(self._global_ranks)} have not made it within {waited_s:g} s"
        )

    def _make_world(self) -> _SharedWorld:
        given = {"rank": self.rank, "size": self.size, "local_rank": None, "local_size": None}
        config = self._config
        self._deadline = Deadline(
            config.init_timeout_s, config.init_timeout_name, config.words.join
        )
        self._check_member()  # from now on, _leave() ends the deadline
        world = join_world(
            None, None, given, self._store, config, of_init=False, deadline=self._deadline
        )
        return _SharedWorld(world, self._global_ranks, users=1)

    # --- leaving

    def _leave(self, why: str) -> None:
        with _changing:
            if self._left is not None:
                return
            self._left = why
            _groups.discard(self)
        if self._deadline is not None:
            self._deadline.end()
        # A thread that is connecting the group sees `_left`, and releases the group itself.
        if self._connecting.acquire(blocking=False):
            try:
                self._release(why)
            finally:
                self._connecting.release()

    def _release(self, why: str) -> None:
        """Leave the group's process set, and its world if no other group uses it."""
        with _changing:
            shared, self._shared, self._home = self._shared, None, None
            record, self._record = self._record, None
        if shared is None:
            return
        if record is not None:
            shared.world.process_sets.leave_group(record, why)
        with _changing:
            if self._slot is not None:
                number = record.number if record is not None else None
                shared.left.append(
                    _LeftSet(self._store, self.rank, self.size, self._slot, number, why)
                )
                self._slot = None
            shared.release(why)


def _info_keys(size: int) -> list[str]:
    return [f"member/{rank}" for rank in range(size)]


def _infos_in(store: Store, size: int) -> list[_MemberInfo] | None:
    """Return the descriptions of all members, by rank; None if one is missing."""
    keys = _info_keys(size)
    if not store.check(keys):
        return None
    return [_MemberInfo(**json.loads(text)) for text in store.multi_get(keys)]


def _number_of(infos: Sequence[_MemberInfo]) -> int:
    """Return the number of the process set whose members have these descriptions."""
    return _SET_NUMBERS_FROM + functools.reduce(operator.xor, (info.nonce for info in infos))


def _prepare_exit(config: Config) -> None:
    """Make this process leave its groups when it exits."""
    global _finalizer
    current.prepare(config)
    # A multiprocessing child does not run atexit functions.
    is_known = _finalizer is not None and _finalizer.still_active()
    if multiprocessing.parent_process() is not None and not is_known:
        _finalizer = multiprocessing.util.Finalize(None, _leave_all, exitpriority=1)


def _leave_all() -> None:
    for group in list(_groups):
        group._leave(reason_at_exit())


atexit.register(_leave_all)
