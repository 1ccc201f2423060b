"""default_num_workers: the number of worker processes for a rank's DataLoader."""

from __future__ import annotations

import os

from torch_ring import world
from torch_ring.rendezvous.control_groups import cpu_quota
from torch_ring.rendezvous.launchers import discover
from torch_ring.world import current

__all__ = ["default_num_workers"]


def default_num_workers(limit: int = 16) -> int:
    """Return the number of workers that this rank has CPUs for: ``DataLoader(num_workers=...)``.

    The CPUs of a rank are those on which its process may run, divided by the ranks on this kernel
    that may run there too; or its part of the container's quota, if that is less. One CPU is left
    to the rank itself. Before init() the CPUs of the other ranks are unknown, so all ranks of this
    host are taken to share theirs.

    Args:
        limit: the most workers; each has the data set and some batches in memory.

    Returns:
        0 or more; with 0 the rank loads its data itself, between the steps.
    """
    if world.is_initialized():
        local_size, sharers = world.local_size(), current.cpu_sharers()
    else:
        local_size = sharers = discover().local_size or 1
    cpus = min(len(os.sched_getaffinity(0)) / sharers, cpu_quota() / local_size)
    return max(0, min(limit, int(cpus) - 1))
