# SPDX-License-Identifier: Apache-2.0
"""init, shutdown, rank, size: the world of this process."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

from torch.distributed import Store  # type: ignore[attr-defined]

from torch_ring._C import Engine, arm_failpoints, await_calls, forget_calls, keep_results
from torch_ring.config import Config, failpoints, misspelt
from torch_ring.errors import InvalidArgumentError, NotInitializedError
from torch_ring.membership.first_world import begin, begins_with_others
from torch_ring.setup import connect, network
from torch_ring.setup import store as stores
from torch_ring.setup.host_socket import Missed
from torch_ring.setup.launchers import is_of_inner_job
from torch_ring.setup.network import at_fork
from torch_ring.world.exit_reason import reason_at_exit, reason_to_leave, watch_exit
from torch_ring.world.join import World, join_world
from torch_ring.world.recorded import group_of_job, place_in

__all__ = [
    "after_join",
    "config",
    "cpu_sharers",
    "cross_rank",
    "cross_size",
    "disable_in_child",
    "engine",
    "find_world",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "prepare",
    "rank",
    "rejoin",
    "require_own",
    "shutdown",
    "size",
    "world",
]

_log = logging.getLogger("torch_ring")


def set_up_log(config: Config) -> None:
    """Log to stderr, unless the program has set up logging."""
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[torch_ring] %(message)s"))
        _log.addHandler(handler)
    if _log.level == logging.NOTSET:
        _log.setLevel(config.log_level.upper())


# The time limit of rejoin(), whose ranks were alive a moment ago.
_REJOIN_S = 5.0
_REJOIN_S_PER_RANK = 0.05

_EXIT_PATIENCE_S = 5.0  # for other threads that are in init(), or wait for other ranks
# The system may take these pages when it is short of memory, so nobody needs to choose.
_KEPT_RESULT_BYTES = 256 << 20


class _Inherited(Protocol):
    def disable(self) -> None:
        """Stop touching memory of the parent."""


_world: World | None = None
_is_parents = False  # this process was forked, and _world is its parent's
_changing = threading.RLock()  # held by init() and shutdown(), even in a signal handler
_disabled_in_child: WeakSet[_Inherited] = WeakSet()
_finalizer: multiprocessing.util.Finalize | None = None
_after_join: set[Callable[[], None]] = set()


def init(
    comm: Any = None,
    process_sets: Sequence[Any] | str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    store: Store | None = None,
    process_group: Any = None,
) -> None:
    """Join the other ranks. A process without a launcher is a world of one.

    Does nothing in a process that has joined already, but warns if the arguments ask for another
    rank; after shutdown() it joins anew.

    Args:
        comm: a list of ranks, or an mpi4py communicator: a world of these processes only,
            renumbered in the order of their ranks. None, the usual value: all ranks.
        process_sets: sets to add, each a ProcessSet or a list of ranks, the same on all ranks.
            "dynamic" (Horovod's word) and None add no set; nor does a newcomer to an elastic job.
        rank: the rank of this process, from 0; None: from the launcher's variables.
        size: the number of processes; goes with `rank`. None: from the launcher's variables.
        local_rank: the index of this process within its node; None: from the launcher's variables,
            or else found by the ranks.
        local_size: the number of processes of its node; None: as for `local_rank`.
        store: the key-value store over which the ranks find one another; None: the store named by
            the launcher's variables.
        process_group: a group of torch.distributed: its ranks make the world, and find one another
            over its store. Allowed together with `process_sets` only. None, without other
            arguments: the default group, if ``init_process_group()`` has made one of all ranks of
            the job.

    Raises:
        InvalidArgumentError: a variable or argument is wrong; names it.
        MismatchError: a setting or `process_sets` differs between ranks; names it.
        TimeoutError: ranks did not arrive within TORCH_RING_INIT_TIMEOUT; names them.
        RingError: another rank could not join; says why.
    """
    with _changing:
        if _world is not None:
            _warn_if_other(_world, rank, size)
            return
        config = Config.from_environment()
        if config.is_newcomer and is_of_inner_job(rank=rank, size=size):  # an inherited variable
            config = replace(config, is_newcomer=False)
        places = (comm, rank, size, local_rank, local_size, store)
        if process_group is not None and any(place is not None for place in places):
            raise InvalidArgumentError(
                "process_group tells rank, size and store: give init() no other argument with it"
            )
        if all(place is None for place in places) and not config.is_newcomer:
            process_group = process_group or group_of_job()
            if process_group is not None:
                rank, size, store = place_in(process_group)
        if config.is_newcomer:  # alone, until the ranks of the job let it in: rejoin()
            comm, process_sets, rank, size, local_rank, local_size = None, None, 0, 1, None, None
        given = {"rank": rank, "size": size, "local_rank": local_rank, "local_size": local_size}
        if begins_with_others(config) and all(p is None for p in (comm, *given.values(), store)):
            set_up_log(config)
            begin(config, partial(_join, None, process_sets, config))
            return
        _join(comm, process_sets, config, given, store)


def rejoin(rank: int, size: int, store: Store | None, secret: str, missed: Missed) -> None:
    """Join the remaining ranks of a world that has ended.

    Args:
        rank: this process's rank in the new world.
        size: the number of ranks there.
        store: the store where they meet; one rank needs none.
        secret: a secret that only they know.
        missed: as for `FailurePath`.

    Raises:
        RingError: another rank could not join. It is detected sooner than in init(), because all of
            them were alive a moment ago.
    """
    with _changing:
        config = Config.from_environment()
        patience_s = min(config.init_timeout_s, _REJOIN_S + _REJOIN_S_PER_RANK * size)
        config = replace(
            config,
            init_timeout_s=patience_s,
            secret=config.secret or secret,
            is_newcomer=False,  # no longer
        )
        given = {"rank": rank, "size": size, "local_rank": None, "local_size": None}
        _join(None, None, config, given, store, missed=missed)


def _join(
    comm: Any,
    process_sets: Sequence[Any] | str | None,
    config: Config,
    given: dict[str, Any],
    store: Store | None,
    **more: Any,
) -> None:
    global _world
    with _changing:
        prepare(config)
        try:
            _world = join_world(comm, process_sets, given, store, config, **more)
        finally:
            ignored = misspelt()  # a possible reason of a failure
            if ignored and (_world is None or _world.rank == 0):
                _log.warning(ignored)
        for callback in _after_join:
            callback()


def after_join(callback: Callable[[], None]) -> None:
    """Call a function, on its own, whenever this process has joined a world."""
    _after_join.add(callback)


def prepare(config: Config) -> None:
    """Prepare the process for a world: log, memory of results, a clean exit."""
    set_up_log(config)
    arm_failpoints(failpoints())
    _prepare_exit()
    keep_results(_KEPT_RESULT_BYTES)


def shutdown() -> None:
    """Leave the world: tell the other ranks, stop all threads, free all memory.

    Operations in flight fail, and so do later operations of other ranks that need this one. If an
    exception is being handled, as in a ``finally``, the other ranks' errors quote it. Does nothing
    without a world. Called at exit.
    """
    with _changing:
        _leave(reason_to_leave())


def _leave(why: str) -> None:
    global _world, _is_parents
    if _world is not None:
        old, _world = _world, None
        was_parents, _is_parents = _is_parents, False
        try:
            for callback in () if why or was_parents else old.on_leave:
                callback()
        finally:
            old.close(why)
        keep_results(0)


def is_initialized() -> bool:
    """Return whether this process has a world: after init(), and not after shutdown().

    A process forked from one with a world (a worker of a DataLoader) has its parent's world. It can
    read the parent's rank, for example to pick its part of the data, but cannot communicate.
    """
    return _world is not None


def engine() -> Engine:
    """Return the engine of all ranks. Raises NotInitializedError."""
    if _is_parents:  # checked inline: every collective passes here
        require_own()
    if _world is None:
        raise NotInitializedError
    return _world.engine


def require_own() -> None:
    """Raise NotInitializedError in a forked process, which only knows its parent's world."""
    if _is_parents:
        raise NotInitializedError(
            f"this process was forked from rank {rank()}: it cannot take part in collectives "
            "(unless it calls shutdown() and init(), and is a rank of its own)"
        )


def find_world() -> World | None:
    """Return the world of this process, if it has joined one."""
    return _world


def world() -> World:
    """Return the world of this process. Raises NotInitializedError."""
    if _world is None:
        raise NotInitializedError
    return _world


def config() -> Config:
    """Return the settings of this world. Raises NotInitializedError."""
    return world().config


def rank() -> int:
    """Return the index of this process among all, from 0.

    Raises:
        NotInitializedError: there is no world.
    """
    return world().rank


def size() -> int:
    """Return the number of processes.

    Raises:
        NotInitializedError: there is no world.
    """
    return world().size


def local_rank() -> int:
    """Return the index of this process within its node, from 0.

    Raises:
        NotInitializedError: there is no world.
    """
    return world().topology.local_rank


def local_size() -> int:
    """Return the number of processes of this node.

    Raises:
        NotInitializedError: there is no world.
    """
    return world().topology.local_size


def cross_rank() -> int:
    """Return the index of this node among the nodes with a process of this local rank.

    Raises:
        NotInitializedError: there is no world.
    """
    return world().topology.cross_rank


def cross_size() -> int:
    """Return the number of nodes with a process of this local rank.

    Raises:
        NotInitializedError: there is no world.
    """
    return world().topology.cross_size


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of processes.

    Raises:
        NotInitializedError: there is no world.
    """
    return world().topology.is_homogeneous


def cpu_sharers() -> int:
    """Return the number of ranks, this one included, that may run on this one's CPUs."""
    return world().cpu_sharers


def _warn_if_other(world: World, rank: int | None, size: int | None) -> None:
    """Warn if an init() asks for another rank or size than this process has."""
    if rank in (None, world.rank) and size in (None, world.size):
        return
    _log.warning(
        "init(rank=%s, size=%s) does nothing: this process is rank %s of %s already. Call "
        "shutdown() first",
        *(rank, size, world.rank, world.size),
    )


# --- exit and forks of the process


def _prepare_exit() -> None:
    """Make this process leave its world at exit, with the reason for the other ranks."""
    global _finalizer
    watch_exit()
    # A multiprocessing child does not run atexit functions.
    is_known = _finalizer is not None and _finalizer.still_active()
    if multiprocessing.parent_process() is not None and not is_known:
        _finalizer = multiprocessing.util.Finalize(None, _leave_at_exit, exitpriority=0)


def _leave_at_exit() -> None:
    # A daemon thread may be in init().
    if not _is_parents and _changing.acquire(timeout=_EXIT_PATIENCE_S):
        try:
            _leave(reason_at_exit())
        finally:
            _changing.release()
    await_calls(_EXIT_PATIENCE_S)  # calls of daemon threads, which the interpreter ends next
    connect.close_all_at_exit()


def disable_in_child(inherited: _Inherited) -> None:
    """Call `inherited.disable()` in every child that is forked while `inherited` lives."""
    _disabled_in_child.add(inherited)


def _leave_parents_world() -> None:
    """Keep only the readable part of the parent's world in a forked child (a DataLoader worker)."""
    global _is_parents, _changing
    for inherited in _disabled_in_child:  # first, since the rest may raise
        inherited.disable()
    if _world is not None:
        _world.process_sets.abandon()
        _world.on_end.clear()
        _is_parents = True
    connect.abandon_all_in_child()
    network.close_all_in_child()
    _changing = threading.RLock()
    forget_calls()
    stores.drop_in_child()


at_fork(after_in_child=_leave_parents_world)
atexit.register(_leave_at_exit)
