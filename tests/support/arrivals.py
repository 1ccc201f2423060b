# SPDX-License-Identifier: Apache-2.0
"""Elastic jobs in the pool, with a launcher's directory; newcomers may join after the start."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pool

import torch_ring as hvd
from torch_ring.membership.directory import Directory
from torch_ring.membership.member import key_of

SECRET = "of this test"


def run_below_launcher(
    function: Callable[..., Any],
    size: int,
    *,
    args: Sequence[Any] = (),
    arrivals: int = 0,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> list[Any]:
    """Call ``function(*args)`` in the first processes of an elastic job, and in later ones.

    A directory serves them, as the launcher's does, and hears which of the first ones have died.

    Args:
        arrivals: the number of later processes.
        env: additional environment variables for all of them.
        options: of `pool.run`.

    Returns:
        The results: of the first ranks by rank, then of the newcomers.
    """
    directory = Directory("127.0.0.1", key_of(SECRET))
    living = {f"p{rank}": rank for rank in range(size)}
    directory.expect(living)

    def watch(pids: list[int]) -> None:
        poll = select.poll()
        names = {os.pidfd_open(pids[rank]): name for name, rank in living.items()}
        for fd in names:
            poll.register(fd, select.POLLIN)

        def tell_deaths() -> None:
            while names:
                for fd, _ in poll.poll():
                    poll.unregister(fd)
                    os.close(fd)
                    del living[names.pop(fd)]
                directory.expect(living)

        threading.Thread(target=tell_deaths, daemon=True).start()

    variables = {
        "TORCH_RING_SECRET": SECRET,
        "TORCH_RING_ELASTIC_DIRECTORY": directory.address,
        "TORCH_RING_ELASTIC_TIMEOUT": "30",
    }
    return pool.run(
        function,
        size + arrivals,
        args=args,
        env=variables | dict(env or {}),
        initialized=False,
        before=watch,
        **options,
    )


def run_with_arrivals(
    function: Callable[..., Any],
    size: int,
    arrivals: int,
    *,
    args: Sequence[Any] = (),
    before: Callable[[], None] | None = None,
    **options: Any,
) -> list[Any]:
    """Call ``function(*args)`` on `size` ranks, and on newcomers.

    Each has called ``hvd.init()``, which makes a world of one in a newcomer.

    Args:
        before: called by each process before ``hvd.init()``.
        options: of `run_below_launcher`.

    Returns:
        The results: of the first ranks by rank, then of the newcomers.
    """
    begin = function, size, tuple(args), before
    return run_below_launcher(_start, size, args=begin, arrivals=arrivals, **options)


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
