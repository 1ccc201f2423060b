# SPDX-License-Identifier: Apache-2.0
"""ProcessSetTable: the process sets of a world; all ranks add and remove them together."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch_ring._C import Engine
from torch_ring.config import PROCESS_SET, Config
from torch_ring.errors import (
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
    RingError,
)
from torch_ring.setup.connect import Connections
from torch_ring.setup.failure import lacking
from torch_ring.world.engine import EngineExchange, make_engine
from torch_ring.world.ranks import Ranks, require_below

__all__ = ["ProcessSetRecord", "ProcessSetTable"]


class ProcessSetRecord:
    """One process set.

    Thread: any.

    Args:
        set_id: the set's id, the same on all ranks; another set may get it later. -1: a set that
            only its members make and leave.
        ranks: the members, ascending ranks of the world.
        connections: this process's connections.
        config: the world's settings.
        number: the set's number, the same on all ranks, and never reused.
        slots: for each member, the offset of the set's memory in the member's own, or -1.

    Attributes:
        id: the set's id.
        ranks: as above.
        is_member: whether this process is a member.
        is_kept: whether the set was made again from the previous world, and not yet added.
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
        self._failure = ""  # the reason why the engine could not be made
        self._closed = False
        self._making = threading.RLock()

    def engine(self) -> Engine:
        """Return the engine that runs the set's collectives; the first call makes it.

        Raises:
            InvalidArgumentError: this process is no member, or the set has been removed.
            RingError: the engine lacks memory, a thread or a descriptor. The other members'
                operations fail for the same reason.
        """
        if self._engine is not None:
            return self._engine
        if not self.is_member:
            raise InvalidArgumentError(
                f"rank {self._connections.rank} is not in the process set {list(self.ranks)}"
            )
        with self._making:
            if self._closed:
                raise InvalidArgumentError(
                    f"the {self._config.words.members} {list(self.ranks)} has been removed"
                )
            if self._failure:  # the other members have given the set up
                raise RingError(
                    f"the {self._config.words.members} {list(self.ranks)} has ended: "
                    f"{self._failure}. {self._config.words.remedy}"
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
        """The set's number: the same on all ranks, and never reused."""
        return self._number

    def shutdown(self, why: str = "", *, removed: bool = False) -> None:
        """End the engine, and fail its operations in flight.

        Args:
            why: the reason for the other members, if the program has failed.
            removed: whether all members end it; if not, they are told that this one leaves.
        """
        with self._making:
            is_first, self._closed = not self._closed, True
            engine, self._engine = self._engine, None
        self.owned.clear()

        plane = self._connections.plane
        if engine is not None:
            engine.shutdown(removed, why)
        elif is_first and self._number and plane is not None:
            # Members that have used the set may have connected to this one. If the plane learns of
            # the end of every set, it need not remember all numbers.
            if self.id < 0:
                plane.leave_unused(self._number, len(self.ranks), why)
            else:
                plane.close_set(self._number)

    def _make_engine(self) -> Engine:
        try:
            return make_engine(
                self._connections, self._number, self.ranks, self._slots, self._config
            )
        except Exception as error:
            # Tell the members that use the set: they would wait for this one in vain.
            rank = self._connections.rank
            failure = lacking(error, rank) or error
            self._failure = str(failure).removeprefix(f"rank {rank}: ")
            if self._connections.plane is not None:
                self._connections.plane.fail(self._number, self._failure)
            raise failure from None

    def abandon(self) -> None:
        """Abandon the parent's engine in a forked child."""
        self._making = threading.RLock()  # the child lacks the parent's thread that held it
        if self._engine is not None:
            self._engine.abandon()

    def release_slot(self) -> None:
        """Free the set's memory. Call when the engines of all members have ended."""
        if self.is_member:
            slot = self._slots[self.ranks.index(self._connections.rank)]
            if slot >= 0 and self._connections.memory is not None:
                self._connections.memory.release_slot(slot)


_NO_SLOT, _FAILED = -1, -2  # in place of a slot's offset
_BRIEF_S = 0.05  # for living peers to hear a goodbye


class ProcessSetTable:
    """The process sets of a world. Set 0 has all ranks, and always exists.

    Thread: any. `add` and `remove` are collectives of all ranks, and run one at a time; the other
    methods do not block.

    Args:
        connections: this process's connections.
        config: the world's settings.

    Attributes:
        everyone: set 0, of all ranks.
        records: all sets, by id.
        on_change: functions called when a set has been added or removed, on all ranks alike.
    """

    records: tuple[ProcessSetRecord, ...]

    def __init__(self, connections: Connections, config: Config) -> None:
        self._connections = connections
        self._config = config
        self._size = connections.size
        self.everyone = ProcessSetRecord(
            0, tuple(range(self._size)), connections, config, number=0, slots=[0] * self._size
        )
        self.on_change: list[Callable[[], None]] = []
        self._numbers = 0  # the last number given
        self._groups: list[ProcessSetRecord] = []
        self._keep([self.everyone])
        self._closed = False
        self._changing = threading.RLock()  # held while the records change, or the table closes
        self._in_collective = threading.Lock()

    def engines(self) -> list[tuple[int, Ranks, Engine]]:
        """Return number, members and engine of each set used by this process, the world first.

        Groups of torch.distributed are included. The number is the same on all members.
        """
        return [
            (record.number, record.ranks, record.running)
            for record in (*self.records, *self._groups)
            if record.running is not None
        ]

    def find(self, ranks: Ranks) -> ProcessSetRecord | None:
        """Return the set of these ranks, if it exists; set 0 only if no other set has all ranks."""
        return self._by_ranks.get(ranks)

    def add(self, ranks: Ranks, *, keeps: bool = False) -> ProcessSetRecord:
        """Make a set. Cost: one allgather of two numbers a rank.

        Args:
            ranks: the members, ascending.
            keeps: whether it is made again from the previous world. Then it may have all ranks, and
                a later `add` of the same ranks returns it.

        Raises:
            InvalidArgumentError: on all ranks: the set exists already, or a rank does not exist.
            MismatchError: on all ranks: not all of them add this set.
            RingError: on all ranks: a member has no memory for it; says why.
        """
        engine = self.everyone.engine()
        with (
            self._in_collective,
            EngineExchange(engine) as exchange,
            contextlib.ExitStack() as cleanup,
        ):
            if len(ranks) > 1:  # a set of one rank never waits on a device
                self._connections.launch_order.share()  # before the ranks agree
            slot, failure = self._reserve_slot(ranks, cleanup)
            slots = self._agree(exchange, f"add_process_set({list(ranks)})", slot)
            if _FAILED in slots:
                failures = exchange.texts(failure)
                broken = slots.index(_FAILED)
                raise RingError(f"rank {broken} could not join the process set: {failures[broken]}")
            require_below(ranks, self._size)
            there = self._by_ranks.get(ranks)
            if there is not None and there.is_kept:
                there.is_kept = False
                return there
            if there is not None and not (keeps and there is self.everyone):
                raise InvalidArgumentError(f"there is a process set of the ranks {list(ranks)}")
            with self._changing:
                if self._closed:
                    raise NotInitializedError
                ids = {record.id for record in self.records}
                self._numbers += 1
                record = ProcessSetRecord(
                    next(number for number in range(1, len(ids) + 1) if number not in ids),
                    ranks,
                    self._connections,
                    replace(self._config, words=PROCESS_SET),
                    number=self._numbers,
                    slots=[slots[rank] for rank in ranks],
                )
                record.is_kept = keeps
                self._keep([*self.records, record])
            cleanup.pop_all()
        for callback in self.on_change:
            callback()
        return record

    def remove(self, ranks: Ranks) -> bool:
        """End a set and fail its operations in flight. Return whether it existed; set 0 stays.

        Raises:
            MismatchError: on all ranks: not all of them remove this set.
        """
        engine = self.everyone.engine()
        with self._in_collective, EngineExchange(engine) as exchange:
            self._agree(exchange, f"remove_process_set({list(ranks)})", _NO_SLOT)
            with self._changing:
                record = self._by_ranks.get(ranks)
                if record is None or record.id == 0:
                    return False
                self._keep(other for other in self.records if other is not record)
            record.shutdown(removed=True)
            exchange.numbers(0)  # now no member reads or writes its memory any more
            record.release_slot()
        for callback in self.on_change:
            callback()
        return True

    def reserve_slot(self, ranks: Ranks) -> int:
        """Return the offset of this rank's memory for a group of `ranks`, or -1: it needs none.

        Raises:
            RingError: there is no more memory.
        """
        slot, failure = self._reserve_slot(ranks, contextlib.ExitStack())
        if slot == _FAILED:
            raise RingError(failure)
        return slot

    def add_group(
        self, ranks: Ranks, number: int, slots: list[int], config: Config
    ) -> ProcessSetRecord:
        """Return a set that only its members make: a group of torch.distributed. No collective.

        Args:
            ranks: the members, ascending.
            number: the set's number, the same on all members, and never reused in this world.
            slots: for each member, the result of its `reserve_slot`.
            config: the set's settings.
        """
        if len(ranks) > 1:
            self._connections.launch_order.share()
        record = ProcessSetRecord(-1, ranks, self._connections, config, number=number, slots=slots)
        with self._changing:
            if self._closed:
                raise NotInitializedError
            self._groups.append(record)
        return record

    def leave_group(self, record: ProcessSetRecord, why: str) -> None:
        """Leave a set of `add_group`. Other members may use its memory until it `has_ended`.

        Args:
            record: the set.
            why: the reason for the other members; "": none.
        """
        with self._changing:
            if record in self._groups:
                self._groups.remove(record)
        record.shutdown(why)

    def leave_unused_group(self, number: int, size: int, why: str) -> None:
        """Tell the other members of a group of `size` ranks that this one does not use it."""
        if self._connections.plane is not None:
            self._connections.plane.leave_unused(number, size, why)

    def has_ended(self, number: int) -> bool:
        """Return whether all members have left a group, as far as this rank knows.

        Call it only for a group that this rank has left.
        """
        plane = self._connections.plane
        return plane is not None and plane.has_ended(number)

    def release_slot(self, slot: int) -> None:
        """Free a slot of `reserve_slot`, when no member uses it any more."""
        if slot >= 0 and self._connections.memory is not None:
            self._connections.memory.release_slot(slot)

    def close(self, why: str = "") -> None:
        """Shut down the engines of all sets, the world's last, and leave.

        Args:
            why: the reason for the other ranks, if the program has failed.
        """
        with self._changing:
            self._closed = True
            records = [*self._groups, *self.records]
            self._groups.clear()
            self._keep([])
        with contextlib.ExitStack() as cleanup:  # runs completely, even after Ctrl-C
            cleanup.callback(self._connections.close, why)
            for record in records:
                cleanup.callback(record.shutdown, why)

    def lost_ranks(self) -> list[int]:
        """Return the ranks of the world that have died or were silent for too long."""
        plane = self._connections.plane
        return [] if plane is None else plane.lost()

    def data_connections(self) -> int:
        """Return the number of data connections that this rank has made or accepted."""
        plane = self._connections.plane
        return 0 if plane is None else plane.connections()

    def shared_bytes(self) -> int:
        """Return the bytes in use of this rank's part of its host's shared memory."""
        memory = self._connections.memory
        return 0 if memory is None else memory.used_bytes()

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks, by rank. All ranks call it.

        Raises:
            MismatchError: on all ranks: not all of them call it.
        """
        with self._in_collective, EngineExchange(self.everyone.engine()) as exchange:
            return exchange.texts(text)

    def be_brief(self) -> None:
        """Make close() wait only briefly for peers to hear its goodbye: the world has failed."""
        self._connections.farewell_s = _BRIEF_S

    def abandon(self) -> None:
        """Abandon the parent's engines in a forked child; the records can still be read."""
        self._changing = threading.RLock()  # the child lacks the parent's thread that held it
        for record in (*self._groups, *self.records):
            record.abandon()

    def _keep(self, records: Iterable[ProcessSetRecord]) -> None:
        """Make `records` the sets. Readers take no lock, so nothing changes in place."""
        self.records = tuple(sorted(records, key=lambda record: record.id))
        self._by_ranks = {record.ranks: record for record in self.records}

    def _reserve_slot(self, ranks: Ranks, cleanup: contextlib.ExitStack) -> tuple[int, str]:
        """Return the offset of a new slot of this rank's memory, or the reason of a failure.

        If several members share a host, every member needs a slot. `cleanup` releases it.
        """
        memory, rank = self._connections.memory, self._connections.rank
        members = [member for member in ranks if member < self._size]
        on_hosts = {self._connections.host_of[member] for member in members}
        if memory is None or rank not in ranks or len(on_hosts) == len(members):
            return _NO_SLOT, ""
        try:
            slot = memory.reserve_slot()
        except RingError as error:
            return _FAILED, str(error)
        cleanup.callback(memory.release_slot, slot)
        return slot, ""

    def _agree(self, exchange: EngineExchange, request: str, slot: int) -> list[int]:
        """Check that all ranks make the same request; return their slots."""
        hashed = hashlib.sha256(request.encode()).digest()
        digest = int.from_bytes(hashed[:8], "little", signed=True)
        gathered = exchange.numbers(digest, slot)
        if any(other != digest for other, _ in gathered):
            requests = exchange.texts(request)
            rank = next(r for r, other in enumerate(requests) if other != requests[0])
            raise MismatchError(
                "all ranks must add and remove the same process sets in the same order: rank 0: "
                f"{requests[0]}; rank {rank}: {requests[rank]}"
            )
        return [slot for _, slot in gathered]
