# SPDX-License-Identifier: Apache-2.0
"""The current world: joining and leaving it, its ranks, process sets and engines.

Open first: `current`, then `join`.
"""

from torch_ring.world.current import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from torch_ring.world.process_set import (
    ProcessSet,
    _basics,
    add_process_set,
    global_process_set,
    hierarchy,
    remove_process_set,
)

__all__ = [
    "ProcessSet",
    "_basics",
    "add_process_set",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "hierarchy",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
]
