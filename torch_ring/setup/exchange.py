"""Meeting: the ranks of a world find one another, in two levels, and fail together until they have.

The ranks of a host meet at a Unix socket, where one of them leads; the leaders exchange one card
each over the store, if the ranks are on several hosts. Every leader has the table of all cards
then, and passes it down.

A group claims a machine by the kernel's boot id and a network namespace. Copies of one virtual
machine have these in common, so the leader of each later group shows that it reaches the Unix
socket of the first group of its machine. One that does not is a machine of its own.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch_ring._C import limit_to_raise
from torch_ring.errors import PeerLostError, RingError, TimeoutError
from torch_ring.setup.claim import Start, is_stopped
from torch_ring.setup.failure import Failure, missing_ranks, other_size, progress, two_of_a_rank
from torch_ring.setup.frames import Frame, Kind
from torch_ring.setup.host_exchange import HostExchange, Question, advice_on_missing, linger
from torch_ring.setup.host_socket import LocalLeader, LocalMember, connect_to, join, listen
from torch_ring.setup.job_key import AuthenticatedStore, JobKey
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import Deadline, ForeignUserError
from torch_ring.setup.peer_info import (
    GroupCard,
    difference,
    gather_group,
    pack_table,
    ranks_in,
    require_agreement,
    unpack_table,
)
from torch_ring.setup.store import StorePlace
from torch_ring.setup.store_client import KeyValueStore

__all__ = ["GroupMeeting", "Meeting", "Missed", "failing_together", "lacking"]

Cause = TypeVar("Cause", bound=BaseException)

_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # the last: of threads


class SetupExchange(Protocol):
    """One rank's side of an exchange beside the connections that ranks are about to make."""

    rank: int
    deadline: Deadline

    def check(self) -> None:
        """Raise the failure of another rank, if there is one. Does not block."""

    def explain(self, error: RingError) -> RingError:
        """Return another rank's failure that caused `error`, or `error` itself."""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed with `error`."""


@contextlib.contextmanager
def failing_together(exchange: SetupExchange) -> Iterator[None]:
    """Make a failure inside the context a failure of all ranks.

    Raises:
        RingError: another rank's failure, where a lost connection is only its consequence.
        BaseException: the exception raised inside; the other ranks have been told.
    """
    try:
        yield
    except PeerLostError as error:
        raise _told(exchange, exchange.explain(error)) from None
    except (OSError, MemoryError, RingError) as error:
        raise _told(exchange, lacking(error, exchange.rank) or error) from None
    except BaseException as error:
        exchange.fail(error)
        raise


def lacking(error: BaseException, rank: int) -> RingError | None:
    """Return the error that says which limit to raise on `rank`; None if it lacks nothing."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    if isinstance(error, RingError):
        # The native module says what this process lacks, but does not know its rank everywhere.
        nameless = "raise `ulimit" in str(error) and "rank " not in str(error)
        return RingError(f"rank {rank}: {error}") if nameless else None
    if number not in _LACKS:
        return None
    return RingError(f"rank {rank}: {str(error) or os.strerror(number)}{limit_to_raise(number)}")


def _told(exchange: SetupExchange, cause: Cause) -> Cause:
    """Return `cause` after the other ranks know it.

    No local variable above holds it: its traceback would keep that frame, and its engine, alive.
    """
    exchange.fail(cause)
    return cause


_APART = "apart"


