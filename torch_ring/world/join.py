# SPDX-License-Identifier: Apache-2.0
"""join_world: identity, rendezvous, connections, engine and process sets of a new World."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from torch_ring._C import ControlPlane, Engine
from torch_ring.config import Config, threads_are_chosen
from torch_ring.errors import InvalidArgumentError
from torch_ring.native import require_one_rank
from torch_ring.setup.connect import Connections, Queries, connect, listen
from torch_ring.setup.control_groups import allowed_cpus, shared_cpus
from torch_ring.setup.exchange import FailurePath, exchange_hosts, failing_together
from torch_ring.setup.failure import lacking
from torch_ring.setup.host_socket import Missed, meet_on_host
from torch_ring.setup.launchers import Identity, discover, why_not_alone
from torch_ring.setup.network import Deadline
from torch_ring.setup.secret_file import read_secret
from torch_ring.setup.socket_name import listen_as_rank
from torch_ring.setup.store import drop_connections, find_store
from torch_ring.setup.topology import Topology, cpu_sharers, topology_of
from torch_ring.world.engine import wait_for_all
from torch_ring.world.process_set_table import ProcessSetTable
from torch_ring.world.ranks import Ranks, ranks_of
from torch_ring.world.timelines import Timelines

__all__ = ["World", "join_world", "on_join"]

_log = logging.getLogger("torch_ring")

_NO_SECRET = (
    "the hosts of this job have no secret: whoever reaches its store can join. Set "
    "TORCH_RING_SECRET, the same on all ranks, or TORCH_RING_TRUST_NETWORK=1: "
    "docs/security.md#how-to-set-a-secret"
)

_MANY_IDLE = 3  # CPUs for each thread: then most of them are idle
_MANY_WAITING = 1.5  # threads for each CPU: then most operations wait for a thread without one

_Begin = list[Callable[["World"], None]]
_begin: _Begin = []  # functions to call with each world of this process: see on_join()
_has_joined = False  # this process has been in a world


@dataclass(frozen=True)
class World:
    """The world of one rank, and everything that ends with it.

    Attributes:
        rank, size: the index of this process; the number of processes.
        topology: its position among nodes.
        cpu_sharers: the number of ranks, this one included, that may run on its CPUs.
        host_of: the host index of each rank.
        summary: the line that rank 0 logs: ranks, hosts, transports.
        address: the address at which other hosts reach this one; 127.0.0.1 if all ranks are on one
            host.
        token: an identifier shared by the ranks of this world alone; not secret.
        is_guarded: whether strangers may know the key of the world, so that data from other hosts
            are handled with care.
        config: the settings.
        engine: runs the collectives of all ranks.
        process_sets: the sets of this world; each may own state of higher layers.
        timelines: the timelines of this rank's operations.
        queries: the questions between ranks; None in a world of one.
        plane: the control plane, which knows the living ranks and agrees on a common stop; None in
            a world of one.
        before_join: functions called first by the collective join(), which may refuse it.
        on_absence: functions called between two passes when the ranks that have not joined hear
            that another one has, on all of them alike.
        on_rejoin: functions called when the collective join() returns, on all ranks alike.
        on_leave: functions called first by shutdown(), unless the program has failed.
        on_end: functions of observers of the engines, called before the engines end, with whether
            the program has failed. Not called in a forked child.
    """

    rank: int
    size: int
    topology: Topology
    cpu_sharers: int
    host_of: Sequence[int]
    summary: str
    address: str
    token: str
    is_guarded: bool
    config: Config
    engine: Engine
    process_sets: ProcessSetTable
    timelines: Timelines
    queries: Queries | None = None
    plane: ControlPlane | None = None
    before_join: list[Callable[[], None]] = field(default_factory=list)
    on_absence: list[Callable[[], None]] = field(default_factory=list)
    on_rejoin: list[Callable[[], None]] = field(default_factory=list)
    on_leave: list[Callable[[], None]] = field(default_factory=list)
    on_end: list[Callable[[bool], None]] = field(default_factory=list)

    def close(self, why: str = "", *, failed: bool = False) -> None:
        """End the world's observers, then its engines and connections.

        Args:
            why: the reason for the other ranks, if the program has failed.
            failed: whether anything else has failed.
        """
        with contextlib.ExitStack() as cleanup:  # runs all callbacks, the last one first
            observed = (
                self.before_join,
                self.on_absence,
                self.on_rejoin,
                self.on_leave,
                self.process_sets.on_change,
            )
            for observers in observed:
                cleanup.callback(observers.clear)  # they may keep this world and its memory alive
            cleanup.callback(self.process_sets.close, why)
            for end in self.on_end:
                cleanup.callback(end, failed or bool(why))


def on_join(begin: Callable[[World], None]) -> None:
    """Call a function with every world that this process joins by init(), when its engine runs.

    An InvalidArgumentError that it raises ends init() on all ranks. In a later world of the
    process, or a newcomer's, the error is only logged as a warning: an observer must not end a
    running job.
    """
    _begin.append(begin)


def join_world(
    comm: Any,
    process_sets: Sequence[Any] | str | None,
    given: dict[str, Any],
    store: Store | None,
    config: Config,
    *,
    of_init: bool = True,
    deadline: Deadline | None = None,
    missed: Missed = lambda _: (),
    also: Callable[[World], None] | None = None,
) -> World:
    """Join the other ranks; see :func:`torch_ring.init` for arguments and errors.

    Args:
        comm: as for init().
        process_sets: as for init().
        given: rank, size, local_rank and local_size as for init().
        store: as for init().
        config: the settings.
        of_init: whether init() makes the world, so that the functions of on_join() are called.
        deadline: when to give up; None: according to the settings.
        missed: as for `FailurePath`.
        also: called with the world when all ranks have joined; an exception ends the world.
    """
    global _has_joined
    if config.secret_file and not config.secret:
        config = replace(config, secret=read_secret(config.secret_file))
    if comm is None or (isinstance(comm, Sequence) and not isinstance(comm, str)):
        identity, comm = _identity_in_list(comm or (), given), None
    else:
        identity = _identity_in_communicator(comm, given)
    sets = static_sets(process_sets, identity.size)
    if identity.launcher == "python":
        reason = why_not_alone()
        if reason is not None:
            _log.warning(
                "no launcher was found: this process trains alone (size 1), but %s", reason
            )
    begin = _begin if of_init else []
    require_one_rank(identity.size, identity.source())
    if identity.size > 1:
        deadline = deadline or Deadline(
            config.init_timeout_s, config.init_timeout_name, config.words.join
        )
        world = _connect(identity, config, deadline, comm, store, sets, begin, missed)
    else:
        world = _start_engine(Connections(), config, begin)
    try:
        for ranks in sets:
            world.process_sets.add(ranks)
        if also is not None:
            also(world)
    except BaseException:
        world.close(failed=True)
        raise
    _has_joined = True
    return world


# --- the identity of this process


def _identity_in_list(ranks: Sequence[int], given: dict[str, Any]) -> Identity:
    return _among(discover(**given), ranks) if ranks else discover(**given)


def _identity_in_communicator(comm: Any, given: dict[str, Any]) -> Identity:
    if not hasattr(comm, "Get_rank"):
        raise InvalidArgumentError(
            f"comm={comm!r} is neither a list nor an mpi4py communicator: give rank and size by "
            "name, as in init(rank=0, size=2); there is no backend to choose"
        )
    everyone = importlib.import_module("mpi4py.MPI").COMM_WORLD
    given |= {"rank": everyone.Get_rank(), "size": everyone.Get_size()}
    identity = _among(discover(**given), comm)
    if identity.rank != comm.Get_rank():
        raise InvalidArgumentError("comm must number its processes in the order of MPI.COMM_WORLD")
    return identity


def _among(identity: Identity, comm: Any) -> Identity:
    """Return the identity of this process in a world of the ranks of `comm`."""
    ranks = ranks_of(comm, identity.size)
    if identity.rank not in ranks:
        raise InvalidArgumentError(f"comm: rank {identity.rank} is not in {list(ranks)}")
    return identity if len(ranks) == identity.size else identity.among(ranks)


def static_sets(process_sets: Sequence[Any] | str | None, size: int) -> list[Ranks]:
    """Return the ranks of the sets given to init() for a world of `size` ranks."""
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise InvalidArgumentError(f'process_sets={process_sets!r}: the only word is "dynamic"')
        return []
    sets = [ranks_of(each, size) for each in process_sets or ()]
    for ranks in sets:
        if sets.count(ranks) > 1 or len(ranks) == size:
            raise InvalidArgumentError(f"process_sets: there are two sets of {list(ranks)}")
    return sets


# --- connecting


def _connect(
    identity: Identity,
    config: Config,
    deadline: Deadline,
    comm: Any,
    store: Store | None,
    sets: list[Ranks],
    begin: _Begin,
    missed: Missed,
) -> World:
    """Connect this rank to the others; `sets` must be the same on all of them."""
    world = None
    try:
        place, name = find_store(identity, config, deadline, comm, store)
        path = FailurePath(identity, deadline, place, missed)
        has_store = place is not None
        path.host = meet_on_host(name, identity, deadline, path.watch, has_store=has_store)
        with failing_together(path):
            own_name = None if store is not None else name  # no other job has a store's
            with (
                listen_as_rank(
                    own_name, identity, deadline, path.watch, is_new=not _has_joined
                ) as unix,
                listen(identity, config, place.host if place else "127.0.0.1", unix) as listeners,
            ):
                settings = {**config.common(), "process_sets": sets}
                table = exchange_hosts(listeners.info.to_value(), settings, path)
                connections = connect(config, table, listeners, path)
            world = _start_engine(connections, config, begin, deadline)
            path.leave_store()
            # After this, torch.distributed may use the store's port. Some ranks know of no store.
            wait_for_all(world.engine, deadline, identity.size)
    except BaseException as error:
        if world is not None:
            world.close(failed=True)
        drop_connections()
        failure = lacking(error, identity.rank)
        if failure is not None:
            raise failure from None
        raise
    _log_world(world)
    return world


def _log_world(world: World) -> None:
    """Log on rank 0 the ranks and hosts, and advice for the user."""
    if world.rank > 0:
        return
    _log.info("%s", world.summary)
    if world.is_guarded:
        _log.warning("%s", _NO_SECRET)
    advice = None
    if not _has_joined:
        advice = _thread_advice(world.cpu_sharers, world.topology.local_size)
    if advice is not None:
        _log.warning("%s", advice)


def _thread_advice(sharers: int, local_size: int) -> str | None:
    """Return advice if the ranks' threads are far fewer or more than CPUs, and nobody has chosen.

    Fewer: MKL, in PyTorch for x86, uses one thread if it finds variables of an MPI, even if the
    ranks are not bound to cores. Half of the CPUs idle is normal: PyTorch uses one thread for two
    hardware threads.

    More: without a launcher that sets the number, each rank has a thread for every core of the
    host, and they wait for one another in each operation. A program that has called
    set_num_threads() shows by a number below PyTorch's own, which is half of the CPUs or more: with
    four hardware threads a core, it is less, and nothing is said.

    The quota is taken for that of all ranks of the node. Containers with a quota each that share
    the host's network are one node, so that the advice for them is too low.

    Args:
        sharers: the ranks that share this one's CPUs.
        local_size: the ranks that share this one's quota.
    """
    if threads_are_chosen():
        return None
    threads = torch.get_num_threads()
    cpus, ranks = shared_cpus(sharers, local_size)
    share = cpus / ranks
    if threads * _MANY_IDLE <= share:
        gain = "for all ranks to use them"
    elif (
        threads > 1
        and threads >= _MANY_WAITING * share
        and 2 * threads >= allowed_cpus()  # PyTorch's own number
        and torch.cuda.device_count() == 0  # otherwise the GPUs compute
    ):
        gain = "so that threads do not wait for a CPU"
    else:
        return None
    number = "1 thread" if threads == 1 else f"{threads} threads"
    whose = f"{ranks} ranks share" if ranks > 1 else "it has"
    there = f"{cpus:g} CPU" + ("s" if cpus != 1 else "")
    return (
        f"a rank computes with {number}, and {whose} {there} here: set "
        f"OMP_NUM_THREADS={max(1, int(share))} (or torch.set_num_threads, if the program calls it) "
        f"{gain}, or OMP_NUM_THREADS={threads} to keep it so"
    )


def _start_engine(
    connections: Connections, config: Config, begin: _Begin, deadline: Deadline | None = None
) -> World:
    """Start the world's engine and its observers; wait until the engines of all ranks run.

    Args:
        connections: this process's connections.
        config: the settings.
        begin: functions as for `on_join`.
        deadline: the deadline of init(); None: there are no other ranks.
    """
    table = ProcessSetTable(connections, config)
    try:
        world = _world_of(connections, config, table)
    except BaseException:
        table.close()
        raise
    try:
        _begin_observing(world, begin)
        if deadline is not None:
            over_ucx = connections.ucx_library is not None
            wait_for_all(world.engine, deadline, connections.size, over_network=over_ucx)
    except BaseException:
        world.close(failed=True)
        raise
    return world


def _world_of(connections: Connections, config: Config, table: ProcessSetTable) -> World:
    """Start the world's engine, and return the world."""
    rank, peers, host_of = connections.rank, connections.peers, connections.host_of
    has_several_hosts = len(set(host_of)) > 1
    timelines = Timelines(connections, config)
    return World(
        rank,
        connections.size,
        topology_of(rank, peers) if peers else Topology(),
        cpu_sharers(rank, peers) if peers else 1,
        host_of,
        _describe(connections),
        peers[rank].address if has_several_hosts else "127.0.0.1",
        connections.token,
        has_several_hosts and not (connections.is_private or config.trust_network),
        config,
        table.everyone.engine(),
        table,
        timelines,
        connections.queries,
        connections.plane,
        on_end=[timelines.stop],
    )


def _begin_observing(world: World, begin: _Begin) -> None:
    """Begin the timeline of the settings, and call the functions of on_join().

    Call it in a context where a failure of this rank fails on all ranks.
    """
    if world.config.is_newcomer and not _has_joined:
        return  # alone, before it joins a world whose files it must not touch
    is_of_going_job = _has_joined or world.config.is_newcomer
    for each in (lambda world: world.timelines.start_configured(), *begin):
        try:
            each(world)
        except InvalidArgumentError as error:
            if not is_of_going_job:
                raise
            _log.warning("rank %d: %s", world.rank, error)


def _describe(connections: Connections) -> str:
    """Return the text of World.summary."""
    sizes = list(Counter(connections.host_of).values())
    ranks = f"{connections.size} ranks"
    if len(sizes) == 1:
        return f"{ranks} on one host, by shared memory"
    addresses = ", ".join(dict.fromkeys("+".join(peer.addresses) for peer in connections.peers))
    if len(sizes) == connections.size:
        return f"{ranks}, by {connections.network} over {addresses}"
    return (
        f"{ranks} on {len(sizes)} hosts ({'+'.join(map(str, sizes))}): shared memory inside hosts, "
        f"{connections.network} between them over {addresses}"
    )
