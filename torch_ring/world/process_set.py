# SPDX-License-Identifier: Apache-2.0
"""ProcessSet: a subset of the ranks, with collectives of its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from torch_ring._C import Engine
from torch_ring.errors import InvalidArgumentError, ProcessSetLostError
from torch_ring.world import current
from torch_ring.world.process_set_table import ProcessSetRecord, ProcessSetTable
from torch_ring.world.ranks import Ranks, ranks_of

__all__ = [
    "ProcessSet",
    "ProcessSetKeeper",
    "add_process_set",
    "engine_of",
    "global_process_set",
    "hierarchy",
    "lose",
    "membership",
    "remove_process_set",
    "require_whole",
    "root_in",
    "sets_to_keep",
]


class ProcessSet:
    """A subset of the ranks, for :func:`init` or :func:`add_process_set`.

    Its ranks identify the set: two objects with the same ranks are equal and mean the same set, and
    an object that was pickled, or used in an earlier world, can be used again.

    In an elastic job, a set whose ranks live is made again when other ranks die or join, and all
    its objects get the new numbers of its ranks. If it loses a rank, every use of it raises
    ProcessSetLostError, until the object is passed to :func:`add_process_set` again.

    Operations of two sets may be in flight in any order, even on GPUs: there all ranks enqueue them
    in the same order.

    Args:
        ranks_or_comm: ranks in any order, or an mpi4py communicator of them.

    Raises:
        InvalidArgumentError: there is no rank, or one is no integer, negative or repeated.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self._ranks = ranks_of(ranks_or_comm)  # empty after the loss of a rank
        self._lost: tuple[Ranks, str] | None = None  # the ranks before one was lost, and the error
        _objects[id(self)] = self

    @property
    def process_set_id(self) -> int | None:
        """The set's number, the same on all ranks; None unless it has been added."""
        record = self._record()
        return None if record is None else record.id

    @property
    def ranks(self) -> list[int] | None:
        """The members, ascending; None for the global set when there is no world.

        For a set that has lost a rank: its former members, in the numbering of that time.
        """
        return list(self._ranks if self._lost is None else self._lost[0])

    def size(self) -> int:
        """Return the number of members.

        Raises:
            ProcessSetLostError: the set has lost a member.
        """
        require_whole(self)
        return len(self._ranks)

    def rank(self) -> int:
        """Return the index of this process among the members.

        Raises:
            InvalidArgumentError: this process is no member, or the set has not been added.
            NotInitializedError: there is no world.
            ProcessSetLostError: the set has lost a rank.
        """
        return membership(self).ranks.index(current.rank())

    def included(self) -> bool:
        """Return whether the set has been added and this process is a member.

        Raises:
            ProcessSetLostError: the set has lost a rank.
        """
        record = self._record()
        if record is None:
            require_whole(self)
        return record is not None and record.is_member

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ProcessSet):
            return False
        return bool(self._ranks) and self._ranks == other._ranks  # neither global nor lost

    def __hash__(self) -> int:
        # It stays the same when the ranks get other numbers, so that a dict still finds the set.
        return hash(len(self.ranks or ()))

    def __repr__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"
        )

    def __reduce__(self) -> Any:
        if self._lost is not None:
            return _copy_of_lost, self._lost
        return ProcessSet, (self._ranks,)

    def _record(self) -> ProcessSetRecord | None:
        return current.world().process_sets.find(self._ranks) if current.is_initialized() else None


def require_whole(process_set: ProcessSet) -> None:
    """Raise ProcessSetLostError if the set has lost a rank."""
    if process_set._lost is not None:
        raise ProcessSetLostError(process_set._lost[1])


def renumber(process_set: ProcessSet, ranks: Ranks) -> None:
    """Give a set the ranks of its processes in a new world."""
    process_set._ranks, process_set._lost = ranks, None


def lose(process_set: ProcessSet, why: str) -> None:
    """Make all uses of a set fail with `why`: the new world does not have it."""
    process_set._ranks, process_set._lost = (), (process_set._ranks, why)


def _copy_of_lost(ranks: Ranks, why: str) -> ProcessSet:
    copy = ProcessSet(ranks)
    lose(copy, why)
    return copy


_objects: WeakValueDictionary[int, ProcessSet] = WeakValueDictionary()  # all living objects


def objects_of(ranks: Ranks) -> list[ProcessSet]:
    """Return the objects of this process that mean the set of these ranks."""
    return [each for each in list(_objects.values()) if each._ranks == ranks]


class _GlobalProcessSet(ProcessSet):
    """All ranks of the current world."""

    def __init__(self) -> None:
        self._ranks = ()
        self._lost = None

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def ranks(self) -> list[int] | None:
        return list(range(current.size())) if current.is_initialized() else None

    def size(self) -> int:
        return current.size()

    def __hash__(self) -> int:
        return 0

    def __reduce__(self) -> Any:
        return "global_process_set"

    def _record(self) -> ProcessSetRecord | None:
        return current.world().process_sets.everyone if current.is_initialized() else None


