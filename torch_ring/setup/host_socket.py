# SPDX-License-Identifier: Apache-2.0
"""HostLeader, meet_on_host: the ranks of a host find one another by the name of a Unix socket.

The rank that binds the name leads; the others connect and send it their values. A leader handles
the failure or the end of a rank before it accepts another connection, so that a rank which tries
again never joins the failed world.

Two jobs may have the same name. Ranks that the leader's own parent has started are let in at once;
others wait (`HostLeader`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

from torch_ring.errors import RingError, TimeoutError
from torch_ring.setup.claim import is_awaited, starter
from torch_ring.setup.failure import (
    Failure,
    gone,
    missing_ranks,
    name_ranks,
    other_size,
    other_version,
    two_of_a_rank,
)
from torch_ring.setup.frames import Frame, FrameSocket, Kind
from torch_ring.setup.host_door import Door
from torch_ring.setup.host_follower import (
    HELLO,
    SLICE_S,
    TELL_S,
    HostFollower,
    Watch,
    connect,
    leader_name,
)
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import Deadline, ForeignUserError, listen_unix, require_same_user
from torch_ring.setup.socket_name import advice_on_missing

__all__ = ["HostLeader", "meet_on_host"]

_log = logging.getLogger("torch_ring")

_JUDGE_EVERY_S = 0.05  # between two checks for processes that are still starting
_QUIET_S = 0.5  # after it no more ranks are expected, if their number is unknown


class HostLeader:
    """The exchange of the rank to which others of its host are connected; see `exchange`.

    A job that begins at the same time may have the same name. Ranks that another process has
    started wait while any rank of these starts is on its way: if the ranks of this start become
    complete, they are a job, and the others are another. If nobody is on its way any more, all are
    ranks of one job, started in several terminals.

    Thread: one at a time. Blocking: `gather` and `broadcast`, until the deadline; others for the
    given time.

    Args:
        listener: the socket at which the others find this rank; None: there is none.
        identity: this process.
        deadline: the deadline of init().
        watch: called while it waits.
        grace: when to go on without late ranks, which may come by the store; None: they may not.
        start: the process that has started this one; empty: no other job can have the name.

    Attributes:
        above: the leader of this machine, if that is another rank, whose group came first.
        followers: connections to the ranks that were let in, by rank.
        values: the values that they have sent, by rank.
        failure: the failure of this init(), if any; all connected ranks know it.
        notified: ranks that know of the failure.
        lost: ranks that have ended: they need not be notified.
        newest: the time when the last rank was let in.
        expected: the number of ranks that meet here, if it is known.
    """

    def __init__(
        self,
        listener: socket.socket | None,
        identity: Identity,
        deadline: Deadline,
        watch: Watch,
        grace: Deadline | None,
        start: str,
    ) -> None:
        self.above: HostFollower | None = None
        self.followers: dict[int, FrameSocket] = {}
        self.values: dict[int, bytes] = {}
        self.failure: Failure | None = None
        self.notified: set[int] = set()
        self.lost: set[int] = set()
        self.newest = time.monotonic()
        self.expected = identity.size if grace is None else identity.local_size
        self._identity, self._start = identity, start
        self._rank, self._size = identity.rank, identity.size
        self._deadline, self._grace, self._watch = deadline, grace, watch
        self._waiting: dict[FrameSocket, tuple[int, int]] = {}  # of other starts: rank, size
        self._judged_at = 0.0
        self._selector = selectors.PollSelector()
        self._door = Door(self._selector, self._rank)
        if listener is not None:
            self.open(listener)

    def gather(self, value: Any) -> dict[int, Any]:
        """Return the values of the ranks of this host that arrive in time, by rank.

        Raises:
            TimeoutError: a rank has not arrived before the deadline, and cannot come by the store;
                names it.
            RingError: another rank has failed; says why.
        """
        self.values[self._rank] = json.dumps(value).encode()
        expected, grace = self.expected, self._grace or self._deadline
        gives_up: object = None
        while len(self.values) < (expected or self._size):
            is_quiet = expected is None and time.monotonic() > self.newest + _QUIET_S
            if grace.passed() or is_quiet or (self._grace is not None and gives_up):
                break
            gives_up = self._watch(min(SLICE_S, grace.left_s(), _QUIET_S))
        if self._grace is not None:
            self.close_door()  # a late rank leads a group of its own
        # Wait for the value of each rank that was let in: it first makes its memory and listeners.
        while not self.followers.keys() <= self.values.keys() and not self._deadline.passed():
            self._watch(min(SLICE_S, self._deadline.left_s()))
        late = self.followers.keys() - self.values.keys()
        if late or (self._grace is None and len(self.values) < self._size):
            here, advice = set(range(self._size)) - late, ""
            if self._grace is None:
                here, advice = set(self.values), advice_on_missing(self._identity)
            advice = " ".join(filter(None, (self._others_waiting(), advice)))
            raise missing_ranks(here, self._size, self._deadline, advice)
        try:
            return {rank: json.loads(data) for rank, data in self.values.items()}
        except (ValueError, RecursionError) as error:
            raise other_version("a rank", error) from None

    def broadcast(self, data: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Pass bytes and descriptors to all ranks of this machine, which this rank leads.

        Raises:
            PeerLostError: a rank of this host has exited.
        """
        for rank, follower in self.followers.items():
            try:
                follower.send(Kind.DATA, self._deadline, data, fds)
            except OSError as error:
                raise gone(f"rank {rank}", error) from None

    def receive(self) -> Frame:
        """Return the broadcast of the leader above, after passing it on.

        Raises:
            PeerLostError: a rank of this host has exited.
            RingError: another rank has failed; says why.
        """
        assert self.above is not None
        frame = self.above.receive()
        try:
            self.broadcast(frame.payload, frame.fds)
        except BaseException:
            for fd in frame.fds:
                os.close(fd)
            raise
        return frame

    def follow(self, name: str, leader: int) -> None:
        """Connect to the rank `leader`, which leads this machine and listens at `name`.

        Raises:
            ConnectionRefusedError: no process listens there.
            ForeignUserError: the listener is a process of another user.
            PeerLostError: the leader is gone.
            TimeoutError: the leader has not answered before the deadline.
            RingError: this init() has failed on another rank.
        """
        deadline = self._deadline
        while self.above is None:
            if deadline.passed():
                raise TimeoutError(f"{leader_name(leader)} has not answered {deadline}")
            try:
                self.above = connect(name, self._identity, deadline, deadline, self._watch)
            except BlockingIOError:  # its backlog is full
                time.sleep(_PAUSE_S)
            except (RingError, ConnectionRefusedError, ForeignUserError):
                raise
            except (OSError, EOFError, ValueError) as error:
                raise gone(leader_name(leader), error) from None

    def poll(self, wait_s: float) -> None:
        """Handle what has arrived; wait for it if there is nothing. Raises another's failure."""
        if self.above is not None:
            self.above.pump(wait_s)
            wait_s = 0.0
        self.pump(wait_s)
        for each in (self.above, self):
            if each is not None and each.failure is not None:
                raise each.failure.error()

    def ask_to_serve(self) -> None:
        """Ask the first rank of this host to serve the store, if that is its task.

        Raises:
            PeerLostError: that rank is gone.
        """
        first = min(self.followers, default=self._rank)
        if first < self._rank:
            try:
                self.followers[first].send(Kind.SERVE, self._deadline)
            except OSError as error:
                raise gone(f"rank {first}", error) from None

    def open(self, listener: socket.socket) -> None:
        """Let ranks in at `listener`, which the leader owns from now on."""
        self._door.open(listener)

    def close_door(self) -> None:
        """Stop accepting ranks; those that are not in yet find another leader."""
        self._door.close()
        for each in [*self._waiting]:
            self._drop(each)

    def _others_waiting(self) -> str:
        """Return a sentence on the ranks of other starts that wait here; empty: there are none."""
        if not self._waiting:
            return ""
        ranks = name_ranks(sorted(rank for rank, _ in self._waiting.values()))
        return (
            f"Processes that another one has started wait here, too ({ranks}): another job has the "
            "same MASTER_ADDR and MASTER_PORT, or a rank of this one is still on its way."
        )

    def pump(self, wait_s: float) -> None:
        """Handle what has arrived; wait for it if there is nothing. May set `failure`."""
        if not self._selector.get_map():
            time.sleep(wait_s)
            return
        if self._waiting:
            wait_s = min(wait_s, _JUDGE_EVERY_S)
        ready = [key.fileobj for key, _ in self._selector.select(wait_s)]
        for connection in ready:
            if isinstance(connection, FrameSocket):
                self._receive(connection)
        self._door.accept(ready)
        if self._waiting:
            self._judge_waiting()

    def note(self, line: str) -> None:
        """Log a line on rank 0, if that is on this host."""
        if self._rank == 0:
            _log.info("%s", line)
        elif 0 in self.followers:
            with contextlib.suppress(OSError):
                self.followers[0].send(Kind.NOTE, Deadline(TELL_S), line.encode())

    def fail(self, failure: Failure, teller: FrameSocket | None = None) -> None:
        """Report a failure to all connected ranks but `teller`, once; the first failure counts."""
        if self.failure is not None:
            return
        self.failure = failure
        if self.above is not None:
            self.above.fail(failure)
        self.notified = {self._rank, *self.followers}
        deadline = Deadline(TELL_S)
        for follower in self.followers.values():
            if follower is not teller:
                with contextlib.suppress(OSError):
                    follower.send(Kind.FAILURE, deadline, failure.to_bytes())

    def linger(self, expected: int) -> bool:
        """Wait a moment for late ranks, to tell them of the failure.

        Args:
            expected: the number of ranks that can come.

        Returns:
            Whether `expected` ranks know of it, or have ended.
        """
        patience = Deadline(TELL_S)
        while self._door.is_open and self._reached() < expected and not patience.passed():
            with contextlib.suppress(OSError):  # a lack of descriptors is known already
                self.pump(min(0.1, patience.left_s()))
        self.close_door()
        return self._reached() >= expected

    def _reached(self) -> int:
        return len(self.notified | self.lost)

    def close(self) -> None:
        """Close all connections after a goodbye."""
        self.close_door()
        deadline = Deadline(TELL_S)
        for follower in self.followers.values():
            with contextlib.suppress(OSError):
                follower.send(Kind.BYE, deadline)
            follower.close()
        self.followers.clear()
        self._selector.close()
        if self.above is not None:
            self.above.close()

    # --- arriving frames

    def _receive(self, connection: FrameSocket) -> None:
        rank = next((r for r, follower in self.followers.items() if follower is connection), None)
        try:
            for frame in connection.receive():
                if rank is None:
                    rank = self._meet(connection, frame)
                    if rank is None:
                        return
                else:
                    self._take(rank, connection, frame)
        except (OSError, EOFError, ValueError) as error:
            if rank is None:
                _log.debug("rank %d dropped a connection: %s", self._rank, error)
                self._drop(connection)
            elif rank in self.followers:
                self._drop(connection)
                self.lost.add(rank)
                self.fail(Failure.of_all(gone(f"rank {rank}", error)))

    def _meet(self, stranger: FrameSocket, frame: Frame) -> int | None:
        """Handle the first frame of a connection, a hello; return its rank if it is let in."""
        is_hello = frame.kind == Kind.HELLO and len(frame.payload) == HELLO.size
        if not is_hello or stranger in self._waiting:
            raise ValueError(f"{frame.kind.name} is no hello")
        rank, size = HELLO.unpack(frame.payload)
        if rank >= size:
            raise ValueError(f"rank {rank} is not below {size}")
        pid = require_same_user(stranger.socket)
        if self._start in ("", starter(self._identity.launcher, pid)):
            return self._let_in(stranger, rank, size)
        self._door.forget(stranger)
        self._waiting[stranger] = rank, size
        return None

    def _judge_waiting(self) -> None:
        """Let ranks of other starts in when no rank of these starts is on its way any more."""
        now = time.monotonic()
        is_complete = len(self.followers) + 1 == self.expected
        if is_complete or now < self._judged_at + _JUDGE_EVERY_S:
            return
        self._judged_at = now
        connected = [*self.followers.values(), *self._waiting]
        here = {os.getpid(), *(require_same_user(each.socket) for each in connected)}
        if not is_awaited(here, self._identity.launcher):
            for stranger, (rank, size) in list(self._waiting.items()):
                self._let_in(stranger, rank, size)

    def _let_in(self, stranger: FrameSocket, rank: int, size: int) -> int | None:
        """Let a rank in, or refuse it; return it if it is let in."""
        is_news = self.failure is None  # whether a refusal here is the first failure
        if size != self._size:
            self.fail(Failure.of_all(other_size(rank, size, self._size)))
        elif rank == self._rank or rank in self.followers:
            self.fail(Failure.of_all(two_of_a_rank(rank, size)))
        if self.failure is not None:
            # A rank that knows of the failure already wants to join its next world: no new notice.
            if is_news or rank not in self.notified:
                with contextlib.suppress(OSError):
                    stranger.send(Kind.FAILURE, self._deadline, self.failure.to_bytes())
            if not is_news:
                self.notified.add(rank)
            self._drop(stranger)
            return None
        self._door.forget(stranger)
        self._waiting.pop(stranger, None)
        self.followers[rank] = stranger
        self.newest = time.monotonic()
        with contextlib.suppress(OSError):  # it is gone: its last frames may have the reason
            stranger.send(Kind.WELCOME, self._deadline, HELLO.pack(self._rank, self._size))
        return int(rank)

    def _take(self, rank: int, connection: FrameSocket, frame: Frame) -> None:
        if frame.kind == Kind.VALUE and rank not in self.values:
            self.values[rank] = frame.payload
        elif frame.kind == Kind.FAILURE:
            self.fail(Failure.from_bytes(frame.payload), connection)
        elif frame.kind == Kind.BYE:
            self._drop(connection)
        else:
            raise ValueError(f"it has sent a {frame.kind.name}")

    def _drop(self, connection: FrameSocket) -> None:
        self._waiting.pop(connection, None)
        for rank in [r for r, follower in self.followers.items() if follower is connection]:
            del self.followers[rank]
        self._door.drop(connection)