class GroupMeeting:
    """One group's side.

    Its methods raise RingError if another group fails.

    Thread: one at a time. Blocking: all methods.

    Args:
        exchange: with the other groups.
        own: this group's card.
        size: the number of ranks of the world.

    Attributes:
        here: the ranks that have come, as far as this group knows.
    """

    def __init__(self, exchange: HostExchange, own: GroupCard, size: int) -> None:
        self._exchange, self._own, self._size = exchange, own, size
        self.here = own.ranks

    @property
    def has_rank_0(self) -> bool:
        """Whether this is the group that gathers the cards."""
        return 0 in self._own.ranks

    def meet(self, settings: Mapping[int, str]) -> tuple[list[GroupCard], bytes]:
        """Return the groups in the order of their places, and the table that says so.

        Args:
            settings: of this group's ranks, as JSON.

        Raises:
            MismatchError: those of another group differ.
            RingError: cards are wrong, or this group's was changed on the way.
        """
        if self.has_rank_0:
            groups = self._collect(settings[0])
            table = pack_table(groups)
            self._exchange.write_table(table)
            return groups, table
        self._exchange.publish(self._own.to_bytes())
        answer = self._exchange.await_table()
        if isinstance(answer, Question):
            rank = min(settings)
            raise difference(0, answer.text.decode(errors="replace"), rank, settings[rank])
        try:
            groups = unpack_table(answer, self._size).groups
        except ValueError as error:
            raise RingError(f"the table of the ranks in the store is damaged: {error}") from None
        if self._own not in groups:
            raise RingError(
                f"the table of the ranks in the store has another card of rank {self._own.leader} "
                "than it has sent: somebody else writes into the store"
            )
        return groups, answer

    def prove_machines(
        self, groups: Sequence[GroupCard], reach: Callable[[GroupCard], bool]
    ) -> list[GroupCard]:
        """Return the groups, each with the machine on which it is.

        Args:
            groups: the cards of all.
            reach: connects to a group's leader; returns whether it is on this machine.
        """
        first: dict[str, GroupCard] = {}
        later = [g for g in groups if first.setdefault(str(g.machine), g) is not g]
        if not later:
            return list(groups)
        if self._own in later:
            is_here = reach(first[str(self._own.machine)])
            self._exchange.tell(_reached(self._own), b"%d" % is_here)
        if self.has_rank_0:
            apart = [g.leader for g in later if self._exchange.hear(_reached(g)) != b"1"]
            self._exchange.tell(_APART, " ".join(map(str, apart)).encode())
        told = self._exchange.hear(_APART).split()
        return [g.apart() if g in later and b"%d" % g.leader in told else g for g in groups]

    def _collect(self, settings: str) -> list[GroupCard]:
        """Return the cards of all groups, in the order of their places."""
        groups = {self._exchange.place: self._own}
        come = dict.fromkeys(self._own.ranks)
        for place, data in self._exchange.collect():
            try:
                group = groups[place] = GroupCard.from_bytes(data, self._size)
            except ValueError as error:
                raise RingError(f"a host runs another version of torch_ring: {error}") from None
            if group.size != self._size:
                raise other_size(group.leader, group.size, self._size)
            for rank in group.ranks:
                if rank in come:
                    raise two_of_a_rank(rank, self._size)
                come[rank] = None
            if group.settings != self._own.settings:
                raise self._exchange.ask(Question(place, settings.encode()))
            self.here = list(come)
        return [groups[place] for place in sorted(groups)]


def _reached(group: GroupCard) -> str:
    return f"reached/{group.leader}"


_GRACE_S = 2.0  # seconds after which a leader goes to the store without the ranks that are late
_QUIET_S = 0.5  # ... or after which nobody else comes, where their number is not known
_PROGRESS_S = 5.0
_SLICE_S = 1.0
_PATIENCE_S = 5.0  # seconds beyond the deadline in which failures travel
_LOOK_S = 0.5  # seconds for a look whether there is a store
_ASK_S = 0.2  # seconds between two questions whether all live that are to meet
_ASK_S_PER_RANK = 0.001

Missed = Callable[[Collection[int]], RingError | None]
"""Returns why a world cannot be made, if it knows so, given the ranks that a leader has met."""


