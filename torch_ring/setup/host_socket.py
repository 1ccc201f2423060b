"""HostLeader, HostFollower: the ranks of a host find one another by the name of a Unix socket.

The rank that binds the name leads; the others connect and send it their values. A leader handles
the failure or the end of a rank before it accepts another connection, so that a rank which tries
again never joins the failed world.

Two jobs may have the same name. Ranks that the leader's own parent has started are let in at once;
others wait (`HostLeader`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import resource
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed import DistError

from torch_ring.errors import RingError, TimeoutError
from torch_ring.setup.claim import is_awaited, is_stopped, starter
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
from torch_ring.setup.job_key import AuthenticatedStore
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import (
    Deadline,
    ForeignUserError,
    close_in_child,
    is_loopback_name,
    listen_unix,
    require_same_user,
)

__all__ = [
    "HELLO",
    "HostFollower",
    "HostLeader",
    "Watch",
    "connect",
    "meet_on_host",
    "socket_name",
    "socket_name_by_store",
]

_log = logging.getLogger("torch_ring")


def socket_name(identity: Identity, environment: Mapping[str, str] = os.environ) -> str:
    """Return the name, the same for all ranks of this start of the job on this host and node.

    Raises:
        RingError: this job cannot be told from others.
    """
    address = [environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
    if is_loopback_name(address[0]):
        address[0] = "localhost"
    job = identity.job or ("" if address[0] else _starter(identity))
    # Two nodes of torchrun may be on one host: each knows its own number of ranks.
    return _named(os.getuid(), identity.launcher, job, *address, identity.node, identity.part)


def advice_on_missing(identity: Identity, environment: Mapping[str, str] = os.environ) -> str:
    """Return the likely reason why ranks that meet at this name alone miss others; "": unknown."""
    address = environment.get("MASTER_ADDR", "")
    if is_loopback_name(address) and not identity.on_one_node():
        return (
            f"MASTER_ADDR={address} means that all ranks are on this host: if they are not, set it "
            "on all of them, also on rank 0, to an address of rank 0's host that the others reach. "
            + _one_user()
        )
    if identity.job:
        return ""
    return (
        "Ranks that different processes have started meet only if MASTER_ADDR and MASTER_PORT are "
        "set: to 127.0.0.1 and a free port, if all of them are on this host. " + _one_user()
    )


def socket_name_by_store(store: AuthenticatedStore) -> str | None:
    """Return the name that the ranks of a store agree on; None: the store cannot do that.

    Only the store itself identifies the ranks that use it. Cost: one operation a rank.
    """
    with contextlib.suppress(DistError, NotImplementedError):
        token = store.compare_set("socket", "", secrets.token_hex(16))
        return _named(os.getuid(), token.decode(errors="replace"))
    return None


def _one_user() -> str:
    return f"Only ranks of one user meet on a host: this one is user {os.getuid()}'s."


def _named(*parts: object) -> str:
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return f"\0torch_ring/{digest[:32]}"


def _starter(identity: Identity) -> str:
    if start := starter(identity.launcher, os.getpid()):
        return start
    raise RingError(
        f"cannot see the process that started this rank ({identity.source()}) in /proc: set "
        "MASTER_ADDR to 127.0.0.1 and MASTER_PORT to a free port, on all ranks of this host"
    )


HELLO = struct.Struct("!II")  # rank, size; in a welcome, the leader's


Watch = Callable[[float], object]
"""Handles the ranks' messages in all exchanges, waiting for some seconds; raises their failure.

