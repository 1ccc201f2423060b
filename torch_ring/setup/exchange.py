"""exchange_hosts: all ranks of a world learn of one another, in two levels, or fail together.

The ranks of a host gather their descriptions at a Unix socket, where one of them leads; the leaders
gather one description each over the store, if the ranks are on several hosts. Every leader has the
table of all ranks then, and passes it down.

A group claims a machine by the kernel's boot id and a network namespace. Copies of one virtual
machine have these in common, so the leader of each later group shows that it reaches the Unix
socket of the first group of its machine. One that does not is a machine of its own.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch_ring.errors import PeerLostError, RingError
from torch_ring.setup.failure import Failure, lacking, other_size, progress
from torch_ring.setup.host_socket import HostFollower, HostLeader, connect_to, listen
from torch_ring.setup.job_key import AuthenticatedStore, JobKey
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import Deadline, ForeignUserError
from torch_ring.setup.peer_info import (
    HostInfo,
    difference,
    host_info,
    pack_table,
    require_agreement,
)
from torch_ring.setup.store import StorePlace
from torch_ring.setup.store_exchange import StoreExchange, linger

__all__ = ["Exchange", "FailurePath", "Missed", "exchange_hosts", "failing_together"]

Cause = TypeVar("Cause", bound=BaseException)

Missed = Callable[[Collection[int]], RingError | None]
"""Returns why a world cannot be made, if it knows so, given the ranks that a leader has met."""

_PROGRESS_S = 5.0
_PATIENCE_S = 5.0  # seconds in which rank 0 opens the store for the news of a failure
_PRESENT_S = 0.5  # ... in which a store answers that is there
_MISSED_EVERY_S = 0.2  # seconds between two questions whether all live that are to meet
_MISSED_EVERY_S_PER_RANK = 0.001


class Exchange(Protocol):
    """One rank's side of an exchange with ranks that it is not connected to yet.

    The carrier is the socket of a host (`HostLeader`, `HostFollower`) or a store (`StoreExchange`).
    """

    def gather(self, value: Any) -> Any:
        """Return the values that all give, each of which JSON can say; a follower sends its own."""

    def poll(self, wait_s: float, /) -> None:
        """Handle what the others say; wait for it if there is nothing. Raises their failure."""

    def fail(self, failure: Failure) -> object:
        """Tell the others, once, why this init() has failed."""

    def close(self) -> None:
        """Leave the exchange."""


class FailurePath:
    """The way of a failure: one on any rank, in any phase of init(), is raised on all of them.

    It leads over the exchanges in which this rank is by then; see `failing_together`.

    Thread: one at a time. Blocking: `explain` and `fail`, for seconds; `watch`, as it is told.

    Args:
        identity: this process.
        deadline: of the whole init().
        place: the store where hosts meet; None: all ranks are on this host.
        key: authenticates what hosts tell one another over the store.
        missed: called now and then on the leaders of hosts, until all ranks are connected.

    Attributes:
        host: the exchange with the ranks of this host; None: not yet.
        hosts: that of the leaders with one another; None: not yet, or none is needed.
    """

    def __init__(
        self,
        identity: Identity,
        deadline: Deadline,
        place: StorePlace | None = None,
        key: JobKey | None = None,
        missed: Missed = lambda _: None,
    ) -> None:
        self.deadline = deadline
        self.identity = identity
        self.host: HostLeader | HostFollower | None = None
        self.hosts: StoreExchange | None = None
        self.place, self.key = place, key or JobKey()
        self._missed = missed
        self._missed_ranks: RingError | None = None
        self._next_question = Deadline(_MISSED_EVERY_S)
        self._began = self._told_progress = time.monotonic()
        self._has_failed = False
        self._in_store = False  # all failures are

    def watch(self, wait_s: float = 0.0) -> None:
        """Handle what the ranks of this host say, and wait for it; raise a failure of theirs."""
        with self._alike():
            if self.host is not None:
                self.host.poll(wait_s)
            if self.hosts is not None and (missed := self.missed_ranks()) is not None:
                raise missed
        self._report()

    def check(self) -> None:
        """Raise the failure of another rank, on any host, if there is one."""
        with self._alike():
            for exchange in (self.host, self.hosts):
                if exchange is not None:
                    exchange.poll(0.0)
            if (missed := self.missed_ranks()) is not None:
                raise missed

    def missed_ranks(self) -> RingError | None:
        """Return the error of ranks that have ended, if this leader knows it; asks now and then."""
        if isinstance(self.host, HostLeader) and self._next_question.passed():
            self._missed_ranks = self._missed_ranks or self._missed(self.host.values.keys())
            every_s = _MISSED_EVERY_S + _MISSED_EVERY_S_PER_RANK * self.identity.size
            self._next_question = Deadline(every_s)
        return self._missed_ranks

    def serve(self) -> None:
        """Serve the store, if this process does: other hosts need it."""
        if self.place is not None and self.place.serves:
            self.place.open(self.deadline)

    def explain(self, error: RingError) -> RingError:
        """Return the failure of another rank behind `error`, or `error` itself.

        A rank that fails says why a moment after its connections close.
        """
        patience = Deadline(1.0)
        while not patience.passed():
            try:
                if self.host is not None:
                    self.host.poll(0.02)
                if self.hosts is not None:
                    self.hosts.poll(at_once=True)
            except RingError as failure:
                self.fail_alike(failure)
                return failure
            time.sleep(0.02)  # where there is nobody to hear from, poll() does not wait
        return error

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one cannot go on; a store's server waits for them."""
        self._tell(Failure.of(error, self.identity.rank))
        served = self.place.opened if self.place is not None and self.place.serves else None
        if self.host is not None and served is not None:
            linger(AuthenticatedStore(served, self.key))

    def fail_alike(self, error: RingError) -> None:
        """Tell the other ranks an error that concerns all of them alike."""
        self._tell(Failure.of_all(error))

    def open_store(self, ranks: Sequence[int], ranks_of: Callable[[Any], Sequence[int]]) -> None:
        """Begin the exchange with other hosts. Failures are in the store from now on.

        Args:
            ranks: of this rank's group.
            ranks_of: as of `StoreExchange`.
        """
        assert self.place is not None
        # While it tells the store of a failure, that failure must not end the call.
        opened = self.place.open(self.deadline, self._watch_unless_failed)
        self._in_store = True
        store = AuthenticatedStore(opened, self.key)
        self.hosts = StoreExchange(
            store, self.identity.size, ranks, self.deadline, ranks_of, self.watch
        )

    def leave_store(self) -> None:
        """Let go of the store. Call when all ranks have joined: failures travel otherwise then."""
        if self.hosts is not None:
            self.hosts.close()
            self.hosts = None
        if self.place is not None:
            self.place.leave()

    def close(self) -> None:
        """Leave the exchange of this host. Call when all ranks have joined, or after a failure."""
        if self.host is not None:
            self.host.close()
        self.host = self.hosts = None

    def _watch_unless_failed(self) -> None:
        if not self._has_failed:
            self.watch()

    @contextlib.contextmanager
    def _alike(self) -> Iterator[None]:
        try:
            yield
        except RingError as error:
            self.fail_alike(error)
            raise

    def _tell(self, failure: Failure) -> None:
        """Tell everybody why this init() has failed, unless they know."""
        if self._has_failed or self.host is None:
            return
        self._has_failed = True
        leader = self.host if isinstance(self.host, HostLeader) else None
        if self.hosts is not None:
            failure = self.hosts.fail(failure)
        elif leader is not None and self.place is not None:
            with contextlib.suppress(OSError):
                leader.ask_to_serve()
        self.host.fail(failure)
        if leader is not None and not self._in_store:
            self._tell_late_ranks(leader, failure)

    def _tell_late_ranks(self, leader: HostLeader, failure: Failure) -> None:
        """Tell ranks that have not come yet why this init() has failed."""
        on_one_node = self.place is None or self.identity.on_one_node()
        hosts = None if on_one_node else self._fail_in_store(leader.told, failure)
        size = self.identity.size
        expected = size if on_one_node else self.identity.local_size or size
        if not leader.linger(expected) and on_one_node:
            hosts = self._fail_in_store(leader.told, failure)
        if hosts is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone
                hosts.mark_told(sorted(leader.told))

    def _fail_in_store(self, ranks: Collection[int], failure: Failure) -> StoreExchange | None:
        if self.place is None:
            return None
        # Rank 0 opens the store when it is told to. If it is not here, nobody waits in a store that
        # is not there by now.
        patience = Deadline(_PATIENCE_S if 0 in ranks else _PRESENT_S)
        with contextlib.suppress(RingError, OSError):  # the failure itself counts
            store = AuthenticatedStore(self.place.open(patience), self.key)
            hosts = StoreExchange(store, self.identity.size, sorted(ranks), patience, lambda _: ())
            hosts.fail(failure)
            return hosts
        return None

    def _report(self) -> None:
        """Log on rank 0, every few seconds, who is here."""
        now = time.monotonic()
        if now >= self._told_progress + _PROGRESS_S and isinstance(self.host, HostLeader):
            self._told_progress = now
            here = {*self.host.values, *(self.hosts.here if self.hosts else ())}
            if len(here) < self.identity.size:
                self.host.note(progress(sorted(here), self.identity.size, now - self._began))


