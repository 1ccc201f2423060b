# SPDX-License-Identifier: Apache-2.0
"""The faults that `mutants.py` plants: what could go wrong silently, by room.

A room is a module here. Its name is that of its package, in Python or in `csrc/`; `gradients` has
both halves, `c10d` the one of Python, and `ring_backend` that of `csrc/c10d/`.
"""

from __future__ import annotations

from collections import Counter
from importlib import import_module

from faults.fault import Fault, Room

__all__ = ["ROOMS", "Fault", "Room"]

_OF_PYTHON = (
    "c10d",
    "collectives",
    "compression",
    "data",
    "elastic",
    "horovod",
    "membership",
    "optimizer",
    "run",
    "setup",
    "state",
    "tracing",
    "world",
)
_OF_CPP = (
    "agreement",
    "collective",
    "control",
    "engine",
    "messages",
    "ring_backend",
    "transport",
)

ROOMS: dict[str, Room] = {
    name: import_module(f"faults.{name}").ROOM for name in ("gradients", *_OF_PYTHON, *_OF_CPP)
}

# One build may hold the faults of several rooms, where a name switches on its fault.
_named = Counter(fault.name for room in ROOMS.values() for fault in room.faults)
if _twice := [name for name, count in _named.items() if count > 1]:
    raise ValueError(f"faults of the same name: {', '.join(_twice)}")