Returns a reason not to wait for missing ranks, or None.
"""

_PATIENCE_S = 5.0  # seconds beyond the deadline in which failures travel
_SLICE_S = 1.0  # longest single wait; longer waits are made of several


class HostFollower:
    """The exchange of a rank that is connected to its leader; see `exchange`.

    Thread: one at a time. Blocking: all but `close`, until the deadline.

    Attributes:
        must_serve: whether this rank must serve the store, because other hosts need it.
        failure: the failure of this init(), if it has failed.
        left: whether the leader has said goodbye.
        leader: the leader's name in messages; its welcome has its rank.
        pid: the leader's process; 0: it is not visible from here.
    """

    def __init__(
        self, connection: FrameSocket, deadline: Deadline, watch: Watch, pid: int = 0
    ) -> None:
        self.connection = connection
        self.pid = pid
        self.leader = _leader()
        self.must_serve = False
        self.failure: Failure | None = None
        self.left = False
        self._deadline, self._watch = deadline, watch
        self._data: deque[Frame] = deque()  # broadcasts of the leader
        self._welcome = False

    def gather(self, value: Any) -> dict[int, Any]:
        """Send this rank's value to the leader; return an empty dictionary.

        Raises:
            PeerLostError: the leader is gone.
        """
        try:
            self.connection.send(Kind.VALUE, self._deadline, json.dumps(value).encode())
        except OSError as error:
            self.pump(0.0)  # the leader may have sent the reason
            raise gone(self.leader, error) from None
        return {}

    def receive(self) -> Frame:
        """Return the leader's `broadcast`; the descriptors are the caller's.

        Raises:
            PeerLostError: the leader is gone.
            TimeoutError: the leader has not answered in time.
            RingError: another rank has failed; says why.
        """
        # The leader knows the late ranks, and names them at its deadline, a moment after this one.
        patience = Deadline(self._deadline.left_s() + _PATIENCE_S)
        while not self._data:
            if self._deadline.passed() and is_stopped(self.pid):
                raise TimeoutError(
                    f"{self.leader} has not answered {self._deadline}: its process {self.pid} is "
                    "stopped (`kill -CONT` lets it go on)"
                )
            if patience.passed():
                raise TimeoutError(f"{self.leader} has not answered {self._deadline}")
            if self.left:
                raise gone(self.leader)
            self._watch(min(_SLICE_S, self._deadline.left_s() or patience.left_s()))
        return self._data.popleft()

    def poll(self, wait_s: float) -> None:
        """Handle what has arrived; wait for it if there is nothing. Raises another's failure."""
        self.pump(wait_s)
        if self.failure is not None:
            raise self.failure.error()

    def pump(self, wait_s: float) -> None:
        """Handle what has arrived; wait for it if there is nothing. May set `failure`."""
        if self.left or self.failure is not None:
            return
        try:
            for frame in self.connection.receive(wait_s):
                self._take(frame)
        except (OSError, EOFError, ValueError) as error:
            if self.failure is None and not self.left:
                self.failure = Failure.of_all(gone(self.leader, error))

    def wait_for_welcome(self, until: Deadline) -> bool:
        """Return whether the leader has let this rank in before `until`.

        Raises:
            RingError: this init() has failed.
            EOFError: the leader has closed its listener.
        """
        while not self._welcome and not until.passed():
            for frame in self.connection.receive(min(_SLICE_S, until.left_s())):
                self._take(frame)
            if self.failure is not None:
                raise self.failure.error()
        return self._welcome

    def fail(self, failure: Failure) -> None:
        """Report a failure to the leader, and so to all ranks, once."""
        if self.failure is None:
            self.failure = failure
            with contextlib.suppress(OSError):
                self.connection.send(Kind.FAILURE, Deadline(_TELL_S), failure.to_bytes())

    def close(self) -> None:
        """Close the connection after a goodbye to the leader."""
        with contextlib.suppress(OSError):
            self.connection.send(Kind.BYE, Deadline(_TELL_S))
        self.connection.close()
        while self._data:  # not received, because of a failure
            for fd in self._data.popleft().fds:
                os.close(fd)

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.WELCOME:
            if len(frame.payload) != HELLO.size:
                raise ValueError("it has sent a broken WELCOME")
            self.leader = _leader(HELLO.unpack(frame.payload)[0])
            self._welcome = True
        elif frame.kind == Kind.DATA:
            self._data.append(frame)
        elif frame.kind == Kind.SERVE:
            self.must_serve = True
        elif frame.kind == Kind.NOTE:
            _log.info("%s", frame.payload.decode(errors="replace"))
        elif frame.kind == Kind.FAILURE:
            self.failure = self.failure or Failure.from_bytes(frame.payload)
        elif frame.kind == Kind.BYE:
            self.left = True
        else:
            raise ValueError(f"it has sent a {frame.kind.name}")


def connect(
    name: str, identity: Identity, deadline: Deadline, until: Deadline, watch: Watch
) -> HostFollower | None:
    """Return a connection to the leader that has let this rank in; None: it did not in time."""
    connection = close_in_child(socket.socket(socket.AF_UNIX))
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(connection.close)
        connection.setblocking(False)
        connection.connect(name)
        pid = require_same_user(connection)
        follower = HostFollower(FrameSocket(connection), deadline, watch, pid)
        cleanup.callback(follower.close)
        hello = HELLO.pack(identity.rank, identity.size)
        follower.connection.send(Kind.HELLO, deadline, hello)
        try:
            if not follower.wait_for_welcome(until):
                return None
        except (RingError, OSError, EOFError, ValueError):
            raise
        except BaseException as error:  # Ctrl-C: tell the leader, which has the hello
            follower.fail(Failure.of(error, identity.rank))
            raise
        cleanup.pop_all()
        return follower


def _leader(rank: int | None = None) -> str:
    return "the leader of this host" + ("" if rank is None else f", rank {rank},")


_TELL_S = 2.0  # seconds for telling others of a failure