@contextlib.contextmanager
def failing_together(path: FailurePath) -> Iterator[FailurePath]:
    """Make a failure inside the context a failure of all ranks; leave the exchanges at its end.

    Raises:
        RingError: another rank's failure, where a lost connection is only its consequence.
        BaseException: the exception raised inside; the other ranks have been told.
    """
    try:
        yield path
    except PeerLostError as error:
        raise _told(path, path.explain(error)) from None
    except (OSError, MemoryError, RingError) as error:
        raise _told(path, lacking(error, path.identity.rank) or error) from None
    except BaseException as error:
        path.fail(error)
        raise
    finally:
        path.close()


def _told(path: FailurePath, cause: Cause) -> Cause:
    """Return `cause` after the other ranks know it.

    No local variable above holds it: its traceback would keep that frame, and its engine, alive.
    """
    path.fail(cause)
    return cause


def exchange_hosts(
    host: HostLeader | HostFollower,
    own: Mapping[str, Any],
    settings: Mapping[str, Any],
    path: FailurePath,
) -> bytes:
    """Return the table of all ranks on the leader of a machine; empty on its other ranks.

    These hear it from the leader. See `peer_info.parse_table`.

    Args:
        host: the exchange of this host.
        own: this rank's description. It has its "rank", and its "machine": the same for ranks that
            can meet at a Unix socket.
        settings: what must be the same on all ranks, by variable.
        path: of failures; it has the store.

    Raises:
        TimeoutError: ranks did not arrive before the deadline; names them.
        MismatchError: a setting differs; names it, its values and ranks.
        RingError: another rank has failed; says why.
    """
    try:
        sent = host.gather([dict(own), json.dumps(settings, sort_keys=True)])
        if isinstance(host, HostFollower):
            return b""
        size = path.identity.size
        info, texts = host_info(path.identity.rank, size, sent)
        if len(info.ranks) == size:
            require_agreement(texts)
            host.close_door()
            return pack_table([info], is_private=True)
        return _exchange_over_store(host, info, texts, path)
    except RingError as error:
        path.fail_alike(error)
        raise