global_process_set: ProcessSet = _GlobalProcessSet()
"""All ranks; its id is 0."""


class _Level(ProcessSet):
    """A set of a hierarchy, which follows the ranks of the present world.

    Args:
        is_host: whether it is the set of this rank's host, or that of one rank of each host.
    """

    def __init__(self, *, is_host: bool) -> None:
        self._is_host = is_host
        self._lost = None
        self._found: tuple[Sequence[int], Ranks] = ((), ())  # the hosts of a world, and its ranks
        _levels[id(self)] = self

    @property
    def _ranks(self) -> Ranks:  # type: ignore[override]
        if not current.is_initialized():
            return ()
        host_of = current.world().host_of
        if self._found[0] is not host_of:
            *hosts, first_ranks = _levels_of(host_of)
            own = next(ranks for ranks in hosts if current.rank() in ranks)
            self._found = (host_of, own if self._is_host else first_ranks)
        return self._found[1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Level) and other._is_host == self._is_host

    def __hash__(self) -> int:
        return hash(self._is_host)

    def __reduce__(self) -> Any:
        return functools.partial(_Level, is_host=self._is_host), ()


_levels: WeakValueDictionary[int, _Level] = WeakValueDictionary()  # living objects, equal or not


def _levels_of(host_of: Sequence[int]) -> list[Ranks]:
    """Return the ranks of each host, and last the set of the lowest rank of each host."""
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(host_of):
        by_host.setdefault(host, []).append(rank)
    return [*map(tuple, by_host.values()), tuple(ranks[0] for ranks in by_host.values())]


def add_process_set(process_set: Any) -> ProcessSet:
    """Make a process set. A collective of all ranks, members or not.

    Args:
        process_set: a ProcessSet, a list of ranks or an mpi4py communicator; the same on all ranks.
            A set that has lost a rank begins anew with the ranks that now have its numbers.

    Returns:
        The set; it exists until it is removed, or until shutdown().

    Raises:
        InvalidArgumentError: on all ranks: the set exists already, or a rank does not exist. If an
            elastic job has made the set again, adding it once is no error.
        MismatchError: on all ranks: they add or remove different sets; the job may go on.
        NotInitializedError: there is no world, or only the one of this process's parent.
        RingError: on all ranks: a member has no memory for the set; says why.
    """
    current.require_own()
    table = current.world().process_sets
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = tuple(added.ranks or ())
    table.add(ranks)
    if not isinstance(added, (_GlobalProcessSet, _Level)):
        renumber(added, ranks)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """End a process set. A collective of all ranks, members or not.

    Synchronize its operations first: those in flight fail. Another set may get its id.

    Args:
        process_set: a set that was added, or another object with the same ranks.

    Returns:
        Whether the set existed; False for the global set, which stays.

    Raises:
        InvalidArgumentError: `process_set` is not a ProcessSet.
        MismatchError: on all ranks: they add or remove different sets; the job may go on.
        NotInitializedError: there is no world, or only the one of this process's parent.
        ProcessSetLostError: the set has lost a rank, and ended with that.
    """
    current.require_own()
    _require_process_set(process_set)
    require_whole(process_set)
    return current.world().process_sets.remove(tuple(process_set.ranks or ()))


def hierarchy() -> tuple[ProcessSet, ProcessSet]:
    """Make the process sets of a hierarchy: ranks that share a host, and one rank of each host.

    For algorithms that send less between hosts than inside a host, such as :func:`DiLoCo` of a
    ``DistributedOptimizer``. A collective of all ranks. Existing sets are reused.

    Returns:
        The set of the ranks on this rank's host; and that of the lowest rank of each host, to which
        this rank may not belong. When ranks of an elastic job die or join, both become those of the
        new world.

    Raises:
        NotInitializedError: there is no world, or only the one of this process's parent.
        RingError: as :func:`add_process_set`.
    """
    current.require_own()
    world = current.world()
    _add_levels(world.process_sets, world.host_of)
    return _Level(is_host=True), _Level(is_host=False)


def _add_levels(table: ProcessSetTable, host_of: Sequence[int]) -> None:
    """Make the missing sets of a hierarchy. Collective of all ranks."""
    for ranks in _levels_of(host_of):
        if table.find(ranks) is None:
            table.add(ranks, keeps=True)  # no error if the program adds it, too


def engine_of(process_set: ProcessSet) -> Engine:
    """Return the engine that runs the collectives of a set; the first call makes it.

    Raises:
        InvalidArgumentError: the set has not been added, or this process is no member.
        NotInitializedError: there is no world, or only the one of this process's parent.
    """
    if process_set is global_process_set:
        return current.engine()
    current.require_own()
    return membership(process_set).engine()


def root_in(process_set: ProcessSet, root_rank: int) -> int:
    """Return the index of the global rank `root_rank` among the members.

    Raises:
        InvalidArgumentError: `root_rank` or this process is no member.
        NotInitializedError: there is no world.
    """
    ranks = membership(process_set).ranks
    if root_rank not in ranks:
        raise InvalidArgumentError(
            f"root_rank={root_rank!r} is not in the process set {list(ranks)}: give one of these"
        )
    return ranks.index(root_rank)


