"""join_driven: the place of this process in the next world of Horovod's elastic driver."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torch_ring.config import Config
from torch_ring.errors import TimeoutError
from torch_ring.rendezvous.horovod_driver import HorovodDriver
from torch_ring.rendezvous.network import own_address
from torch_ring.rendezvous.open_store import open_store
from torch_ring.world.join import World

__all__ = ["join_driven", "on_driven_world"]

_log = logging.getLogger("torch_ring")

_SCOPE, _KEY = "torch_ring", "store"  # where rank 0 tells the others of its store
_LOOK_S = 0.02
_STORE_S = 5.0  # for an answer of a store whose rank 0 was alive a moment ago

Begin = Callable[[World, Sequence[Any] | str | None], None]
"""Called with a world and the process sets that are given to init()."""

_begin: list[Begin] = []
_store: TCPStore | None = None  # of the present world: its server, on rank 0, lives as long


def on_driven_world(begin: Begin) -> None:
    """Call a function, a collective, in every world of a driver before init() returns."""
    _begin.append(begin)


def join_driven(
    driver: HorovodDriver,
    config: Config,
    process_sets: Sequence[Any] | str | None,
    join: Callable[..., None],
) -> None:
    """Join the next world of the driver.

    Processes that were in the world before, and those that come, join it alike: which process sets
    it has is agreed upon when all have joined.

    Args:
        driver: that has started this process.
        config: the settings.
        process_sets: as for init().
        join: makes a world of a rank, a size and so on, and a store.

    Raises:
        SystemExit: the driver has no place for this process, which is to end with exit code 0.
        RingError: no world was made.
    """

    def begin_all(world: World) -> None:
        for begin in _begin:
            begin(world, process_sets)

    given, store = _next_place(driver, config)
    join(given, store, also=begin_all)


def _next_place(driver: HorovodDriver, config: Config) -> tuple[dict[str, Any], TCPStore | None]:
    """Return rank, size, local rank and local size for init(), and the store where the ranks meet.

    Blocks until all workers of the driver have asked.

    Raises:
        SystemExit: the driver has no place for this process, which is to end with exit code 0.
        TimeoutError: other workers did not ask within TORCH_RING_ELASTIC_TIMEOUT, or rank 0 did not
            serve the store within TORCH_RING_INIT_TIMEOUT.
        RingError: the driver is gone, or the store.
    """
    global _store
    place = driver.placement(config.elastic_timeout_s)
    if place is None:
        _log.warning("this process leaves the job: %s has no place for it", driver)
        sys.exit(0)
    given = {
        "rank": place.rank,
        "size": place.size,
        "local_rank": place.local_rank,
        "local_size": place.local_size,
    }
    _store = None
    if place.size == 1:
        return given, None
    what = f"the store of the ranks of {driver}"
    if place.rank == 0:
        _store = _serve(driver, config, what)
    else:
        host, port = _find(driver, config).rsplit(":", 1)
        _store = open_store((host, int(port)), what)
    _store.set_timeout(timedelta(seconds=_STORE_S))
    return given, _store


def _serve(driver: HorovodDriver, config: Config, what: str) -> TCPStore:
    host = own_address(config.interface, driver.address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = open_store((host, port), what, listener)
    driver.put(_SCOPE, _KEY, f"{host}:{port}".encode())
    return store


def _find(driver: HorovodDriver, config: Config) -> str:
    deadline = time.monotonic() + config.init_timeout_s
    while True:
        address = driver.get(_SCOPE, _KEY)
        if address is not None:
            return address.decode()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank 0 has told {driver} of no store within {config.init_timeout_s:g} s "
                "(TORCH_RING_INIT_TIMEOUT)"
            )
        time.sleep(_LOOK_S)
