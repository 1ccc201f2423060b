# SPDX-License-Identifier: Apache-2.0
"""Groups of torch.distributed on ranks of the pool."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_ring  # noqa: F401  registers ring
from tests.support.pool import DEADLINE_S, run

TIMEOUT_S = 20.0
# Older versions check for the name gloo, or for a GPU, before they call a backend.
IS_TORCH_2_14 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
needs_torch_2_14 = pytest.mark.skipif(not IS_TORCH_2_14, reason="torch 2.14 and later")


def group_store() -> dist.Store:
    """Return the store of this run's ranks."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    return dist.PrefixStore(os.environ["TORCHELASTIC_RUN_ID"], store)


@contextmanager
def default_group(backend: str = "ring", timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """Have a default group of all ranks of this run."""
    dist.init_process_group(
        backend,
        store=group_store(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_ring(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    transport: str = "shm",
    timeout_s: float = TIMEOUT_S,
    may_die: Sequence[int] = (),
    is_fresh: bool = False,
    env: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> list[Any]:
    """Call ``fn(*args)`` on ranks with a default group of the backend ring; return by rank.

    Args:
        is_fresh: whether to use new processes: in reused ones, torch's caches of DTensor depend on
            an earlier rank.
    """
    return run(
        _in_group,
        size,
        args=(fn, args, timeout_s),
        transport=transport,
        env=env,
        deadline_s=deadline_s,
        initialized=False,
        kind=None if may_die or is_fresh else "c10d",
        may_die=may_die,
    )


def _in_group(fn: Callable[..., Any], args: Sequence[Any], timeout_s: float) -> Any:
    if timeout_s < TIMEOUT_S:
        # Ranks also wait this long for one another at the beginning: here they meet, and import.
        with default_group():
            dist.barrier()
    with default_group(timeout_s=timeout_s):
        return fn(*args)
