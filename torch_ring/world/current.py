"""This process's world: init, shutdown, who is who."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from torch_ring import _C, cards, rendezvous
from torch_ring.cards import Place
from torch_ring.config import Config
from torch_ring.engines import make_engine, wait_for_all
from torch_ring.errors import InvalidArgumentError, NotInitializedError, PeerLostError
from torch_ring.launchers import Identity, discover
from torch_ring.meeting import Deadline, Meeting
from torch_ring.mesh import Mesh, connect
from torch_ring.ranks import Ranks, ranks_of
from torch_ring.registry import Registry
from torch_ring.rendezvous import Rendezvous

__all__ = [
    "config",
    "cpu_sharers",
    "cross_rank",
    "cross_size",
    "engine",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "registry",
    "require_own",
    "shutdown",
    "size",
]

_log = logging.getLogger("torch_ring")


@dataclass(frozen=True)
class World:
    """What init() made."""

    rank: int
    size: int
    place: Place
    cpu_sharers: int
    config: Config
    engine: _C.Engine
    registry: Registry


_world: World | None = None
_is_parents = False  # whether the world is that of the process from which this one was forked
_changing = threading.RLock()  # held by init() and shutdown(), of a signal handler too


def init(
    comm: Any = None,
    process_sets: Sequence[Any] | str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    store: Store | None = None,
) -> None:
    """Join the other ranks. A process that no launcher has started is alone.

    Does nothing in a process that has joined already; after shutdown() it joins anew.

    Args:
        comm: a list of ranks, or an mpi4py communicator: a world of these processes only, numbered
            anew in the order of their ranks. Usually None: all ranks.
        process_sets: sets to add, each a ProcessSet or a list of ranks, the same on all ranks. More
            can always be added; "dynamic" says so, and means none.
        rank: this process, if the launcher does not tell it.
        size: the number of processes; goes with `rank`.
        local_rank: this process within its node.
        local_size: the number of processes of its node.
        store: where the ranks meet, if not where the launcher says.

    Raises:
        InvalidArgumentError: a variable or argument is wrong; names it.
        MismatchError: a setting differs between ranks; names it.
        TimeoutError: ranks did not arrive within TORCH_RING_INIT_TIMEOUT; names them.
        RingError: another rank could not join; says why.
    """
    global _world
    with _changing:
        if _world is not None:
            return
        config = Config.from_environment()
        _set_up_log(config)
        _C.keep_results(config.kept_result_bytes)
        given: dict[str, Any] = {
            "rank": rank,
            "size": size,
            "local_rank": local_rank,
            "local_size": local_size,
        }
        if comm is None or isinstance(comm, Sequence):
            identity, comm = _identity_in_list(comm or (), given), None
        else:
            identity = _identity_in_communicator(comm, given)
        sets = _static_sets(process_sets, identity.size)
        if identity.size > 1:
            world = _join(identity, config, comm, store, {"process_sets": sets})
        else:
            world = _alone(identity, config)
        try:
            for ranks in sets:
                world.registry.add(ranks)
        except BaseException:
            world.registry.close()
            raise
        _world = world


def shutdown() -> None:
    """Leave the other ranks: say goodbye, stop all threads, free all memory.

    What is in flight fails; later operations of other ranks that need this one fail too. Does
    nothing without a world. Called at exit.
    """
    global _world, _is_parents
    with _changing:
        if _world is not None:
            world, _world = _world, None
            _is_parents = False
            world.registry.close()
            _C.keep_results(0)


def is_initialized() -> bool:
    """Return whether this process has a world: after init(), and not after shutdown().

    A process that was forked from one that has (a worker of a DataLoader) has it as well. It can
    ask who its parent is, to pick its part of the data, say; it cannot communicate.
    """
    return _world is not None


def engine() -> _C.Engine:
    """Return the engine of this process. Raises NotInitializedError."""
    if _is_parents:  # asked here, not there: every collective comes this way
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


def registry() -> Registry:
    """Return the process sets of this world. Raises NotInitializedError."""
    return _current().registry


def config() -> Config:
    """Return the settings of this world. Raises NotInitializedError."""
    return _current().config


def rank() -> int:
    """Return the index of this process among all, from 0."""
    return _current().rank


def size() -> int:
    """Return the number of processes."""
    return _current().size


def local_rank() -> int:
    """Return the index of this process among those of its node, from 0."""
    return _current().place.local_rank


def local_size() -> int:
    """Return the number of processes of this node."""
    return _current().place.local_size


def cross_rank() -> int:
    """Return the index of this node among those that have a process with this local rank."""
    return _current().place.cross_rank


def cross_size() -> int:
    """Return the number of nodes that have a process with this local rank."""
    return _current().place.cross_size


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of processes."""
    return _current().place.is_homogeneous


def cpu_sharers() -> int:
    """Return how many ranks on this kernel, this one included, may run on this one's CPUs."""
    return _current().cpu_sharers


def _current() -> World:
    if _world is None:
        raise NotInitializedError
    return _world


# --- who am I


def _identity_in_list(ranks: Sequence[int], given: dict[str, Any]) -> Identity:
    return _among(discover(**given), ranks) if ranks else discover(**given)


