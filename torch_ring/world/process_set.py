"""Process sets: some of the ranks, with collectives of their own."""

from __future__ import annotations

from typing import Any

from torch_ring import _C, world
from torch_ring.errors import InvalidArgumentError
from torch_ring.ranks import ranks_of
from torch_ring.registry import Entry

__all__ = [
    "ProcessSet",
    "add_process_set",
    "engine_of",
    "global_process_set",
    "remove_process_set",
    "root_in",
]


class ProcessSet:
    """Some ranks, which can be given to :func:`init` or :func:`add_process_set`.

    It names the set of these ranks, whenever there is one: two of the same ranks are equal, and
    mean the same set; one that was pickled, or used in the world before, can be used again.

    Operations of two sets may be in flight in any order, but on GPUs of sets that share ranks: NCCL
    asks for one order of its communicators on a device, so finish those of one set first.

    Args:
        ranks_or_comm: ranks in any order, or an mpi4py communicator of them.

    Raises:
        InvalidArgumentError: these are no ranks.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self._ranks = ranks_of(ranks_or_comm)

    @property
    def process_set_id(self) -> int | None:
        """The set's number, the same on all ranks; None unless it has been added."""
        entry = self._entry()
        return None if entry is None else entry.id

    @property
    def ranks(self) -> list[int] | None:
        """The members, ascending; None for the global set when there is no world."""
        return list(self._ranks)

    def size(self) -> int:
        """Return the number of members."""
        return len(self._ranks)

    def rank(self) -> int:
        """Return the index of this process among the members.

        Raises:
            InvalidArgumentError: it is none of them, or the set has not been added.
            NotInitializedError: there is no world.
        """
        return _membership(self).ranks.index(world.rank())

    def included(self) -> bool:
        """Return whether this process is a member; not if the set has not been added."""
        entry = self._entry()
        return entry is not None and entry.engine is not None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessSet) or _GlobalProcessSet in (type(self), type(other)):
            return self is other
        return self._ranks == other._ranks

    def __hash__(self) -> int:
        return hash(self._ranks)

    def __repr__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"
        )

    def __reduce__(self) -> Any:
        return ProcessSet, (self._ranks,)

    def _entry(self) -> Entry | None:
        return world.registry().find(self._ranks) if world.is_initialized() else None


class _GlobalProcessSet(ProcessSet):
    """All ranks of the world that there is."""

    def __init__(self) -> None:
        self._ranks = ()

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def ranks(self) -> list[int] | None:
        return list(range(world.size())) if world.is_initialized() else None

    def size(self) -> int:
        return world.size()

    def __reduce__(self) -> Any:
        return "global_process_set"

    def _entry(self) -> Entry | None:
        return world.registry().everyone if world.is_initialized() else None


global_process_set: ProcessSet = _GlobalProcessSet()
"""All ranks; its id is 0."""


def add_process_set(process_set: Any) -> ProcessSet:
    """Make a process set. A collective of all ranks, members or not.

    Args:
        process_set: a ProcessSet or what makes one; the same on all ranks.

    Returns:
        The set; it is there until it is removed, or until shutdown().

    Raises:
        InvalidArgumentError: on all ranks: there is a set of these ranks, or no such rank.
        MismatchError: on all ranks: they add or remove different sets; the job may go on.
        RingError: on all ranks: a member could not connect to the others; says why.
    """
    world.require_own()
    registry = world.registry()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    registry.add(tuple(added.ranks or ()))
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """End a process set. A collective of all ranks, members or not.

    Synchronize its operations first: those in flight fail. Another set may get its id.

    Returns:
        Whether it was there. The global set stays: False.

    Raises:
        MismatchError: on all ranks: they add or remove different sets; the job may go on.
    """
    world.require_own()
    _require_process_set(process_set)
    return world.registry().remove(tuple(process_set.ranks or ()))


def engine_of(process_set: ProcessSet) -> _C.Engine:
    """Return the engine that runs the collectives of a set.

    Raises:
        InvalidArgumentError: the set has not been added, or this process is no member.
        NotInitializedError: there is no world, or it is the one of this process's parent.
    """
    if process_set is global_process_set:
        return world.engine()
    world.require_own()
    engine = _membership(process_set).engine
    assert engine is not None  # a member has one
    return engine


def root_in(process_set: ProcessSet, root_rank: int) -> int:
    """Return the index among the members of the process whose rank is `root_rank`.

    Raises:
        InvalidArgumentError: it is no member, or neither is this process.
        NotInitializedError: there is no world.
    """
    ranks = _membership(process_set).ranks
    if root_rank not in ranks:
        raise InvalidArgumentError(
            f"root_rank={root_rank!r} is not in the process set {list(ranks)}"
        )
    return ranks.index(root_rank)


def _membership(process_set: ProcessSet) -> Entry:
    """Return the entry of a set of which this process is a member."""
    _require_process_set(process_set)
    entry = process_set._entry()
    if entry is None:
        world.registry()  # raises NotInitializedError
        raise InvalidArgumentError(f"{process_set} has not been added, or has been removed")
    if entry.engine is None:
        raise InvalidArgumentError(f"rank {world.rank()} is not in {process_set}")
    return entry


def _require_process_set(process_set: object) -> None:
    if not isinstance(process_set, ProcessSet):
        raise InvalidArgumentError(f"{process_set!r} is not a ProcessSet")


class _Basics:
    """What programs written for Horovod read of its inner parts."""

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of all sets, by id."""
        return {entry.id: list(entry.ranks) for entry in world.registry().entries()}


_basics = _Basics()
