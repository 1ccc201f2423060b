"""ProcessSetRecord: one process set of a world, its memory and its engine.

Every set has an engine of its own, so that operations of one set never wait for those of another.
The engine is made when the set is first used. Until then a set is a record and, on a host that it
has several ranks on, a slot of each one's shared memory: it has no thread and no connection.
"""

from __future__ import annotations

import threading
from typing import Any

from torch_ring._C import Engine
from torch_ring.config import Config
from torch_ring.connections.connections import Connections
from torch_ring.errors import InvalidArgumentError, RingError
from torch_ring.rendezvous.exchange import lacking
from torch_ring.world.engine import make_engine
from torch_ring.world.ranks import Ranks

__all__ = ["ProcessSetRecord"]


class ProcessSetRecord:
    """One process set.

    Thread: any.

    Args:
        set_id: the same on all ranks; another set may get it later. -1: a set that its members
            alone make and leave.
        ranks: the members, ascending ranks of the world.
        connections: of this process.
        config: the world's settings.
        number: the same on all ranks, and never given twice.
        slots: by member, the offset of the set's memory in the member's own, or -1.

    Attributes:
        id: the set's.
        ranks: as above.
        is_member: whether this process is one.
        is_kept: whether the set was made again from one of the world before; until it is added.
        owned: state of higher layers for this set, by type; it ends with the set.
    """

    def __init__(
        self,
        set_id: int,
        ranks: Ranks,
        connections: Connections,
        config: Config,
        *,
        number: int,
        slots: list[int],
    ) -> None:
        self.id = set_id
        self.ranks = ranks
        self.is_member = connections.rank in ranks
        self.is_kept = False
        self.owned: dict[type, Any] = {}
        self._connections = connections
        self._config = config
        self._number = number
        self._slots = slots
        self._engine: Engine | None = None
        self._failure = ""  # why the engine could not be made
        self._closed = False
        self._making = threading.RLock()

    def engine(self) -> Engine:
        """Return the engine that runs the set's collectives; the first call makes it.

        Raises:
            InvalidArgumentError: this process is no member, or the set has been removed.
            RingError: the engine finds no memory, no thread or no descriptor. The other members'
                operations fail with that reason, too.
        """
        if self._engine is not None:
            return self._engine
        if not self.is_member:
            raise InvalidArgumentError(
                f"rank {self._connections.rank} is not in the process set {list(self.ranks)}"
            )
        with self._making:
            if self._closed:
                raise InvalidArgumentError(f"the process set {list(self.ranks)} has been removed")
            if self._failure:  # the other members have given the set up
                raise RingError(
                    f"the process set {list(self.ranks)} has ended: {self._failure}. Remove it"
                )
            if self._engine is None:
                self._engine = self._make_engine()
            return self._engine

    @property
    def running(self) -> Engine | None:
        """The engine, if it has been made and has not ended."""
        return self._engine

    @property
    def number(self) -> int:
        """The set's number: the same on all ranks, and never given twice."""
        return self._number

    def shutdown(self, *, removed: bool = False) -> None:
        """End the engine, and fail its operations in flight.

        Args:
            removed: whether all members do so; otherwise they are told that this one leaves.
        """
        with self._making:
            is_first, self._closed = not self._closed, True
            engine, self._engine = self._engine, None
        self.owned.clear()

        plane = self._connections.plane
        if engine is not None:
            engine.shutdown(removed)
        elif is_first and self._number and plane is not None:
            # Members that have used the set may have connected to this one. A plane that knows of
            # the end of every set needs no memory for all of their numbers.
            if self.id < 0:
                plane.leave_unused(self._number, len(self.ranks))
            else:
                plane.close_set(self._number)

    def _make_engine(self) -> Engine:
        try:
            return make_engine(
                self._connections, self._number, self.ranks, self._slots, self._config
            )
        except Exception as error:
            # Members that use the set would wait in vain for this one.
            rank = self._connections.rank
            failure = lacking(error, rank) or error
            self._failure = str(failure).removeprefix(f"rank {rank}: ")
            if self._connections.plane is not None:
                self._connections.plane.fail(self._number, self._failure)
            raise failure from None

    def abandon(self) -> None:
        """Let go of the parent's engine in a forked child."""
        self._making = threading.RLock()  # the child lacks the parent's thread that held it
        if self._engine is not None:
            self._engine.abandon()

    def release_slot(self) -> None:
        """Give the set's memory back. Call when the engines of all members have ended."""
        if self.is_member:
            slot = self._slots[self.ranks.index(self._connections.rank)]
            if slot >= 0 and self._connections.memory is not None:
                self._connections.memory.release_slot(slot)