class Meeting:
    """One rank's side of the meeting that makes one world; a `SetupExchange`.

    Call `meet`, then `pass_down` as often as wanted, but equally often on all ranks. Any failure on
    the way, told to `fail`, is raised on all ranks, until `close`.

    Thread: one at a time. Blocking: the constructor, `meet`, `pass_down` and `explain`, until the
    deadline.

    Args:
        identity: this process.
        deadline: the deadline of the whole init().
        place: the store where hosts meet; None: all ranks are on this host.
        name: the socket's name at which the ranks of this host meet; None: there is none.
        key: authenticates what hosts tell one another over the store; None: they have no secret.
        start: to which this process belongs, where jobs can have one name.
        missed: called now and then on the leaders of hosts, until all ranks are connected.

    Attributes:
        rank, size: this process; the number of ranks.
        leads: whether this rank leads its host: it is the one that passes things down. Known
            after `meet`.
        table: after `meet`, on the leader of a host: the cards of all ranks, packed. See
            `connections.peer_info.parse_table`.

    Raises:
        TimeoutError: the leader of this host does not answer.
        RingError: another rank has failed.
    """

    def __init__(
        self,
        identity: Identity,
        deadline: Deadline,
        place: StorePlace | None,
        name: str | None,
        key: JobKey | None = None,
        start: Start | None = None,
        missed: Missed = lambda _: None,
    ) -> None:
        self.deadline = deadline
        self.rank, self.size = identity.rank, identity.size
        self.leads = False
        self.table = b""
        self._identity, self._place, self._missed = identity, place, missed
        self._error: RingError | None = None  # of ranks that have ended
        self._next_look = Deadline(_ASK_S)
        self._key = key or JobKey()
        self._ranks_of = functools.partial(ranks_in, size=identity.size)
        self._exchange: HostExchange | None = None
        self._groups: GroupMeeting | None = None
        self._above: LocalMember | None = None  # leads to this rank's leader
        self._leader: LocalLeader | None = None
        self._began = self._told_progress = time.monotonic()
        self._has_failed = False
        self._in_store = False
        grace = deadline if place is None else Deadline(min(_GRACE_S, deadline.left_s() / 2))
        self._grace = grace
        met = join(name, self.rank, self.size, deadline, grace, start or Start())
        if isinstance(met, LocalLeader):
            self._leader = met
            self._leader.expected = self.size if place is None else identity.local_size
        else:
            self._above = met

    @property
    def connections(self) -> dict[int, socket.socket]:
        """The connections to this rank's own local ranks, by rank; empty unless it leads some."""
        members = self._leader.members if self._leader else {}
        return {rank: member.socket for rank, member in members.items()}

    def meet(self, card: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Meet the other ranks. On a rank that does not lead it only sends the card.

        Args:
            card: what the others need to know of this rank. It has its "rank", and its "machine":
                the same for ranks that can meet at a Unix socket.
            settings: what must be the same on all ranks, by variable.

        Raises:
            TimeoutError: ranks did not arrive before the deadline; names them.
            MismatchError: a setting differs; names it, its values and ranks.
            RingError: another rank has failed; says why.
        """
        own = json.dumps([dict(card), json.dumps(settings, sort_keys=True)]).encode()
        try:
            if self._leader is None:
                assert self._above is not None
                self._above.send(Kind.CARD, own)
                return
            self._leader.cards[self.rank] = own
            self._collect_local()
            group, texts = gather_group(self.rank, self.size, self._leader.cards)
            if len(group.ranks) < self.size:
                self._meet_hosts(group, texts)
            else:
                require_agreement(texts)
                self.leads = True
                self._leader.close_door()
                self.table = self._table_to_pass([group])
        except RingError as error:
            self._relay(Failure.of_all(error))
            raise

    def pass_down(self, data: bytes = b"", fds: Sequence[int] = ()) -> tuple[bytes, list[int]]:
        """Pass bytes and descriptors from the leader of each host to all of its ranks.

        Args:
            data: the leader's; of others nothing is read.
            fds: the leader's, too, who keeps them.

        Returns:
            What the leader gave; the descriptors are the caller's, on all ranks but the leader.

        Raises:
            PeerLostError: a rank of this host has exited.
            RingError: another rank has failed; says why.
        """
        frame = Frame(Kind.DATA, data, list(fds))
        if self._above is not None:
            frame = self._wait_above()
        try:
            if self._leader is not None:
                self._leader.send_all(Kind.DATA, frame.payload, tuple(frame.fds))
        except BaseException:
            if not self.leads:
                for fd in frame.fds:
                    os.close(fd)
            raise
        return frame.payload, frame.fds

    def check(self) -> None:
        """Raise the failure of another rank, if there is one. Does not wait for one."""
        self._pump(0.0)
        try:
            if self._exchange is not None:
                self._exchange.check()
            self._require_living()
        except RingError as error:
            self._relay(Failure.of_all(error))
            raise

    def explain(self, error: RingError) -> RingError:
        """Return the failure of another rank behind `error`, or `error` itself.

        A rank that fails says why a moment after its connections close.
        """
        patience = Deadline(1.0)
        while not patience.passed():
            try:
                self._pump(0.02)
                if self._exchange is not None:
                    self._exchange.check(at_once=True)
            except RingError as failure:
                return failure
            time.sleep(0.02)  # where there is nobody to hear from, pump() does not wait
        return error

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one cannot go on; a store's server waits for them."""
        self._relay(Failure.of(error, self.rank))
        if self._place is not None and self._place.opened is not None and self._place.serves:
            linger(AuthenticatedStore(self._place.opened, self._key))

    def leave_store(self) -> None:
        """Let go of the store. Call when all ranks have joined: failures travel otherwise then."""
        if self._exchange is not None:
            self._exchange.clean_up()
            self._exchange = self._groups = None
        if self._place is not None:
            self._place.leave()

    def close(self) -> None:
        """Close all connections. Call when all ranks have joined, or after a failure."""
        for end in (self._leader, self._above):
            if end is not None:
                end.close()
        self._leader = self._above = None

    # --- the ranks of this host

    def _collect_local(self) -> None:
        """Wait for the cards of those who are to be here, as far as they come."""
        leader = self._leader
        assert leader is not None
        expected = leader.expected
        known = expected is not None
        while len(leader.cards) < (expected or self.size):
            if self._grace.passed() or (not known and time.monotonic() > leader.newest + _QUIET_S):
                break
            if self._place is not None and self._dead() is not None:
                break  # the other hosts hear of it in the store
            self._pump(min(_SLICE_S, self._grace.left_s(), _QUIET_S))
            self._report()
        if self._place is not None:
            leader.close_door()  # whoever is late leads a group of his own
        # A rank that was let in will send a card: it makes its memory and its listeners first.
        while not leader.members.keys() <= leader.cards.keys():
            if self.deadline.passed():
                break
            self._pump(min(_SLICE_S, self.deadline.left_s()))
            self._report()
        late = leader.members.keys() - leader.cards.keys()
        if late or (self._place is None and len(leader.cards) < self.size):
            here = set(range(self.size)) - late if self._place is not None else leader.cards.keys()
            advice = "" if self._place is not None else advice_on_missing(self._identity)
            advice = " ".join(filter(None, (leader.others, advice)))
            error = missing_ranks(here, self.size, self.deadline, advice)
            self._relay(Failure.of_all(error))
            raise error

    # --- hosts

    def _meet_hosts(self, own: GroupCard, texts: Mapping[int, str]) -> None:
        """Exchange this group's card for the table; the first group of a machine leads it."""
        leader, place = self._leader, self._place
        assert leader is not None
        assert place is not None
        if 0 in leader.members:
            leader.members[0].send(Kind.SERVE, self.deadline)
        # While it tells the store of a failure, that failure must not end the call.
        store = place.open(self.deadline, lambda: None if self._has_failed else self._pump(0.0))
        self._in_store = True  # from now on the store has all failures
        self._exchange = self._exchange_over(store, own.ranks, self.deadline, self._watch)
        require_agreement(texts)
        own.door = secrets.token_hex(8)
        leader.open(listen(_door(own)))  # for other groups of this machine
        meeting = self._groups = GroupMeeting(self._exchange, own, self.size)
        cards, table = meeting.meet(texts)
        groups = meeting.prove_machines(cards, self._reach)
        self.leads = self._above is None
        leader.close_door()
        self.table = self._table_to_pass(groups, table)

    def _reach(self, first: GroupCard) -> bool:
        """Connect to the group that leads this machine; False: it is another machine's."""
        try:
            self._above = connect_to(
                _door(first), first.leader, self.rank, self.size, self.deadline
            )
        except (ConnectionRefusedError, ForeignUserError):
            return False
        return True

    def _table_to_pass(self, groups: Sequence[GroupCard], table: bytes = b"") -> bytes:
        """Return the table for this machine's ranks, with the key of the world.

        On one host it is a random one, which leaves no process but over the Unix sockets. Between
        hosts it follows from the secret and the table, with which nobody can have meddled then.
        """
        if len({str(group.machine) for group in groups}) == 1:
            return pack_table(groups, is_private=True)
        machines = repr([str(group.machine) for group in groups]).encode()
        key = self._key.of_world(table, machines)
        return pack_table(groups, key, is_private=self._key.is_secret)

    def _exchange_over(
        self,
        store: KeyValueStore,
        ranks: Sequence[int],
        deadline: Deadline,
        pump: Callable[[], None] = lambda: None,
    ) -> HostExchange:
        authenticated = AuthenticatedStore(store, self._key)
        return HostExchange(authenticated, self.size, ranks, deadline, self._ranks_of, pump)

    # --- waiting, and failures

    def _watch(self) -> None:
        self._pump(0.0)
        self._require_living()
        self._report()

    def _require_living(self) -> None:
        """Raise the error of ranks that have ended, if this leader knows it; looks now and then."""
        error = self._dead()
        if error is not None:
            raise error

    def _dead(self) -> RingError | None:
        if self._leader is not None and self._error is None and self._next_look.passed():
            self._error = self._missed(self._leader.cards.keys())
            self._next_look = Deadline(_ASK_S + _ASK_S_PER_RANK * self.size)
        return self._error

    def _pump(self, wait_s: float) -> None:
        """Handle what other ranks of this host say; raise their failure."""
        for end in (self._above, self._leader):
            if end is not None:
                end.pump(wait_s)
                wait_s = 0.0
        if self._above is not None and self._above.must_serve:
            self._above.must_serve = False
            if self._place is not None and self._place.serves:
                self._place.open(self.deadline)
        for end in (self._above, self._leader):
            if end is not None and end.failure is not None:
                self._relay(end.failure)
                raise end.failure.error()

    def _wait_above(self) -> Frame:
        """Return the next frame that the leader passes down."""
        above = self._above
        assert above is not None
        # The leader knows who is late: it says so at its deadline, a moment after this one.
        patience = Deadline(self.deadline.left_s() + _PATIENCE_S)
        while not above.data:
            if self.deadline.passed() and is_stopped(above.pid):
                raise TimeoutError(
                    f"{above.leader} has not answered {self.deadline}: its process {above.pid} is "
                    "stopped (`kill -CONT` lets it go on)"
                )
            if patience.passed():
                raise TimeoutError(f"{above.leader} has not answered {self.deadline}")
            if above.left:
                raise PeerLostError(f"{above.leader} has exited during init")
            self._pump(min(_SLICE_S, self.deadline.left_s() or patience.left_s()))
        return above.data.popleft()

    def _relay(self, failure: Failure) -> None:
        """Tell everybody why this init() has failed, unless they know."""
        if self._has_failed:
            return
        self._has_failed = True
        if self._exchange is not None:
            failure = self._exchange.fail(failure)
        elif self._leader is not None and self._place is not None and 0 in self._leader.members:
            with contextlib.suppress(OSError):
                self._leader.members[0].send(Kind.SERVE, self.deadline)
        for end in (self._above, self._leader):
            if end is not None:
                end.fail(failure)
        if self._leader is not None and not self._in_store:
            self._relay_beyond(self._leader, failure)

    def _relay_beyond(self, leader: LocalLeader, failure: Failure) -> None:
        """Tell ranks that have not met this one yet why this init() has failed."""
        on_one_node = self._place is None or self._identity.on_one_node()
        exchange = None if on_one_node else self._fail_in_store(leader.told, failure)
        expected = self.size if on_one_node else self._identity.local_size
        if not leader.linger(expected or self.size) and on_one_node:
            exchange = self._fail_in_store(leader.told, failure)
        if exchange is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone
                exchange.mark_told(sorted(leader.told))

    def _fail_in_store(self, ranks: Collection[int], failure: Failure) -> HostExchange | None:
        if self._place is None:
            return None
        # Rank 0 opens the store when it is told to. If it is not here, nobody waits in a store that
        # is not there by now.
        patience = Deadline(_PATIENCE_S if 0 in ranks else _LOOK_S)
        with contextlib.suppress(RingError, OSError):  # the failure itself counts
            exchange = self._exchange_over(self._place.open(patience), sorted(ranks), patience)
            exchange.fail(failure)
            return exchange
        return None

    def _report(self) -> None:
        """Log on rank 0, every few seconds, who is here."""
        now = time.monotonic()
        if now >= self._told_progress + _PROGRESS_S and self._leader is not None:
            self._told_progress = now
            here = {*self._leader.cards, *(self._groups.here if self._groups else ())}
            self._leader.note(progress(sorted(here), self.size, now - self._began))


def _door(group: GroupCard) -> str:
    return f"\0torch_ring/{group.door}"
