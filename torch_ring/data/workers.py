"""How many worker processes a rank's DataLoader may have."""

from __future__ import annotations

import math
import os
from pathlib import Path

from torch_ring import world
from torch_ring.rendezvous.launchers import discover
from torch_ring.world import current

__all__ = ["default_num_workers"]


def default_num_workers(limit: int = 16) -> int:
    """Return how many workers use the CPUs that are this rank's: for ``DataLoader(num_workers=)``.

    They are the CPUs on which the process may run, divided by the ranks on this kernel that may
    run there too, less one for the rank itself; or its part of what the container may take, if that
    is less. Before init() nobody knows what the launcher has bound the other ranks to, and all of
    this host are taken to share.

    Args:
        limit: the most; each has the data set and some batches in memory.

    Returns:
        0 or more; with 0 the rank loads its data itself, between the steps.
    """
    if world.is_initialized():
        local_size, sharers = world.local_size(), current.cpu_sharers()
    else:
        local_size = sharers = discover().local_size or 1
    cpus = min(len(os.sched_getaffinity(0)) / sharers, _quota() / local_size)
    return max(0, min(limit, int(cpus) - 1))


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Return how many CPUs' time this container may take: "200000 100000" are two."""
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no container, or "max 100000"
        return math.inf
