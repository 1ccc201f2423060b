"""Makes the engine of a mesh, and sees that those of all its ranks run."""

from __future__ import annotations

import logging
import time

from torch_ring import _C
from torch_ring.config import Config
from torch_ring.errors import TimeoutError
from torch_ring.meeting import Deadline
from torch_ring.mesh import Mesh

__all__ = ["make_engine", "wait_for_all"]

_log = logging.getLogger("torch_ring")


def make_engine(rank: int, mesh: Mesh, config: Config) -> _C.Engine:
    """Return a running engine, which owns the descriptors of `mesh` from now on."""
    return _C.Engine(
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
        log=_log.warning,
    )


def wait_for_all(engine: _C.Engine, deadline: Deadline) -> None:
    """Return when the engines of all ranks run.

    Raises:
        TimeoutError: they do not before the deadline.
        PeerLostError: they will not.
    """
    work = engine.barrier("torch_ring.init")
    while not work.done():
        if deadline.passed():
            raise TimeoutError(f"not all engines have answered {deadline}")
        time.sleep(0.0005)
    work.wait()
