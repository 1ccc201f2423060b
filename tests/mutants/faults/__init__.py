"""The faults that `mutants.py` plants: what could go wrong silently, by room.

A room is a module here. Its name is that of its package, in Python or in `csrc/`; `gradients` has
both halves, `c10d` the one of Python, and `ring_backend` that of `csrc/c10d/`.
"""

from __future__ import annotations

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
