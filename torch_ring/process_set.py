"""Temporary."""

from __future__ import annotations

from torch_ring import _C, world

__all__ = ["ProcessSet", "engine_of", "global_process_set", "root_in"]


class ProcessSet:
    process_set_id = 0

    def size(self) -> int:
        return world.size()

    def rank(self) -> int:
        return world.rank()

    def included(self) -> bool:
        return True


global_process_set = ProcessSet()


def engine_of(process_set: ProcessSet) -> _C.Engine:
    return world.engine()


def root_in(process_set: ProcessSet, root_rank: int) -> int:
    return root_rank
