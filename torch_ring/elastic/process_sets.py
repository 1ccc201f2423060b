"""ProcessSetKeeper: makes the process sets of a world again in the next one.

A process set is told by its ranks, and these are numbered anew in each world. So the ranks compare
sets by the names of their processes. A set is made again if

- all of its processes are in the new world,
- all survivors know it: a rank may have died while it was added or removed,
- and the program of some rank still has an object of it.

Newcomers make the same sets, of which they are no members. Then the objects of the survivors get
the new numbers. Objects of the other sets get an error that says what has become of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_ring.collectives.objects import allgather_object
from torch_ring.rendezvous.member import Member
from torch_ring.world import current
from torch_ring.world.process_set import ProcessSet, lose, objects_of, renumber
from torch_ring.world.ranks import Ranks

__all__ = ["ProcessSetKeeper", "sets_to_keep"]

Names = tuple[str, ...]
"""The processes of a set, by what `Member.id` calls them."""


@dataclass(frozen=True)
class _Set:
    """A set of the last world."""

    ranks: Ranks
    names: Names
    objects: list[ProcessSet]  # by which the program knows it


class ProcessSetKeeper:
    """Keeps the process sets of this rank while its worlds end.

    Thread: the training's. Blocking: `restore`, until all ranks have called it.
    """

    def __init__(self) -> None:
        self._sets: list[_Set] = []
        self._size = 0  # of the last world

    def note(self, members: Sequence[Member]) -> None:
        """Note the sets of the present world, before it is left.

        Args:
            members: the processes of that world, by rank.
        """
        self._size = len(members)
        self._sets = [
            _Set(each.ranks, tuple(members[rank].id for rank in each.ranks), objects_of(each.ranks))
            for each in current.world().process_sets.records
            if each.id != 0
        ]

    def restore(self, members: Sequence[Member], *, is_newcomer: bool) -> None:
        """Make the sets again in the present world. Collective of all its ranks.

        Args:
            members: the processes of this world, by rank.
            is_newcomer: whether this process was in no world of the job before.

        Raises:
            RingError: a rank has died meanwhile. All objects are as before then.
        """
        own = None if is_newcomer else [(each.names, bool(each.objects)) for each in self._sets]
        rank_of = {member.id: rank for rank, member in enumerate(members)}
        kept: dict[Names, Ranks] = {}
        for names in sets_to_keep(allgather_object(own, "elastic.process_sets"), rank_of):
            kept[names] = tuple(sorted(rank_of[name] for name in names))
            current.world().process_sets.add(kept[names], keeps=True)
        for each in self._sets:
            for process_set in each.objects:
                if each.names in kept:
                    renumber(process_set, kept[each.names])
                else:
                    lose(process_set, self._what_became_of(each, rank_of))
        self._sets = []

    def _what_became_of(self, lost: _Set, rank_of: Mapping[str, int]) -> str:
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


def sets_to_keep(
    told: Sequence[Sequence[tuple[Names, bool]] | None], living: Mapping[str, int]
) -> list[Names]:
    """Return the sets that are made again, in the order in which they were added.

    Args:
        told: by rank, the sets that it knows, and whether its program has an object of each; None:
            a newcomer.
        living: has the processes of the new world.
    """
    survivors = [dict(sets) for sets in told if sets is not None]
    return [
        names
        for names in (survivors[0] if survivors else ())
        if all(name in living for name in names)
        and all(names in sets for sets in survivors)
        and any(sets[names] for sets in survivors)
    ]
