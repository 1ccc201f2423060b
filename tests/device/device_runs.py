"""Runs a program on ranks that have the stand-ins for a GPU and for NCCL."""

from __future__ import annotations

from collections.abc import Callable
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
    transport: str = "shm",
    deadline_s: float = pool.DEADLINE_S,
    **env: str,
) -> Any:
    """Call ``program(device)`` on `size` ranks that had the device before they used autograd.

    Autograd counts devices only once in a process.
    """
    return pool.run(
        call_on_double,
        size,
        args=(program,),
        transport=transport,
        env={"TORCH_RING_NCCL_LIBRARY": str(NCCL_LIBRARY), **env},
        deadline_s=deadline_s,
        initialized=False,
        kind=DEVICE,
    )
