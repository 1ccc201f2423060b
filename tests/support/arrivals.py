# SPDX-License-Identifier: Apache-2.0
"""Jobs in the pool that newcomers join after the start."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pool

import torch_ring as hvd
from torch_ring.membership.directory import Directory
from torch_ring.membership.member import key_of

SECRET = "of this test"


def run_with_arrivals(
    function: Callable[..., Any],
    size: int,
    arrivals: int,
    *,
    args: Sequence[Any] = (),
    transport: str = "shm",
    may_die: Collection[int] = (),
    env: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on `size` ranks, and on newcomers.

    Each has called ``hvd.init()``, which makes a world of one in a newcomer.

    Args:
        env: additional environment variables for all of them.
        before: called by each process before ``hvd.init()``.

    Returns:
        The results: of the first ranks by rank, then of the newcomers.
    """
    directory = Directory("127.0.0.1", key_of(SECRET))
    directory.expect({f"p{rank}": rank for rank in range(size)})
    variables = {
        "TORCH_RING_SECRET": SECRET,
        "TORCH_RING_ELASTIC_DIRECTORY": directory.address,
        "TORCH_RING_ELASTIC_TIMEOUT": "30",
    }
    return pool.run(
        _start,
        size + arrivals,
        args=(function, size, tuple(args), before),
        transport=transport,
        env=variables | dict(env or {}),
        initialized=False,
        may_die=may_die,
    )


def _start(
    function: Callable[..., Any],
    size: int,
    args: Sequence[Any],
    before: Callable[[], None] | None,
) -> Any:
    index = int(os.environ["RANK"])
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(size)
    os.environ["TORCH_RING_PROCESS"] = f"p{index}"
    if index >= size:
        os.environ["TORCH_RING_ELASTIC_NEWCOMER"] = "1"
        del os.environ["TORCHELASTIC_RUN_ID"]  # no launcher has started it inside another job
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(size - 1)
    if before is not None:
        before()
    hvd.init()
    result = function(*args)
    hvd.shutdown()
    return result
