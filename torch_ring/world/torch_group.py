"""place_in, group_of_job: the rank, size and store of a group of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from torch_ring.errors import InvalidArgumentError
from torch_ring.rendezvous.launchers import discover

__all__ = ["group_of_job", "place_in"]


def place_in(group: Any) -> tuple[int, int, Store]:
    """Return this process's rank in a group, the group's size, and its store.

    Raises:
        InvalidArgumentError: `group` is no group of torch.distributed with this process.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgumentError(
            "process_group: torch.distributed has no groups before init_process_group()"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgumentError(
            f"process_group={group!r} is no group of torch.distributed, or one without this process"
        )
    _, store = dist.distributed_c10d._world.pg_map[group]
    return dist.get_rank(group), dist.get_world_size(group), store


def group_of_job() -> Any:
    """Return torch.distributed's default group, if it has all ranks of this job; otherwise None.

    A launcher may have started more ranks than those that have made the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD
    try:
        launched = discover()
    except InvalidArgumentError:
        return group
    same = (launched.rank, launched.size) == (dist.get_rank(group), dist.get_world_size(group))
    return group if same or launched.launcher == "python" else None
