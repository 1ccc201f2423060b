"""This process's world: init, shutdown, who is who. Holds the one engine."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    PrefixStore,
    Store,
)

from torch_ring import _C
from torch_ring.config import Config
from torch_ring.errors import InvalidArgumentError, NotInitializedError
from torch_ring.mesh import Mesh, connect
from torch_ring.rendezvous import (
    Identity,
    discover,
    from_communicator,
    meet_by_communicator,
    open_store,
    with_overrides,
)

__all__ = [
    "config",
    "cross_rank",
    "cross_size",
    "engine",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

_log = logging.getLogger("torch_ring")


@dataclass(frozen=True)
class World:
    """What init() made."""

    identity: Identity
    config: Config
    engine: _C.Engine
    cross_rank: int
    cross_size: int
    homogeneous: bool


_world: World | None = None
_generation = 0  # of init(); the same on all ranks, which meet under it in the store
_meeting: tuple[Store, str] | None = None  # a process keeps its store; rank 0 may be serving it


def init(
    comm: Any = None,
    process_sets: Sequence[Any] | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    store: Store | None = None,
) -> None:
    """Join the other ranks. Without a launcher this process is the only one.

    Does nothing if it was called before; after shutdown() it joins anew.

    Args:
        comm: an mpi4py communicator of all ranks, or a list of all of them; usually None.
        process_sets: not available yet.
        rank: this process among all, if the launcher does not tell; so are the next three.
        size: the number of processes.
        local_rank: this process among those of its node.
        local_size: the number of processes of its node.
        store: where the ranks meet, if not where the launcher says; needs `rank` and `size`.

    Raises:
        InvalidArgumentError: a variable or argument is wrong; names it.
        TimeoutError: ranks did not arrive within TORCH_RING_INIT_TIMEOUT; names them.
        RingError: another rank could not join; says why.
    """
    global _world, _generation
    if _world is not None:
        return
    if process_sets:
        raise InvalidArgumentError("process_sets are not available yet")
    config = Config.from_environment()
    _set_up_log(config)
    identity = with_overrides(
        _identity(comm), rank=rank, size=size, local_rank=local_rank, local_size=local_size
    )
    if isinstance(comm, list) and sorted(comm) != list(range(identity.size)):
        raise InvalidArgumentError(f"comm={comm} is not the list of all {identity.size} ranks")
    _generation += 1
    _world = _join(identity, config, comm, store)


def shutdown() -> None:
    """Leave the other ranks: say goodbye, stop all threads, free all memory.

    What is in flight fails; later operations of other ranks that need this one fail too. Does
    nothing without a world. Called at exit.
    """
    global _world
    if _world is not None:
        world, _world = _world, None
        world.engine.shutdown()


def is_initialized() -> bool:
    """Return whether init() was called, and shutdown() was not called since, in this process."""
    return _world is not None


def engine() -> _C.Engine:
    """Return the engine of this process. Raises NotInitializedError."""
    return _current().engine


def config() -> Config:
    """Return the settings of this world. Raises NotInitializedError."""
    return _current().config


def rank() -> int:
    """Return the index of this process among all, from 0."""
    return _current().identity.rank


def size() -> int:
    """Return the number of processes."""
    return _current().identity.size


def local_rank() -> int:
    """Return the index of this process among those of its node, from 0."""
    return _current().identity.local_rank


def local_size() -> int:
    """Return the number of processes of this node."""
    return _current().identity.local_size


def cross_rank() -> int:
    """Return the index of this node among those that have a process with this local rank."""
    return _current().cross_rank


def cross_size() -> int:
    """Return the number of nodes that have a process with this local rank."""
    return _current().cross_size


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of processes."""
    return _current().homogeneous


def _current() -> World:
    if _world is None:
        raise NotInitializedError
    return _world


def _identity(comm: Any) -> Identity:
    return from_communicator(comm) if hasattr(comm, "Get_rank") else discover()


def _join(identity: Identity, config: Config, comm: Any, given: Store | None) -> World:
    if identity.size == 1:
        return _make_world(identity, config, Mesh.alone())
    store, host = _meet(identity, config, comm, given)
    store = PrefixStore(f"torch_ring/{identity.job}/{_generation}", store)
    try:
        mesh = connect(identity, config, store, host)
        world = _make_world(identity, config, mesh)
        try:
            world.engine.barrier("", awaited=True).wait()  # nobody runs ahead of a half-built world
        except BaseException:
            world.engine.shutdown()
            raise
    except Exception as error:
        # For the ranks that still wait; if the store is gone, they will notice by themselves.
        with contextlib.suppress(DistError):
            store.set("failed", f"rank {identity.rank}: {error}")
        raise
    if identity.rank == 0:
        _log.info("%s", _describe(mesh))
    return world


def _meet(identity: Identity, config: Config, comm: Any, given: Store | None) -> tuple[Store, str]:
    global _meeting
    if given is not None:
        return given, getattr(given, "host", "127.0.0.1")
    if _meeting is None:
        if hasattr(comm, "Get_rank"):
            _meeting = meet_by_communicator(comm, config.init_timeout_s)
        else:
            _meeting = open_store(identity, config.init_timeout_s)
    return _meeting


def _make_world(identity: Identity, config: Config, mesh: Mesh) -> World:
    engine = _C.Engine(
        identity.rank,
        identity.size,
        mesh.host_of,
        mesh.labels,
        mesh.may_spin,
        **mesh.release(),
        timeout_s=config.timeout_s,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        stall_warning_s=config.stall_warning_s,
        fusion_window_s=config.fusion_window_s,
        fusion_threshold_bytes=config.fusion_threshold_bytes,
        log=_log.warning,
    )
    peers = [c.rank for c in mesh.cards if c.local_rank == identity.local_rank]
    return World(
        identity,
        config,
        engine,
        cross_rank=peers.index(identity.rank) if peers else 0,
        cross_size=len(peers) or 1,
        homogeneous=len({card.local_size for card in mesh.cards}) <= 1,
    )


def _describe(mesh: Mesh) -> str:
    """Return the line that rank 0 logs: ranks, hosts, transports."""
    sizes = list(Counter(mesh.host_of).values())
    ranks = f"{len(mesh.cards)} ranks"
    if len(sizes) == 1:
        return f"{ranks} on one host, by shared memory"
    addresses = ", ".join(dict.fromkeys(card.address for card in mesh.cards))
    if len(sizes) == len(mesh.cards):
        return f"{ranks}, a TCP ring over {addresses}"
    layout = "+".join(map(str, sizes))
    return (
        f"{ranks} on {len(sizes)} hosts ({layout}): shared memory inside hosts, "
        f"a TCP ring between them over {addresses}"
    )


def _set_up_log(config: Config) -> None:
    """Log to stderr, unless the program has arranged for something else."""
    if not _log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[torch_ring] %(message)s"))
        _log.addHandler(handler)
        _log.setLevel(config.log_level.upper())


def _forget_in_child() -> None:
    """In a forked child (a DataLoader worker): there is no world, and the parent's is untouched."""
    global _world, _meeting
    if _world is not None:
        _world.engine.abandon()
    _world = None
    _meeting = None


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(shutdown)
