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

from torch_ring.world.process_set import ProcessSet, lose, objects_of, renumber
from torch_ring.world.process_set_table import ProcessSetTable
from torch_ring.world.ranks import Ranks

__all__ = ["ProcessSetKeeper", "sets_to_keep"]

Names = tuple[str, ...]
"""The processes of a set, by names that no others have, also of those that come later."""

Told = Sequence[tuple[Names, bool]] | None
"""The sets that a rank knows, and whether its program has an object of each; None: a newcomer."""


@dataclass(frozen=True)
class _Set:
    """A set of the last world."""

    ranks: Ranks
    names: Names
    objects: list[ProcessSet]  # by which the program knows it


class ProcessSetKeeper:
    """Keeps the process sets of this rank while its worlds end.

    In a new world the ranks gather what each of them `told`, and give it to `restore`.

    Thread: the training's. Blocking: `restore`, until all ranks have called it.
    """

    def __init__(self) -> None:
        self._sets: list[_Set] = []
        self._size = 0  # of the last world

    def note(self, table: ProcessSetTable, processes: Sequence[str]) -> None:
        """Note the sets of a world, before it is left.

        Args:
            table: has them.
            processes: the names of the processes of that world, by rank.
        """
        self._size = len(processes)
        self._sets = [
            _Set(each.ranks, tuple(processes[rank] for rank in each.ranks), objects_of(each.ranks))
            for each in table.records
            if each.id != 0
        ]

    def told(self) -> list[tuple[Names, bool]]:
        """Return the sets that were noted, and whether the program has an object of each."""
        return [(each.names, bool(each.objects)) for each in self._sets]

    def restore(
        self, table: ProcessSetTable, processes: Sequence[str], told: Sequence[Told]
    ) -> None:
        """Make the sets again in a new world. Collective of all its ranks.

        Args:
            table: of the new world.
            processes: the names of its processes, by rank.
            told: what each of them told, by rank; None: it was in no world of the job before.

        Raises:
            RingError: a rank has died meanwhile. All objects are as before then.
        """
        rank_of = {name: rank for rank, name in enumerate(processes)}
        kept: dict[Names, Ranks] = {}
        for names in sets_to_keep(told, rank_of):
            kept[names] = tuple(sorted(rank_of[name] for name in names))
            table.add(kept[names], keeps=True)
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


def sets_to_keep(told: Sequence[Told], living: Mapping[str, int]) -> list[Names]:
    """Return the sets that are made again, in the order in which they were added.

    Args:
        told: by rank.
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
