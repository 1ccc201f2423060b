# SPDX-License-Identifier: Apache-2.0
"""HostLeader, meet_on_host: the ranks of a host find one another by the name of a Unix socket.

The rank that binds the name leads; the others connect and send it their values. A leader handles
the failure or the end of a rank before it accepts another connection, so that a rank which tries
again never joins the failed world.
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
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch_ring.errors import RingError, TimeoutError
from torch_ring.setup.failure import (
    Failure,
    gone,
    missing_ranks,
    other_size,
    other_version,
    two_of_a_rank,
)
from torch_ring.setup.frames import Frame, FrameSocket, Kind
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

__all__ = ["HostLeader", "Missed", "meet_on_host"]

_log = logging.getLogger("torch_ring")

Missed = Callable[[Collection[int]], Collection[int]]
"""Given the ranks that a leader has met, returns ranks that have exited, if it finds any."""

_QUIET_S = 0.5  # after it no more ranks are expected, if their number is unknown


class HostLeader:
    """The exchange of the rank to which others of its host are connected; see `exchange`.

    Thread: one at a time. Blocking: `gather` and `broadcast`, until the deadline; others for the
    given time.

    Args:
        listener: the socket at which the others find this rank; None: there is none.
        identity: this process.
        deadline: the deadline of init().
        watch: called while it waits.
        grace: when to go on without late ranks, which may come by the store; None: they may not.

    Attributes:
        above: the leader of this machine, if that is another rank, whose group came first.
        followers: connections to the ranks that were let in, by rank.
        values: the values that they have sent, by rank.
        failure: the failure of this init(), if any; all connected ranks know it.
        notified: ranks that know of the failure.
        lost: ranks that have ended: they need not be notified.
    """

    def __init__(
        self,
        listener: socket.socket | None,
        identity: Identity,
        deadline: Deadline,
        watch: Watch,
        grace: Deadline | None,
    ) -> None:
        self.above: HostFollower | None = None
        self.followers: dict[int, FrameSocket] = {}
        self.values: dict[int, bytes] = {}
        self.failure: Failure | None = None
        self.notified: set[int] = set()
        self.lost: set[int] = set()
        self._identity, self._deadline, self._grace, self._watch = identity, deadline, grace, watch
        # The data of a connection is its rank; None: it has not sent its hello yet.
        self._selector = selectors.PollSelector()
        self._listener: socket.socket | None = None
        if listener is not None:
            self.open(listener)

    def open(self, listener: socket.socket) -> None:
        """Let ranks in at `listener`, which the leader owns from now on."""
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)

    def close_door(self) -> None:
        """Stop accepting ranks; those that are not in yet find another leader."""
        self._listener = None
        for key in [*self._selector.get_map().values()]:
            if key.data is None:
                self._drop(key.fileobj)

    def gather(self, value: Any) -> dict[int, Any]:
        """Return the values of the ranks of this host that arrive in time, by rank.

        Raises:
            TimeoutError: a rank has not arrived before the deadline, and cannot come by the store;
                names it.
            RingError: another rank has failed; says why.
        """
        size, has_store = self._identity.size, self._grace is not None
        self.values[self._identity.rank] = json.dumps(value).encode()
        expected = self._identity.local_size if has_store else size
        grace, quiet, met = self._grace or self._deadline, Deadline(_QUIET_S), 0
        gives_up: object = None
        while len(self.values) < (expected or size):
            if len(self.followers) > met:
                quiet, met = Deadline(_QUIET_S), len(self.followers)
            is_quiet = expected is None and quiet.passed()
            if grace.passed() or is_quiet or (has_store and gives_up):
                break
            gives_up = self._watch(min(SLICE_S, grace.left_s(), _QUIET_S))
        if has_store:
            self.close_door()  # a late rank leads a group of its own
        # Wait for the value of each rank that was let in: it first makes its memory and listeners.
        while not self.followers.keys() <= self.values.keys() and not self._deadline.passed():
            self._watch(min(SLICE_S, self._deadline.left_s()))
        awaited, advice = {*self.followers}, ""
        if not has_store:
            awaited, advice = set(range(size)), advice_on_missing(self._identity)
        if missing := awaited - self.values.keys():
            here = set(range(size)) - missing
            raise missing_ranks(here, size, self._deadline, advice)
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
        first = min(self.followers, default=self._identity.rank)
        if first < self._identity.rank:
            try:
                self.followers[first].send(Kind.SERVE, self._deadline)
            except OSError as error:
                raise gone(f"rank {first}", error) from None

    def pump(self, wait_s: float) -> None:
        """Handle what has arrived; wait for it if there is nothing. May set `failure`."""
        ready = [key for key, _ in self._selector.select(wait_s)]
        for key in ready:
            if isinstance(key.fileobj, FrameSocket):
                self._receive(key.fileobj, key.data)
        if self._listener in [key.fileobj for key in ready]:
            self._accept()

    def note(self, line: str) -> None:
        """Log a line on rank 0, if that is on this host."""
        if self._identity.rank == 0:
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
        self.notified = {self._identity.rank, *self.followers}
        deadline = Deadline(TELL_S)
        for follower in self.followers.values():
            if follower is not teller:
                with contextlib.suppress(OSError):
                    follower.send(Kind.FAILURE, deadline, failure.to_bytes())

    def linger(self, expected: int, missed: Missed) -> bool:
        """Wait a moment for late ranks, to tell them of the failure.

        Args:
            expected: the number of ranks that can come.
            missed: asked again and again.

        Returns:
            Whether `expected` ranks know of it, or have ended.
        """
        patience = Deadline(TELL_S)
        while (
            self._listener and len(self.notified | self.lost) < expected and not patience.passed()
        ):
            self.lost.update(missed(self.notified | self.lost))
            try:
                self.pump(min(0.1, patience.left_s()))
            except OSError:  # a lack of descriptors, which is known already
                break
        self.close_door()
        return len(self.notified | self.lost) >= expected

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

    # --- arriving connections and frames

    def _accept(self) -> None:
        """Accept one of the connections that wait. Raises OSError: descriptors are lacking."""
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # it has gone again
            return
        try:
            require_same_user(connection)
        except ForeignUserError:
            connection.close()
            return
        self._selector.register(FrameSocket(connection), selectors.EVENT_READ)

    def _receive(self, connection: FrameSocket, rank: int | None) -> None:
        try:
            for frame in connection.receive():
                if rank is None:
                    rank = self._let_in(connection, frame)
                    if rank is None:
                        return
                elif frame.kind == Kind.VALUE and rank not in self.values:
                    self.values[rank] = frame.payload
                elif frame.kind == Kind.FAILURE:
                    self.fail(Failure.from_bytes(frame.payload), connection)
                elif frame.kind == Kind.BYE:
                    del self.followers[rank]
                    self._drop(connection)
                    return
                else:
                    raise ValueError(f"it has sent a {frame.kind.name}")
        except (OSError, EOFError, ValueError) as error:
            self._drop(connection)
            if rank is None:
                _log.debug("rank %d dropped a connection: %s", self._identity.rank, error)
                return
            del self.followers[rank]
            self.lost.add(rank)
            self.fail(Failure.of_all(gone(f"rank {rank}", error)))

    def _let_in(self, stranger: FrameSocket, frame: Frame) -> int | None:
        """Handle the first frame of a connection, a hello; return its rank if it is let in."""
        if frame.kind != Kind.HELLO or len(frame.payload) != HELLO.size:
            raise ValueError(f"{frame.kind.name} is no hello")
        me, size = self._identity.rank, self._identity.size
        rank, its_size = HELLO.unpack(frame.payload)
        if rank >= its_size:
            raise ValueError(f"rank {rank} is not below {its_size}")
        is_news = self.failure is None  # whether a refusal here is the first failure
        if its_size != size:
            self.fail(Failure.of_all(other_size(rank, its_size, size)))
        elif rank == me or rank in self.followers:
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
        self._selector.modify(stranger, selectors.EVENT_READ, rank)
        self.followers[rank] = stranger
        with contextlib.suppress(OSError):  # it is gone: its last frames may have the reason
            stranger.send(Kind.WELCOME, self._deadline, HELLO.pack(me, size))
        return int(rank)

    def _drop(self, connection: Any) -> None:
        self._selector.unregister(connection)
        connection.close()


_PAUSE_S = 0.005  # between two attempts to find the leader
_GRACE_S = 2.0  # seconds after which a leader goes to the store without the ranks that are late


def meet_on_host(
    name: str | None,
    identity: Identity,
    deadline: Deadline,
    watch: Watch,
    *,
    has_store: bool,
) -> HostLeader | HostFollower:
    """Find the other ranks of this host, or be the first.

    Args:
        name: the socket's name; None: there is none, and the rank leads itself.
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
        return HostLeader(listener, identity, deadline, watch, grace)

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
                "socket's name does not answer"
            )
        if until.passed():
            return leader(None)
        time.sleep(_PAUSE_S)
