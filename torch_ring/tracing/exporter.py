# SPDX-License-Identifier: Apache-2.0
"""export_metrics: writes counters to a file for Prometheus' node exporter, or serves them.

The file (TORCH_RING_METRICS_FILE) and the port on localhost (TORCH_RING_METRICS_PORT) live as long
as a world.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path
from typing import Any

from torch_ring.errors import InvalidArgumentError
from torch_ring.setup.network import close_in_child
from torch_ring.world.join import World, on_join

__all__ = ["INTERVAL_S", "export_metrics", "path_of_rank"]

_log = logging.getLogger("torch_ring")

INTERVAL_S = 15.0  # between two writings of a file: node exporters are rarely read more often
_ADDRESS = "127.0.0.1"
_RANK = "{rank}"
_PATIENCE_S = 5.0  # for a thread to end: a file system may hang

# The last file of this process, its inode, and the pid. It is removed when the process gets another
# rank; a forked child does not remove it.
_written: tuple[Path, int, int] | None = None


def export_metrics() -> None:
    """From now on, export the counters of each world according to its settings."""
    on_join(_begin)


def path_of_rank(pattern: str, rank: int) -> Path:
    """Return the file of a rank: {rank} replaced, or else "torch_ring.rank3.prom"."""
    if _RANK in pattern:
        return Path(pattern.replace(_RANK, str(rank)))
    path = Path(pattern)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _begin(world: World) -> None:
    if world.config.metrics_file:
        _keep_file(world, _registry(world, "TORCH_RING_METRICS_FILE"))
    if world.config.metrics_port:
        _serve(world, _registry(world, "TORCH_RING_METRICS_PORT"))


def _registry(world: World, variable: str) -> Any:
    try:
        from torch_ring.tracing.prometheus import registry_of
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "prometheus_client":
            raise
        raise InvalidArgumentError(
            f"{variable} is set, but prometheus_client, which writes the format, is not "
            "installed: pip install 'torch_ring[metrics]', or pip install prometheus_client"
        ) from error
    return registry_of(world)


def _keep_file(world: World, registry: Any) -> None:
    """Write the file of a rank now, again and again, and when its world ends."""
    path = path_of_rank(world.config.metrics_file, world.rank)
    try:
        _write(path, registry)
    except OSError as error:
        raise InvalidArgumentError(
            f"TORCH_RING_METRICS_FILE: cannot write {path}: {error.strerror}"
        ) from None
    ending = threading.Event()

    def keep() -> None:
        has_ended = has_failed = False
        while not has_ended:
            has_ended = ending.wait(INTERVAL_S)
            try:
                _write(path, registry)
                has_failed = False
            except OSError as error:
                if not has_failed:  # once, until it works again
                    text = "rank %d: TORCH_RING_METRICS_FILE: cannot write %s: %s"
                    _log.warning(text, world.rank, path, error)
                has_failed = True

    thread = threading.Thread(target=keep, name="torch_ring-metrics", daemon=True)
    thread.start()

    def end(_failed: bool) -> None:
        ending.set()
        thread.join(_PATIENCE_S)

    world.on_end.append(end)


def _write(path: Path, registry: Any) -> None:
    """Replace a file atomically, and remove the one of this process's earlier rank."""
    from prometheus_client import write_to_textfile

    global _written
    write_to_textfile(str(path), registry)
    if _written is not None and _written[0] != path:
        earlier, inode, pid = _written
        with contextlib.suppress(OSError):
            if pid == os.getpid() and earlier.stat().st_ino == inode:  # else it is another's now
                earlier.unlink()
    _written = path, path.stat().st_ino, os.getpid()


def _serve(world: World, registry: Any) -> None:
    """Serve at a port of this rank, to this host alone, until the world ends."""
    from prometheus_client import start_http_server

    first_port, local_rank = world.config.metrics_port, world.topology.local_rank
    port = first_port + local_rank
    try:
        server, thread = start_http_server(port, _ADDRESS, registry)
    except (OSError, OverflowError) as error:
        raise InvalidArgumentError(
            f"TORCH_RING_METRICS_PORT={first_port}: local rank {local_rank} cannot serve at "
            f"{_ADDRESS}:{port}: {error}"
        ) from None
    close_in_child(server.socket)

    def end(_failed: bool) -> None:
        server.shutdown()
        thread.join(_PATIENCE_S)
        server.server_close()

    world.on_end.append(end)
