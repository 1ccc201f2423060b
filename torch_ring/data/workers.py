"""How many worker processes a rank's DataLoader may have."""

from __future__ import annotations

import os

from torch_ring import world
from torch_ring.launchers import discover

__all__ = ["default_num_workers"]


def default_num_workers(limit: int = 16) -> int:
    """Return how many workers use the CPUs that are this rank's: for ``DataLoader(num_workers=)``.

    They are the CPUs on which the process may run, divided by the ranks of this machine that may
    run there too, less one for the rank itself. Before init() nobody knows what the launcher has
    bound the other ranks to; then all of this host are taken to share.

    Args:
        limit: the most; each has the data set and some batches in memory.

    Returns:
        0 or more; with 0 the rank loads its data itself, between the steps.
    """
    sharers = world.cpu_sharers() if world.is_initialized() else discover().local_size or 1
    return max(0, min(limit, len(os.sched_getaffinity(0)) // sharers - 1))