def membership(process_set: ProcessSet) -> ProcessSetRecord:
    """Return the record of a set of which this process is a member."""
    _require_process_set(process_set)
    record = process_set._record()
    if record is None:
        require_whole(process_set)
        current.world()  # raises NotInitializedError
        raise InvalidArgumentError(
            f"{process_set} has not been added, or has been removed: call add_process_set() (or "
            "hierarchy()) on all ranks first"
        )
    if not record.is_member:
        raise InvalidArgumentError(f"rank {current.rank()} is not in {process_set}")
    return record


def _require_process_set(process_set: object) -> None:
    if not isinstance(process_set, ProcessSet):
        raise InvalidArgumentError(
            f"{process_set!r} is not a ProcessSet: give what add_process_set() returns"
        )


class _Basics:
    """The part of Horovod's internals, ``hvd._basics``, that programs read."""

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of all sets, by id."""
        return {record.id: list(record.ranks) for record in current.world().process_sets.records}


_basics = _Basics()


Names = tuple[str, ...]
"""The processes of a set, by names that are unique even among later processes."""

NotedSets = Sequence[tuple[Names, bool]] | None
"""A rank's sets, each with whether its program has an object of it; None: a newcomer."""


@dataclass(frozen=True)
class _FormerSet:
    """A set of the last world."""

    ranks: Ranks
    names: Names
    objects: list[ProcessSet]  # the program's objects of it


class ProcessSetKeeper:
    """Keeps the process sets of this rank while its worlds end.

    In a new world the ranks gather the results of `noted`, and pass them to `restore`.

    Thread: the training thread. Blocking: `restore`, until all ranks have called it.
    """

    def __init__(self) -> None:
        self._sets: list[_FormerSet] = []
        self._size = 0  # of the last world

    def note(self, table: ProcessSetTable, processes: Sequence[str]) -> None:
        """Note the sets of a world, before this rank leaves it.

        Args:
            table: the table of the sets.
            processes: the names of the processes of that world, by rank.
        """
        self._size = len(processes)
        self._sets = [
            _FormerSet(
                each.ranks, tuple(processes[rank] for rank in each.ranks), objects_of(each.ranks)
            )
            for each in table.records
            if each.id != 0
        ]

    def noted(self) -> list[tuple[Names, bool]]:
        """Return the noted sets, each with whether the program has an object of it."""
        return [(each.names, bool(each.objects)) for each in self._sets]

    @property
    def has_levels(self) -> bool:
        """Whether the program has an object of a hierarchy."""
        return len(_levels) > 0

    def restore(
        self,
        table: ProcessSetTable,
        processes: Sequence[str],
        noted: Sequence[NotedSets],
        hosts: Sequence[int] | None = None,
    ) -> None:
        """Make the sets again in a new world. Collective of all its ranks.

        Args:
            table: the table of the new world.
            processes: the names of its processes, by rank.
            noted: the noted sets of each process, by rank; None: it is a newcomer.
            hosts: the host of each rank, if a rank has a hierarchy; else None.

        Raises:
            RingError: a rank has died meanwhile; then all objects are unchanged.
        """
        rank_of = {name: rank for rank, name in enumerate(processes)}
        kept: dict[Names, Ranks] = {}
        for names in sets_to_keep(noted, rank_of):
            kept[names] = tuple(sorted(rank_of[name] for name in names))
            table.add(kept[names], keeps=True)
        if hosts is not None:
            _add_levels(table, hosts)
        for each in self._sets:
            for process_set in each.objects:
                if each.names in kept:
                    renumber(process_set, kept[each.names])
                else:
                    lose(process_set, self._what_became_of(each, rank_of))
        self._sets = []

    def _what_became_of(self, lost: _FormerSet, rank_of: Mapping[str, int]) -> str:
        pairs = list(zip(lost.ranks, lost.names, strict=True))
        gone = [rank for rank, name in pairs if name not in rank_of]
        left = [rank_of[name] for _, name in pairs if name in rank_of]
        if gone:
            numbers = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
            what = f"has lost {numbers} of the {self._size} ranks that there were"
        else:
            what = f"was being added or removed when one of {self._size} ranks was lost"
        rest = f"its other ranks have the numbers {left} now" if left else "no rank of it is left"
        return (
            f"the process set {list(lost.ranks)} {what}; {rest}. Make another one: call "
            "add_process_set() on all ranks, in a reset callback or in the elastic function"
        )


def sets_to_keep(noted: Sequence[NotedSets], living: Mapping[str, int]) -> list[Names]:
    """Return the sets to make again, in the order in which they were added.

    Args:
        noted: the noted sets, by rank.
        living: the processes of the new world.
    """
    survivors = [dict(sets) for sets in noted if sets is not None]
    return [
        names
        for names in (survivors[0] if survivors else ())
        if all(name in living for name in names)
        and all(names in sets for sets in survivors)
        and any(sets[names] for sets in survivors)
    ]
