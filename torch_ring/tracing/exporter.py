"""export_metrics: writes counters to a file for Prometheus' node exporter, or serves them.

The file (TORCH_RING_METRICS_FILE) and the port on localhost (TORCH_RING_METRICS_PORT) live as long
as a world.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_ring.errors import InvalidArgumentError
from torch_ring.tracing.counters import snapshot_of
from torch_ring.world import current
from torch_ring.world.join import World, on_join

__all__ = ["export_metrics", "path_of_rank"]

_log = logging.getLogger("torch_ring")

_ADDRESS = "127.0.0.1"
_RANK = "{rank}"
_PATIENCE_S = 5.0  # for the writing thread to end: a file system may hang

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
    config = world.config
    if config.metrics_file:
        registry = _registry(world, "TORCH_RING_METRICS_FILE")
        path = path_of_rank(config.metrics_file, world.rank)
        file = _File(path, registry, config.metrics_interval_s, world.rank)
        world.on_end.append(file.end)
    if config.metrics_port:
        registry = _registry(world, "TORCH_RING_METRICS_PORT")
        server = _Server(config.metrics_port, world.topology.local_rank, registry)
        world.on_end.append(server.end)


def _registry(world: World, variable: str) -> Any:
    """Return prometheus_client's registry for the world's counters."""
    try:
        client = importlib.import_module("prometheus_client")
        families = importlib.import_module("torch_ring.tracing.prometheus").metric_families
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "prometheus_client":
            raise
        raise InvalidArgumentError(
            f"{variable} is set, but prometheus_client, which writes the format, is not "
            "installed: pip install 'torch_ring[metrics]', or pip install prometheus_client"
        ) from None

    class Collector:
        def collect(self) -> Iterator[Any]:
            yield from families(snapshot_of(world))

    registry = client.CollectorRegistry()
    registry.register(Collector())
    return registry


class _File:
    """The file of a rank, and the thread that writes it. Readers never see a partial file.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """

    def __init__(self, path: Path, registry: Any, interval_s: float, rank: int) -> None:
        self._path, self._registry = path, registry
        self._rank = rank
        self._failed = False  # and logged
        self._ending = threading.Event()
        try:
            self._write()
        except OSError as error:
            raise InvalidArgumentError(
                f"TORCH_RING_METRICS_FILE: cannot write {path}: {error.strerror}"
            ) from None
        self._thread = threading.Thread(
            target=self._run, args=(interval_s,), name="torch_ring-metrics", daemon=True
        )
        self._thread.start()

    def end(self, _failed: bool) -> None:
        """Write the file a last time."""
        self._ending.set()
        self._thread.join(_PATIENCE_S)
        if not self._thread.is_alive():
            self._try_to_write()

    def _run(self, interval_s: float) -> None:
        while not self._ending.wait(interval_s):
            self._try_to_write()

    def _try_to_write(self) -> None:
        try:
            self._write()
            self._failed = False
        except OSError as error:
            if not self._failed:
                _log.warning(
                    "rank %d: TORCH_RING_METRICS_FILE: cannot write %s: %s",
                    *(self._rank, self._path, error.strerror),
                )
            self._failed = True

    def _write(self) -> None:
        global _written
        importlib.import_module("prometheus_client").write_to_textfile(
            str(self._path), self._registry
        )
        if _written is not None and _written[0] != self._path:
            _remove(*_written)
        _written = self._path, self._path.stat().st_ino, os.getpid()


def _remove(path: Path, inode: int, pid: int) -> None:
    """Remove the file of this process's earlier rank, unless another process writes it now."""
    with contextlib.suppress(OSError):
        if pid == os.getpid() and path.stat().st_ino == inode:
            path.unlink()


class _Server:
    """An HTTP server of this host alone, at a port of this rank.

    Raises:
        InvalidArgumentError: the port is not available.
    """

    def __init__(self, first_port: int, local_rank: int, registry: Any) -> None:
        port = first_port + local_rank
        try:
            start = importlib.import_module("prometheus_client").start_http_server
            self._server, self._thread = start(port, addr=_ADDRESS, registry=registry)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "there is no such port"
            raise InvalidArgumentError(
                f"TORCH_RING_METRICS_PORT={first_port}: local rank {local_rank} cannot serve at "
                f"{_ADDRESS}:{port}: {reason}"
            ) from None
        current.disable_in_child(self)

    def disable(self) -> None:
        """Close the parent's port in a forked child."""
        self._server.socket.close()

    def end(self, _failed: bool) -> None:
        """Stop serving, and free the port."""
        self._server.shutdown()
        self._thread.join(_PATIENCE_S)
        self._server.server_close()
