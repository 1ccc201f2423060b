"""The process sets of a world: their ids, and their engines.

Every set has an engine of its own, with its own connections, threads and watchdog, so that
operations of one set never wait for those of another.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torch_ring import _C
from torch_ring.config import Config
from torch_ring.engines import make_engine, wait_for_all
from torch_ring.errors import (
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
)
from torch_ring.launchers import Identity
from torch_ring.meeting import Deadline
from torch_ring.mesh import Mesh, connect
from torch_ring.ranks import Ranks, require_below
from torch_ring.rendezvous import Rendezvous
from torch_ring.set_meeting import SetMeeting

__all__ = ["Entry", "Registry"]


@dataclass(frozen=True)
class Entry:
    """A process set; `engine` is None in a process that is no member."""

    id: int
    ranks: Ranks
    engine: _C.Engine | None


class Registry:
    """The process sets of a world. Set 0 has all ranks, and is always there.

    `add` and `remove` are collectives of all ranks; a thread at a time is in one of them. The
    other methods do not block.

    Args:
        identity: this process in the world.
        config: the world's settings.
        rendezvous: how the world was joined; None in a world of one.
        engine: the world's.
        labels: what to call the ranks.

    Attributes:
        everyone: set 0.
    """

    def __init__(
        self,
        identity: Identity,
        config: Config,
        rendezvous: Rendezvous | None,
        engine: _C.Engine,
        labels: Sequence[str],
    ) -> None:
        self._identity = identity
        self._config = config
        self._rendezvous = rendezvous
        self._engine = engine
        self._labels = labels
        self.everyone = Entry(0, tuple(range(identity.size)), engine)
        self._entries = {self.everyone.ranks: self.everyone}
        self._closed = False
        self._changing = threading.RLock()  # the entries, and whether it is closed
        self._in_collective = threading.Lock()

    def find(self, ranks: Ranks) -> Entry | None:
        """Return the set of these ranks, if there is one."""
        return self._entries.get(ranks)

    def entries(self) -> list[Entry]:
        """Return all sets, by id."""
        with self._changing:
            return sorted(self._entries.values(), key=lambda entry: entry.id)

    def add(self, ranks: Ranks) -> Entry:
        """Make a set.

        Raises:
            InvalidArgumentError: on all ranks: there is such a set, or there is no such rank.
            MismatchError: on all ranks: they do not all add this set.
            RingError: on all ranks: a member could not connect; says why.
        """
        with self._in_collective:
            meeting = self._agree("add_process_set", ranks)
            require_below(ranks, self._identity.size)
            if ranks in self._entries:
                raise InvalidArgumentError(f"there is a process set of the ranks {list(ranks)}")
            engine = self._join(ranks, meeting)
            with self._changing:
                if not self._closed:
                    ids = {entry.id for entry in self._entries.values()}
                    free = next(number for number in range(1, len(ids) + 1) if number not in ids)
                    self._entries[ranks] = Entry(free, ranks, engine)
                    return self._entries[ranks]
            if engine is not None:
                engine.shutdown()
            raise NotInitializedError

    def remove(self, ranks: Ranks) -> bool:
        """End a set, and what is in flight in it. Return whether there was one; set 0 stays.

        Raises:
            MismatchError: on all ranks: they do not all remove this set.
        """
        with self._in_collective:
            self._agree("remove_process_set", ranks)
            with self._changing:
                entry = self._entries.get(ranks)
                if entry is None or entry.id == 0:
                    return False
                del self._entries[ranks]
            if entry.engine is not None:
                entry.engine.shutdown()
            return True

    def close(self) -> None:
        """Shut down the engines of all sets, the world's last."""
        with self._changing:
            self._closed = True
            entries = sorted(self._entries.values(), key=lambda entry: -entry.id)
            self._entries.clear()
        for entry in entries:
            if entry.engine is not None:
                entry.engine.shutdown()

    def abandon(self) -> None:
        """In a forked child, let go of what is the parent's; the entries can still be read."""
        self._changing = threading.RLock()  # who held the other is not in this process
        self._rendezvous = None
        for entry in self._entries.values():
            if entry.engine is not None:
                entry.engine.abandon()

    def _agree(self, what: str, ranks: Ranks) -> SetMeeting:
        """Return a meeting of ranks that all call the same function for the same set."""
        identity = self._identity
        everyone = range(identity.size)
        deadline = Deadline(self._config.init_timeout_s)
        request = f"{what}({list(ranks)})"
        requests = SetMeeting(self._engine, identity.rank, everyone, deadline).gather("", request)
        for rank, other in enumerate(requests):
            if other != requests[0]:
                raise MismatchError(
                    f"all ranks must add and remove the same process sets in the same order: rank "
                    f"0: {requests[0]}; rank {rank}: {other}"
                )
        deadline = Deadline(self._config.init_timeout_s)  # waiting for the others does not count
        return SetMeeting(self._engine, identity.rank, ranks, deadline)

    def _join(self, ranks: Ranks, meeting: SetMeeting) -> _C.Engine | None:
        """Return a running engine, or None in a process that only helps the members to meet."""
        engine = None
        with contextlib.ExitStack() as cleanup:
            try:
                if self._identity.rank in ranks:
                    engine = self._start_engine(ranks, meeting)
                    cleanup.callback(engine.shutdown)
                else:
                    _sit_through_connect(meeting)
                meeting.gather("started", "")
            except PeerLostError as error:
                raise _tell(meeting, meeting.explain(error)) from None
            except BaseException as error:
                _tell(meeting, error)
                raise
            cleanup.pop_all()
        return engine

    def _start_engine(self, ranks: Ranks, meeting: SetMeeting) -> _C.Engine:
        labels = [self._labels[rank] for rank in ranks]
        if len(ranks) == 1 or self._rendezvous is None:
            _sit_through_connect(meeting)
            return make_engine(0, Mesh(labels=labels), self._config)
        identity = self._identity.among(ranks)
        with contextlib.closing(
            connect(identity, self._config, self._rendezvous, meeting, labels=labels)
        ) as mesh:
            engine = make_engine(identity.rank, mesh, self._config)
        try:
            wait_for_all(engine, meeting.deadline)
        except BaseException:
            engine.shutdown()
            raise
        return engine


def _sit_through_connect(meeting: SetMeeting) -> None:
    """Gather as often as connect() does."""
    meeting.gather("cards", "")
    meeting.gather("connected", "")


def _tell(meeting: SetMeeting, cause: BaseException) -> BaseException:
    """Return `cause` when all ranks know; not kept in a frame that it would keep alive."""
    meeting.fail(cause)
    return cause