def _exchange_over_store(
    host: HostLeader, own: HostInfo, texts: Mapping[int, str], path: FailurePath
) -> bytes:
    """Return the table as `exchange_hosts` does, where ranks are missing on this host.

    Between hosts the key of the world follows from the secret and from all that was told, with
    which nobody can have meddled then. On one host it is a random one, which leaves no process but
    over the Unix sockets.
    """
    host.ask_to_serve()
    path.open_store(own.ranks, lambda value: _ranks_with(own, value))
    assert path.hosts is not None
    require_agreement(texts)
    own.socket = secrets.token_hex(16)
    host.open(listen(_address(own)))  # for other groups of this machine
    told = path.hosts.gather(own.to_value())
    infos = [_info_of(value, own.size) for value in told]
    infos = _proven(infos, own, host, path)
    host.close_door()
    if host.above is not None:
        return b""
    machines = [str(info.machine) for info in infos]
    if len(set(machines)) == 1:
        return pack_table(infos, is_private=True)
    key = path.key.of_world(json.dumps(told).encode(), repr(machines).encode())
    return pack_table(infos, key, is_private=path.key.is_secret)


def _info_of(value: Any, size: int) -> HostInfo:
    try:
        return HostInfo.of_value(value, size)
    except ValueError as error:
        raise RingError(f"a host runs another version of torch_ring: {error}") from None


def _ranks_with(own: HostInfo, value: Any) -> Sequence[int]:
    """Return the ranks of another group. Raises RingError if it cannot be of this one's world."""
    other = _info_of(value, own.size)
    if other.size != own.size:
        raise other_size(other.leader, other.size, own.size)
    if other.settings != own.settings:
        raise difference(own.ranks[0], own.settings, other.ranks[0], other.settings)
    return other.ranks


def _proven(
    infos: list[HostInfo], own: HostInfo, host: HostLeader, path: FailurePath
) -> list[HostInfo]:
    """Return the groups, each with the machine on which it is."""
    first: dict[str, HostInfo] = {}
    later = [each for each in infos if first.setdefault(str(each.machine), each) is not each]
    if not later:
        return infos
    mine = first[str(own.machine)]
    is_there = mine.leader == own.leader or _reach(mine, own, host, path)
    assert path.hosts is not None
    reached = path.hosts.gather([own.leader, is_there])
    apart = [each for each in later if [each.leader, True] not in reached]
    return [each.apart() if each in apart else each for each in infos]


def _reach(first: HostInfo, own: HostInfo, host: HostLeader, path: FailurePath) -> bool:
    """Connect to the group that leads this machine; return False if it is another machine's."""
    try:
        host.above = connect_to(
            _address(first), first.leader, own.leader, own.size, path.deadline, path.watch
        )
    except (ConnectionRefusedError, ForeignUserError):
        return False
    return True


def _address(info: HostInfo) -> str:
    return f"\0torch_ring/{info.socket}"
