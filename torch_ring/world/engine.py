"""Starting the engines of a world or of a process set."""

from __future__ import annotations

import logging
import time

from torch_ring._C import Engine
from torch_ring.config import Config, nccl_is_blocking
from torch_ring.connections.full_mesh import FullMesh
from torch_ring.errors import TimeoutError
from torch_ring.rendezvous.deadline import Deadline

__all__ = ["make_engine", "wait_for_all"]

_log = logging.getLogger("torch_ring")


def make_engine(rank: int, mesh: FullMesh, config: Config) -> Engine:
    """Return a running engine; it owns the descriptors of `mesh` from now on."""
    return Engine(
        rank,
        len(mesh.host_of),
        mesh.host_of,
        mesh.labels,
        mesh.may_spin,
        **mesh.release(),
        timeout_s=config.timeout_s,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        stall_warning_s=config.stall_warning_s,
        fusion_window_s=config.fusion_window_s,
        fusion_threshold_bytes=config.fusion_threshold_bytes,
        nccl_library=config.nccl_library,
        nccl_blocking=nccl_is_blocking(),
        log=_log.warning,
    )


def wait_for_all(engine: Engine, deadline: Deadline) -> None:
    """Wait until the engines of all ranks run.

    Raises:
        TimeoutError: an engine has not answered before the deadline.
        PeerLostError: a rank has died.
    """
    work = engine.barrier("torch_ring.init")
    while not work.done():
        if deadline.passed():
            raise TimeoutError(f"not all engines have answered {deadline}")
        time.sleep(0.0005)
    work.wait()