_PAUSE_S = 0.005  # between two attempts to find the leader
_GRACE_S = 2.0  # seconds after which a leader goes to the store without the ranks that are late


def meet_on_host(
    name: str | None,
    start: str,
    identity: Identity,
    deadline: Deadline,
    watch: Watch,
    *,
    has_store: bool,
) -> HostLeader | HostFollower:
    """Find the other ranks of this host, or be the first.

    Args:
        name: the socket's name; None: there is none, and the rank leads itself.
        start: the process that has started this one; empty: no other job can have the name.
        identity: this process.
        deadline: the deadline of init().
        watch: called during all waits for other ranks.
        has_store: whether ranks that do not meet here meet in a store.

    Raises:
        TimeoutError: the holder of the name has not let this rank in before the deadline.
        RingError: this init() has failed on another rank; or a process of another user has the
            name, and this rank cannot go on without a leader.
    """
    grace = Deadline(min(_GRACE_S, deadline.left_s() / 2)) if has_store else None
    until, rank = grace or deadline, identity.rank

    def leader(listener: socket.socket | None) -> HostLeader:
        return HostLeader(listener, identity, deadline, watch, grace, start)

    if name is None:
        return leader(None)
    while True:
        try:
            return leader(listen_unix(name))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        try:
            follower = connect(name, identity, deadline, until, watch)
            if follower is not None:
                return follower
        except RingError:
            raise  # this init() has failed
        except ForeignUserError as error:
            taken = (
                "the name of the socket at which the ranks of this host meet is in use by a "
                f"process of user {error.user}"
            )
            if not has_store:
                raise RingError(
                    f"{taken}: end it, or start the job with another MASTER_PORT"
                ) from None
            _log.warning("%s: rank %d goes on without the others of its host", taken, rank)
            return leader(None)
        except (OSError, EOFError, ValueError) as error:  # the leader is just starting or leaving
            _log.debug("rank %d found no leader: %s", rank, error)
        if deadline.passed():
            raise TimeoutError(
                f"the ranks of this host could not meet {deadline}: the process that has their "
                "socket's name does not answer, or it waits for ranks that another process has "
                "started: is another job starting with the same MASTER_ADDR and MASTER_PORT?"
            )
        if until.passed():
            return leader(None)
        time.sleep(_PAUSE_S)