# Most connections that have not said their rank, and how long they may take while others wait.
_STRANGERS = 1024
_SILENCE_S = 0.25
_SHORTAGE_S = 2.0  # seconds for which accept() may lack descriptors
_ACCEPT_PAUSE_S = 0.02
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
        self._strangers: dict[FrameSocket, float] = {}  # time of arrival; the oldest is first
        self._short_since: float | None = None  # since when descriptors are lacking
        self._waiting: dict[FrameSocket, tuple[int, int]] = {}  # of other starts: rank, size
        self._judged_at = 0.0
        self._selector = selectors.PollSelector()
        self._listener: socket.socket | None = None
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
            gives_up = self._watch(min(_SLICE_S, grace.left_s(), _QUIET_S))
        if self._grace is not None:
            self.close_door()  # a late rank leads a group of its own
        # Wait for the value of each rank that was let in: it first makes its memory and listeners.
        while not self.followers.keys() <= self.values.keys() and not self._deadline.passed():
            self._watch(min(_SLICE_S, self._deadline.left_s()))
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
                raise TimeoutError(f"{_leader(leader)} has not answered {deadline}")
            try:
                self.above = connect(name, self._identity, deadline, deadline, self._watch)
            except BlockingIOError:  # its backlog is full
                time.sleep(_PAUSE_S)
            except (RingError, ConnectionRefusedError, ForeignUserError):
                raise
            except (OSError, EOFError, ValueError) as error:
                raise gone(_leader(leader), error) from None

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
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)

    def close_door(self) -> None:
        """Stop accepting ranks; those that are not in yet find another leader."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for each in [*self._strangers, *self._waiting]:
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
        if self._listener is not None and self._listener in ready:
            self._accept(self._listener)
        if self._waiting:
            self._judge_waiting()

    def note(self, line: str) -> None:
        """Log a line on rank 0, if that is on this host."""
        if self._rank == 0:
            _log.info("%s", line)
        elif 0 in self.followers:
            with contextlib.suppress(OSError):
                self.followers[0].send(Kind.NOTE, Deadline(_TELL_S), line.encode())

    def fail(self, failure: Failure, teller: FrameSocket | None = None) -> None:
        """Report a failure to all connected ranks but `teller`, once; the first failure counts."""
        if self.failure is not None:
            return
        self.failure = failure
        if self.above is not None:
            self.above.fail(failure)
        self.notified = {self._rank, *self.followers}
        deadline = Deadline(_TELL_S)
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
        patience = Deadline(_TELL_S)
        while self._listener is not None and self._reached() < expected and not patience.passed():
            with contextlib.suppress(OSError):  # a lack of descriptors is known already
                self.pump(min(0.1, patience.left_s()))
        self.close_door()
        return self._reached() >= expected

    def _reached(self) -> int:
        return len(self.notified | self.lost)

    def close(self) -> None:
        """Close all connections after a goodbye."""
        self.close_door()
        deadline = Deadline(_TELL_S)
        for follower in self.followers.values():
            with contextlib.suppress(OSError):
                follower.send(Kind.BYE, deadline)
            follower.close()
        self.followers.clear()
        self._selector.close()
        if self.above is not None:
            self.above.close()

    # --- arriving connections and frames

    def _accept(self, listener: socket.socket) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = min(_STRANGERS, limit // 4) if limit >= 0 else _STRANGERS
        while len(self._strangers) < room or self._make_room():
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                self._short_since = None
                return
            except OSError as error:
                if self._make_room():
                    continue
                self._bear(error)
                break
            self._short_since = None
            try:
                require_same_user(connection)
            except OSError as error:
                _log.debug("rank %d dropped a connection: %s", self._rank, error)
                connection.close()
                continue
            stranger = FrameSocket(connection)
            self._strangers[stranger] = time.monotonic()
            self._selector.register(stranger, selectors.EVENT_READ)
        time.sleep(_ACCEPT_PAUSE_S)  # waiting connections would wake the selector again at once

    def _make_room(self) -> bool:
        """Drop the newest stranger that has had time to say hello; return whether there was one."""
        ripe = time.monotonic() - _SILENCE_S
        newest = next((s for s in reversed(self._strangers) if self._strangers[s] <= ripe), None)
        if newest is not None:
            self._drop(newest)
        return newest is not None

    def _bear(self, error: OSError) -> None:
        """Raise an error of accept() if it persists: descriptors may become free meanwhile."""
        now = time.monotonic()
        self._short_since = self._short_since or now
        if error.errno not in (errno.EMFILE, errno.ENFILE) or now > self._short_since + _SHORTAGE_S:
            raise error

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
        self._strangers.pop(stranger, None)
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
        self._strangers.pop(stranger, None)
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
        self._strangers.pop(connection, None)
        self._waiting.pop(connection, None)
        for rank in [r for r, follower in self.followers.items() if follower is connection]:
            del self.followers[rank]
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
        connection.close()


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