def _identity_in_communicator(comm: Any, given: dict[str, Any]) -> Identity:
    if not hasattr(comm, "Get_rank"):
        raise InvalidArgumentError(f"comm={comm!r} is neither a list nor an mpi4py communicator")
    everyone = importlib.import_module("mpi4py.MPI").COMM_WORLD
    given |= {"rank": everyone.Get_rank(), "size": everyone.Get_size()}
    identity = _among(discover(**given), comm)
    if identity.rank != comm.Get_rank():
        raise InvalidArgumentError("comm must number its processes in the order of MPI.COMM_WORLD")
    return identity


def _among(identity: Identity, comm: Any) -> Identity:
    """Return who this process is among the ranks of a list, or of a communicator."""
    ranks = ranks_of(comm, identity.size)
    if identity.rank not in ranks:
        raise InvalidArgumentError(f"comm: rank {identity.rank} is not in {list(ranks)}")
    return identity if len(ranks) == identity.size else identity.among(ranks)


def _static_sets(process_sets: Sequence[Any] | str | None, size: int) -> list[Ranks]:
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise InvalidArgumentError(f'process_sets={process_sets!r}: the only word is "dynamic"')
        return []
    sets = [ranks_of(each, size) for each in process_sets or ()]
    for ranks in sets:
        if sets.count(ranks) > 1 or len(ranks) == size:
            raise InvalidArgumentError(f"process_sets: there are two sets of {list(ranks)}")
    return sets


# --- joining


def _alone(identity: Identity, config: Config) -> World:
    mesh = Mesh()
    labels = mesh.labels
    engine = make_engine(0, mesh, config)
    registry = Registry(identity, config, None, engine, labels)
    return World(0, 1, Place(), 1, config, engine, registry)


def _join(
    identity: Identity, config: Config, comm: Any, store: Store | None, common: dict[str, Any]
) -> World:
    deadline = Deadline(config.init_timeout_s)
    try:
        with _rendezvous(identity, config, deadline, comm, store) as met:
            meeting = Meeting(met.store, identity.rank, identity.size, deadline, serves=met.serves)
            try:
                mesh = connect(identity, config, met, meeting, common=common)
                engine = _start_engine(identity.rank, mesh, config, meeting)
            except PeerLostError as error:
                cause = meeting.explain(error)
                meeting.fail(cause)
                raise cause from None
            except BaseException as error:
                meeting.fail(error)
                raise
            meeting.clean_up()
    except BaseException:
        rendezvous.forget()
        raise
    if identity.rank == 0:
        _log.info("%s", _describe(mesh))
    place = cards.place(identity.rank, mesh.cards)
    sharers = cards.cpu_sharers(identity.rank, mesh.cards)
    registry = Registry(identity, config, met, engine, mesh.labels)
    return World(identity.rank, identity.size, place, sharers, config, engine, registry)


def _rendezvous(
    identity: Identity, config: Config, deadline: Deadline, comm: Any, store: Store | None
) -> contextlib.AbstractContextManager[Rendezvous]:
    if store is None:
        return rendezvous.meet(identity, config, deadline, comm=comm)
    host = getattr(store, "host", None)  # a TCPStore's
    view = rendezvous.of_part(PrefixStore("torch_ring", store), identity)
    return contextlib.nullcontext(Rendezvous(view, host))


def _start_engine(rank: int, mesh: Mesh, config: Config, meeting: Meeting) -> _C.Engine:
    """Start the engine, and see that those of all ranks run before anybody relies on it."""
    engine = make_engine(rank, mesh, config)
    try:
        meeting.finish()
        wait_for_all(engine, meeting.deadline)
    except BaseException:
        engine.shutdown()
        raise
    return engine


# --- the log


def _describe(mesh: Mesh) -> str:
    """Return the line that rank 0 logs: ranks, hosts, transports."""
    sizes = list(Counter(mesh.host_of).values())
    ranks = f"{len(mesh.host_of)} ranks"
    if len(sizes) == 1:
        return f"{ranks} on one host, by shared memory"
    addresses = ", ".join(dict.fromkeys(card.address for card in mesh.cards))
    if len(sizes) == len(mesh.host_of):
        return f"{ranks}, a TCP ring over {addresses}"
    return (
        f"{ranks} on {len(sizes)} hosts ({'+'.join(map(str, sizes))}): shared memory inside hosts, "
        f"a TCP ring between them over {addresses}"
    )


def _set_up_log(config: Config) -> None:
    """Log to stderr, unless the program has arranged for something else."""
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[torch_ring] %(message)s"))
        _log.addHandler(handler)
    if _log.level == logging.NOTSET:
        _log.setLevel(config.log_level.upper())


# --- the end


def _let_go_in_child() -> None:
    """In a forked child (a DataLoader worker), keep of the parent's world what can be asked."""
    global _is_parents, _changing
    if _world is not None:
        _world.registry.abandon()
        _is_parents = True
    _changing = threading.RLock()
    rendezvous.forget_in_child()


os.register_at_fork(after_in_child=_let_go_in_child)
atexit.register(shutdown)
