# SPDX-License-Identifier: Apache-2.0
"""Runs a program on ranks that have the stand-ins for a GPU and for NCCL."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import device_double
import pool
from device_double import DEVICE, NCCL_LIBRARY

import torch_ring as hvd


def call_on_double(program: Callable[[str], object]) -> object:
    device_double.load()
    hvd.init()
    result = program(DEVICE)
    hvd.shutdown()
    return result


def run_on_double(
    program: Callable[[str], object],
    size: int,
    deadline_s: float = pool.DEADLINE_S,
    may_die: Collection[int] = (),
    is_fresh: bool = False,
    **env: str,
) -> Any:
    """Call ``program(device)`` on `size` ranks that had the device before they used autograd.

    Autograd counts devices only once in a process.

    Args:
        may_die: ranks that may die without a failure.
        is_fresh: whether to use new processes.
        env: environment variables.
    """
    return pool.run(
        call_on_double,
        size,
        args=(program,),
        env={"TORCH_RING_NCCL_LIBRARY": str(NCCL_LIBRARY), **env},
        deadline_s=deadline_s,
        initialized=False,
        kind=None if is_fresh else DEVICE,
        may_die=may_die,
    )
