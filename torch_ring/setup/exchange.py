# SPDX-License-Identifier: Apache-2.0
"""exchange_hosts: all ranks of a world learn of one another, in two levels, or fail together.

The ranks of a host gather their descriptions at a Unix socket, where one of them leads. If the
ranks are on several hosts, the leaders gather one description each over the store. Then every
leader has the table of all ranks, and passes it down. Either exchange has `gather`, which returns
the JSON values of all ranks; `poll`, which raises another rank's failure; `fail`, which reports one
to the others, once; and `close`.

A group names its machine by the kernel's boot id and a network namespace. Copies of a virtual
machine share these, so the leader of each later group must prove that it reaches the Unix socket of
the machine's first group. A group that cannot counts as a machine of its own.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch_ring.errors import PeerLostError, RingError
from torch_ring.setup.failure import Failure, exited, lacking, other_size, other_version, progress
from torch_ring.setup.host_follower import HostFollower
from torch_ring.setup.host_socket import HostLeader, Missed
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import Deadline, ForeignUserError, listen_unix
from torch_ring.setup.peer_info import (
    HostInfo,
    difference,
    host_info,
    pack_table,
    require_agreement,
)
from torch_ring.setup.store import StorePlace
from torch_ring.setup.store_exchange import StoreExchange, linger

__all__ = ["FailurePath", "exchange_hosts", "failing_together"]

Cause = TypeVar("Cause", bound=BaseException)

_PROGRESS_S = 5.0
_PATIENCE_S = 5.0  # seconds in which rank 0 opens the store for the report of a failure
_PRESENT_S = 0.5  # seconds in which an existing store answers
_MISSED_EVERY_S = 0.2  # seconds between two questions whether all ranks still live
_MISSED_EVERY_S_PER_RANK = 0.001


class FailurePath:
    """The path of failures: one on any rank, in any phase of init(), is raised on all of them.

    It uses the exchanges that this rank has joined so far; see `failing_together`.

    Thread: one at a time. Blocking: `explain` and `fail`, for seconds; `watch`, for `wait_s`.

    Args:
        identity: this process.
        deadline: the deadline of the whole init().
        place: the store where hosts meet; None: all ranks are on this host.
        missed: called now and then on the leaders of hosts, until all ranks are connected.

    Attributes:
        identity, deadline, place: as given.
        host: the exchange with the ranks of this host, from `meet_on_host`: set before any call.
        hosts: the exchange among the leaders; None: not yet, or none is needed.
    """

    host: HostLeader | HostFollower

    def __init__(
        self,
        identity: Identity,
        deadline: Deadline,
        place: StorePlace | None = None,
        missed: Missed = lambda _: (),
    ) -> None:
        self.identity, self.deadline, self.place = identity, deadline, place
        self.hosts: StoreExchange | None = None
        self._missed = missed
        self._exited: Collection[int] = ()
        self._next_question = Deadline(_MISSED_EVERY_S)
        self._began, self._next_report = time.monotonic(), Deadline(_PROGRESS_S)
        self._has_failed = False
        self._in_store = False  # whether all failures are stored there

    def watch(self, wait_s: float = 0.0) -> RingError | None:
        """Handle messages of the ranks of this host, waiting up to `wait_s`; raise their failure.

        Returns:
            The error of ranks that have ended, if this leader knows it: then do not wait for them.
            While this rank uses the store, where that error reaches all, it is raised instead.
        """
        with self.alike():
            self._poll_host(wait_s)
            missed = self._missed_now()
            if self.hosts is not None and missed is not None:
                raise missed
        self._report()
        return missed

    def check(self) -> None:
        """Raise the failure of another rank, on any host, if there is one."""
        with self.alike():
            missed = self.watch()
            if self.hosts is not None:
                self.hosts.poll()
            if missed is not None:
                raise missed

    def _poll_host(self, wait_s: float) -> None:
        try:
            self.host.poll(wait_s)
        finally:  # other hosts learn of a failure from the store
            is_asked = isinstance(self.host, HostFollower) and self.host.must_serve
            if is_asked and self.place is not None and self.place.serves:
                self.place.open(self.deadline)

    def _missed_now(self) -> RingError | None:
        if isinstance(self.host, HostLeader):
            self._exited = self._exited or self._ask(self.host.values.keys())
        return exited(sorted(self._exited), self.identity.size) if self._exited else None

    def _ask(self, here: Collection[int]) -> Collection[int]:
        """Return `missed(here)`; nothing, if it was called a moment ago."""
        if not self._next_question.passed():
            return ()
        every_s = _MISSED_EVERY_S + _MISSED_EVERY_S_PER_RANK * self.identity.size
        self._next_question = Deadline(every_s)
        return self._missed(here)

    def explain(self, error: RingError) -> RingError:
        """Return the failure of another rank behind `error`, or `error` itself.

        A failing rank reports the reason a moment after its connections close.
        """
        patience = Deadline(1.0)
        while not patience.passed():
            try:
                with self.alike():
                    self._poll_host(0.02)
                    if self.hosts is not None:
                        self.hosts.poll(at_once=True)
            except RingError as failure:
                return failure
            time.sleep(0.02)  # without peers, poll() does not wait
        return error

    def fail(self, error: Cause) -> Cause:
        """Report an error of this rank to the others, and return it.

        The process that serves the store waits until the others know it.
        """
        self._tell(Failure.of(error, self.identity.rank))
        if self.place is not None and self.place.serves and self.place.opened is not None:
            linger(self.place.opened)
        return error

    @contextlib.contextmanager
    def alike(self) -> Iterator[None]:
        """Context whose errors concern all ranks alike."""
        try:
            yield
        except RingError as error:
            self._tell(Failure.of_all(error))
            raise

    def open_store(self, ranks: Sequence[int], ranks_of: Callable[[Any], Sequence[int]]) -> None:
        """Begin the exchange with other hosts. Failures are in the store from now on.

        Args:
            ranks: the ranks of this rank's group.
            ranks_of: as for `StoreExchange`.
        """
        assert self.place is not None
        # While a failure is being written to the store, it must not end that call.
        store = self.place.open(self.deadline, self._watch_unless_failed)
        self._in_store = True
        self.hosts = StoreExchange(
            store, self.identity.size, ranks, self.deadline, ranks_of, self.watch
        )

    def leave_store(self) -> None:
        """Leave the store. Call when all ranks have joined: later failures take other paths."""
        if self.hosts is not None:
            self.hosts.close()
            self.hosts = None
        if self.place is not None:
            self.place.leave()

    def close(self) -> None:
        """Leave the exchange of this host. Call when all ranks have joined, or after a failure."""
        self.host.close()
        del self.host  # it refers to this path
        self.hosts = None

    def _watch_unless_failed(self) -> None:
        if not self._has_failed:
            self.watch()

    def _tell(self, failure: Failure) -> None:
        """Tell all ranks the failure of this init(), unless they know it."""
        if self._has_failed:
            return
        self._has_failed = True
        leader = self.host if isinstance(self.host, HostLeader) else None
        if self.hosts is not None:
            failure = self.hosts.fail(failure)
        elif leader is not None and self.place is not None:
            with contextlib.suppress(RingError):
                leader.ask_to_serve()
        self.host.fail(failure)
        if leader is not None and not self._in_store:
            self._tell_late_ranks(leader, failure)

    def _tell_late_ranks(self, leader: HostLeader, failure: Failure) -> None:
        """Tell late ranks the failure of this init()."""
        on_one_node = self.place is None or self.identity.on_one_node()
        hosts = None if on_one_node else self._fail_in_store(leader.notified, failure)
        size = self.identity.size
        expected = size if on_one_node else self.identity.local_size or size
        if not leader.linger(expected, self._ask) and on_one_node:
            hosts = self._fail_in_store(leader.notified, failure)
        if hosts is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone
                hosts.mark_notified(sorted(leader.notified))

    def _fail_in_store(self, ranks: Collection[int], failure: Failure) -> StoreExchange | None:
        if self.place is None:
            return None
        # Rank 0 opens the store when it is asked to. If rank 0 is not here and the store does not
        # exist by now, no rank waits in it.
        patience = Deadline(_PATIENCE_S if 0 in ranks else _PRESENT_S)
        with contextlib.suppress(RingError, OSError):  # the failure itself counts
            store = self.place.open(patience)
            hosts = StoreExchange(store, self.identity.size, sorted(ranks), patience, lambda _: ())
            hosts.fail(failure)
            return hosts
        return None

    def _report(self) -> None:
        """Log on rank 0, every few seconds, the ranks that have arrived."""
        if isinstance(self.host, HostLeader) and self._next_report.passed():
            self._next_report = Deadline(_PROGRESS_S)
            here = {*self.host.values, *(self.hosts.here if self.hosts else ())}
            if len(here) < self.identity.size:
                waited_s = time.monotonic() - self._began
                size, call = self.identity.size, self.deadline.call
                self.host.note(progress(sorted(here), size, waited_s, call=call))


@contextlib.contextmanager
def failing_together(path: FailurePath) -> Iterator[FailurePath]:
    """Make a failure inside the context a failure of all ranks; leave the exchanges at its end.

    Raises:
        RingError: another rank's failure, where a lost connection is only its consequence.
        BaseException: the exception raised inside; the other ranks have been told.
    """
    # No local variable holds the cause: its traceback would keep this frame, and its engine, alive.
    try:
        yield path
    except PeerLostError as error:
        raise path.fail(path.explain(error)) from None
    except (OSError, MemoryError, RingError) as error:
        raise path.fail(lacking(error, path.identity.rank) or error) from None
    except BaseException as error:
        path.fail(error)
        raise
    finally:
        path.close()


def exchange_hosts(own: Mapping[str, Any], settings: Mapping[str, Any], path: FailurePath) -> bytes:
    """Return the table of all ranks on the leader of a machine; empty on its other ranks.

    The other ranks get it from the leader. See `peer_info.parse_table`.

    Args:
        own: this rank's description. It has its "rank", and its "machine": the same for ranks that
            can meet at a Unix socket.
        settings: the settings that must be the same on all ranks, by variable.
        path: the path of failures, with the exchange of this host, and the store.

    Raises:
        TimeoutError: ranks did not arrive before the deadline; names them.
        MismatchError: a setting differs; names it, its values and ranks.
        RingError: another rank has failed; says why.
    """
    size = path.identity.size
    with path.alike():
        sent = path.host.gather([dict(own), json.dumps(settings, sort_keys=True)])
        if isinstance(path.host, HostFollower):
            return b""
        info, texts = host_info(path.identity.rank, size, sent)
        if len(info.ranks) < size:
            return _exchange_over_store(path.host, info, texts, path)
        require_agreement(texts)
        path.host.close_door()
        return pack_table([info], is_private=True)


def _exchange_over_store(
    host: HostLeader, own: HostInfo, texts: Mapping[int, str], path: FailurePath
) -> bytes:
    """Return the table as `exchange_hosts` does, if ranks are missing on this host.

    Between hosts the key of the world is derived from the secret and from all values sent: if any
    value was tampered with, the ranks get different keys. On one host the key is random, and leaves
    a process only over the Unix sockets.
    """
    host.ask_to_serve()
    path.open_store(own.ranks, lambda value: _ranks_with(own, value))
    assert path.hosts is not None
    require_agreement(texts)
    own.socket = secrets.token_hex(16)
    host.open(listen_unix(_address(own)))  # for other groups of this machine
    sent = path.hosts.gather(own.to_value())
    infos = [_info_of(value, own.size) for value in sent]
    infos = _proven(infos, own, host, path)
    host.close_door()
    if host.above is not None:
        return b""
    machines = [str(info.machine) for info in infos]
    if len(set(machines)) == 1:
        return pack_table(infos, is_private=True)
    assert path.place is not None
    key = path.place.key
    secret = key.of_world(json.dumps(sent).encode(), repr(machines).encode())
    return pack_table(infos, secret, is_private=key.is_secret)


def _info_of(value: Any, size: int) -> HostInfo:
    try:
        return HostInfo.of_value(value, size)
    except ValueError as error:
        raise other_version("a host", error) from None


def _ranks_with(own: HostInfo, value: Any) -> Sequence[int]:
    """Return the ranks of another group. Raises RingError if it does not fit into this world."""
    other = _info_of(value, own.size)
    if other.size != own.size:
        raise other_size(other.leader, other.size, own.size)
    if other.settings != own.settings:
        raise difference(own.ranks[0], own.settings, other.ranks[0], other.settings)
    return other.ranks


def _proven(
    infos: list[HostInfo], own: HostInfo, host: HostLeader, path: FailurePath
) -> list[HostInfo]:
    """Return the groups, each with its proven machine."""
    first: dict[str, HostInfo] = {}
    later = [each for each in infos if first.setdefault(str(each.machine), each) is not each]
    if not later:
        return infos
    mine = first[str(own.machine)]
    is_there = True
    if mine.leader != own.leader:
        try:
            host.follow(_address(mine), mine.leader)
        except (ConnectionRefusedError, ForeignUserError):
            is_there = False
    assert path.hosts is not None
    reached = path.hosts.gather([own.leader, is_there])
    apart = [each for each in later if [each.leader, True] not in reached]
    return [each.apart() if each in apart else each for each in infos]


def _address(info: HostInfo) -> str:
    return f"\0torch_ring/{info.socket}"
