"""note_driven_sets: process sets in the worlds of Horovod's elastic driver.

A process cannot know whether others were in a world of the job before. So all tell who they are and
which sets they know, whenever a world begins. If some were in the world before, its sets are made
again. If all are new, the sets that were given to init() are made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from torch_ring.errors import MismatchError
from torch_ring.rendezvous.member import member_id
from torch_ring.world import current
from torch_ring.world.driven import on_driven_world
from torch_ring.world.join import World, static_sets
from torch_ring.world.process_set_keeper import ProcessSetKeeper
from torch_ring.world.ranks import ranks_of

__all__ = ["driven_processes", "note_driven_sets"]


class _DrivenSets:
    """What this process keeps while its worlds end.

    Attributes:
        processes: the names of the processes of the last world, by rank.
    """

    def __init__(self) -> None:
        self.processes: Sequence[str] = ()
        self._name, self._process = "", 0  # a forked child is another process
        self._keeper = ProcessSetKeeper()
        self._was_there = False  # in the world before, whose sets are noted

    def note(self) -> None:
        """Note the sets of the present world, which this process is about to leave."""
        world = current.find_world()
        if world is not None and len(self.processes) == world.size:
            self._keeper.note(world.process_sets, self.processes)
        self._was_there = True

    def make(self, world: World, process_sets: Sequence[Any] | str | None) -> None:
        """Make the sets of a world that begins. Collective of all its ranks.

        Raises:
            MismatchError: on all ranks: all are new, and `process_sets` differs.
            InvalidArgumentError: on all ranks: all are new, and there is no such rank.
            RingError: a rank has died meanwhile.
        """
        static_sets(process_sets if isinstance(process_sets, str) else None, world.size)  # a word
        given = [] if isinstance(process_sets, str) else [ranks_of(s) for s in process_sets or ()]
        own = self._keeper.told() if self._was_there else None
        table = world.process_sets
        if self._process != os.getpid():
            self._name, self._process = member_id(""), os.getpid()
        texts = table.gather_texts(json.dumps([self._name, own, given]))
        answers = [json.loads(text) for text in texts]
        processes = [name for name, _, _ in answers]
        told = [
            sets if sets is None else [(tuple(names), has_object) for names, has_object in sets]
            for _, sets, _ in answers
        ]
        if any(sets is not None for sets in told):
            self._keeper.restore(table, processes, told)
        else:
            _require_same([sets for _, _, sets in answers])
            for ranks in static_sets(given, world.size):
                table.add(ranks)
        self.processes, self._was_there = processes, False


def _require_same(given: Sequence[Any]) -> None:
    for rank, sets in enumerate(given):
        if sets != given[0]:
            raise MismatchError(
                f"init(process_sets=...) differs: rank 0 gives {given[0]}, rank {rank} {sets}"
            )


_sets = _DrivenSets()
on_driven_world(_sets.make)


def note_driven_sets() -> None:
    """Note the process sets of the present world, to make them again in the driver's next one."""
    _sets.note()


def driven_processes() -> Sequence[str]:
    """Return names of the processes of this world of the driver, by rank; none: it is another."""
    return _sets.processes
