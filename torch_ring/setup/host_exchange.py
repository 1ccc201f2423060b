"""HostExchange: the groups of ranks that have met exchange one card each over the store.

A group is the ranks of a host, as a rule. Its leader takes the next places of a counter, as many as
the group has ranks, and stores its card under the first of them. Every `size` places make a world,
so that the leader of rank 0's group finds all cards by going from place to place. It writes the
table of them all, for which the others wait. Cost: three operations a group, a fourth to read its
card, and a few looks whether the table is there.

A failure ends a generation of worlds: it stands in the place of the table that others wait for, and
the counter jumps, so that whoever comes later is told once, and begins a new generation then.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed import DistError

from torch_ring.errors import PeerLostError, RingError, first_line
from torch_ring.setup.claim import starter
from torch_ring.setup.failure import Failure, missing_ranks, twice
from torch_ring.setup.job_key import AuthenticatedStore
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import Deadline, is_loopback_name
from torch_ring.setup.store_client import KeyValueStore

__all__ = [
    "CHUNK_BYTES",
    "HostExchange",
    "advice_on_missing",
    "linger",
    "meeting_name",
    "meeting_name_by_store",
]


def meeting_name(identity: Identity, environment: Mapping[str, str] = os.environ) -> str:
    """Return the name, the same for all ranks of this start of the job on this host and node.

    Raises:
        RingError: nothing tells this job from others.
    """
    address = [environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
    if is_loopback_name(address[0]):
        address[0] = "localhost"
    job = identity.job or ("" if address[0] else _starter(identity))
    # Two nodes of torchrun may be on one host: each knows how many of its own will come.
    return _named(os.getuid(), identity.launcher, job, *address, identity.node, identity.part)


def advice_on_missing(identity: Identity, environment: Mapping[str, str] = os.environ) -> str:
    """Return why ranks that meet at this name, and at no store, may miss others; "": unknown."""
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


def meeting_name_by_store(store: KeyValueStore) -> str | None:
    """Return the name that the ranks of a store agree upon; None: the store cannot do that.

    Nothing else tells which ranks a store of the user's is for. Cost: one operation a rank.
    """
    with contextlib.suppress(DistError, NotImplementedError):
        token = store.compare_set("meeting", "", secrets.token_hex(16))
        return _named(os.getuid(), token.decode(errors="replace"))
    return None


def _one_user() -> str:
    return f"Only ranks of one user meet on a host: this one is user {os.getuid()}'s."


def _named(*parts: object) -> str:
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return f"\0torch_ring/{digest[:32]}"


def _starter(identity: Identity) -> str:
    try:
        return starter(identity.launcher, os.getpid())
    except RingError:
        raise RingError(
            f"cannot see the process that started this rank ({identity.source()}) in /proc: set "
            "MASTER_ADDR to 127.0.0.1 and MASTER_PORT to a free port, on all ranks of this host"
        ) from None


CHUNK_BYTES = 1_000_000
"""Bytes of a value, at most: TCPStore refuses 8 MiB, and a proxy in between may refuse less."""

_ENDED = "generations_ended"  # a key; under a generation's number:
_PLACES = "places"  # places taken
_CARD = "card/{}"  # by place
_TABLE = "table/{}"  # what has become of a world: its table, or why there is none
_CHUNK = "table/{}/{}"  # the table's further chunks
_DECIDED = "decided/{}"  # how many have wanted to write that
_FAILED = "failed"  # how many have failed
_FAILURE = "failure"  # the first of them
_TOLD = "told/{}"  # by rank: how often it has been told
_SAID = "said/{}/{}"  # by world and name
_SEEN = "seen"  # the number of ranks that know of it

_OVER = 1 << 40  # added to the places of a generation that has ended
_IS_TABLE, _IS_FAILURE, _IS_QUESTION = b"T", b"F", b"Q"  # first byte of a world's value
_MOST_CHUNKS = 256
_LINGER_S = 2.0  # seconds that others get to say, or to learn, why an init() has failed
_LOOK_S = 1.0  # seconds between two looks for failures

_NO_PLACE = "the store gives no place: has somebody else written into it?"
_TOO_MANY = twice("two processes have the same rank")


@dataclass(frozen=True)
class Question:
    """A question of rank 0's leader, in place of the table.

    Attributes:
        place: of the group that is asked.
        text: what that group needs for its answer, a failure.
    """

    place: int
    text: bytes


class HostExchange:
    """One group's side of the exchange that makes one world.

    Its methods raise PeerLostError if the store is gone, and another rank's failure.

    Thread: one at a time. Blocking: `collect` and `await_table`.

    Args:
        store: seen only by the ranks of this start of the job.
        size: the number of ranks of the world.
        ranks: the ranks of this group.
        deadline: the deadline of the whole init().
        ranks_of: returns the ranks of another group's card, none if it is damaged.
        pump: called while waiting; raises failures of this group.

    Attributes:
        place: of the group among all that have come, in this generation.
        world: the number of the world, in this generation.
    """

    def __init__(
        self,
        store: AuthenticatedStore,
        size: int,
        ranks: Sequence[int],
        deadline: Deadline,
        ranks_of: Callable[[bytes], Sequence[int]],
        pump: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._size, self._ranks = store, size, ranks
        self._deadline, self._ranks_of, self._pump = deadline, ranks_of, pump
        self._count = count = len(ranks)
        self._generation, place = 0, 0
        self._read: list[str] = []  # keys that nobody needs when all have joined
        self._looked_at = 0.0
        self._has_failed = False
        with store_errors():
            while (end := store.add(self._key(_PLACES), count)) >= _OVER:
                if deadline.passed():
                    raise RingError(_NO_PLACE)
                if self.mark_told(self._ranks):  # they belong to the world that has failed
                    raise self._first_failure()
                self._generation += 1
            place = end - count
        if place < 0:
            raise RingError(_NO_PLACE)
        self.place, self.world = place, place // size
        self._first = self.world * size  # place of this world
        if place + count > self._first + size:
            error = RingError(_TOO_MANY)
            self.fail(Failure.of_all(error))
            raise error

    def publish(self, card: bytes) -> None:
        """Store the group's card."""
        if len(card) > CHUNK_BYTES:
            raise RingError(f"a card of {len(card)} bytes for {self._count} ranks is too large")
        with store_errors():
            self._set(self._key(_CARD, self.place), card)

    def collect(self) -> Iterator[tuple[int, bytes]]:
        """Yield place and card of all other groups, in the order of their places. Blocks.

        Raises:
            TimeoutError: ranks did not arrive before the deadline; names them.
            RingError: this init() has failed; or the cards have no ranks, or too many.
        """
        place = self._first
        while place < self._first + self._size:
            if place == self.place:
                place += self._count
                continue
            card = self._wait_for(self._key(_CARD, place))
            self._read.append(self._key(_CARD, place))
            yield place, card
            count = len(self._ranks_of(card))
            if not 1 <= count <= self._first + self._size - place:
                raise RingError(_TOO_MANY)
            place += count

    def write_table(self, table: bytes) -> None:
        """Give all groups the table.

        Raises:
            RingError: a rank has failed before.
        """
        first, *more = _chunks(table)
        with store_errors():
            for number, chunk in enumerate(more, 1):
                self._set(self._key(_CHUNK, self.world, number), chunk)
            head = _IS_TABLE + (len(more) + 1).to_bytes(2, "big")
            if not self._decide(head + first):
                raise self._first_failure()

    def ask(self, question: Question) -> RingError:
        """Ask a group, in the table's place, for the failure that ends this init(); return it."""
        with store_errors():
            self._decide(_IS_QUESTION + question.place.to_bytes(8, "big") + question.text)
        return self._first_failure()

    def await_table(self) -> bytes | Question:
        """Return the table; or what rank 0's leader asks this group. Blocks.

        Raises:
            RingError: this init() has failed.
        """
        value = self._wait_for(self._key(_TABLE, self.world))
        kind, rest = value[:1], value[1:]
        if kind == _IS_FAILURE:
            raise self._told(Failure.from_bytes(rest))
        if kind == _IS_QUESTION and len(rest) >= 8:
            question = Question(int.from_bytes(rest[:8], "big"), rest[8:])
            if question.place == self.place:
                return question
            raise self._first_failure()
        count = int.from_bytes(rest[:2], "big")
        if kind != _IS_TABLE or not 1 <= count <= _MOST_CHUNKS:
            raise RingError("the table of the ranks is damaged, or of another version")
        chunks = [rest[2:]]
        with store_errors():
            for number in range(1, count):
                chunks.append(self._store.get(self._key(_CHUNK, self.world, number)))
        return b"".join(chunks)

    def tell(self, name: str, value: bytes) -> None:
        """Store a value of this world, for others who hear it."""
        with store_errors():
            self._set(self._key(_SAID, self.world, name), value)

    def hear(self, name: str) -> bytes:
        """Return what somebody has told in this world. Blocks."""
        key = self._key(_SAID, self.world, name)
        self._read.append(key)
        return self._wait_for(key)

    def check(self, *, at_once: bool = False) -> None:
        """Raise another rank's failure, if there is one; looks once a second at most."""
        if at_once or time.monotonic() >= self._looked_at + _LOOK_S:
            self._looked_at = time.monotonic()
            with store_errors():
                if self._store.check([self._key(_FAILURE)]):
                    world, failure = self._split(self._store.get(self._key(_FAILURE)))
                    if world <= self.world:  # a rank may be in its next world already
                        raise self._told(failure)

    def fail(self, failure: Failure) -> Failure:
        """Tell all groups why this init() has failed; return the first failure of all."""
        if self._has_failed:
            return failure
        with contextlib.suppress(DistError, RingError):  # the failure itself counts
            if self._claim_failure():
                self._announce(failure)
            else:
                failure = self._read_failure() or failure
                self._told(failure)
        return failure

    def clean_up(self) -> None:
        """Remove what nobody reads any more. For rank 0's leader, when all ranks have joined.

        The first world of a generation leaves its keys, so that a job with one init() does nothing.
        """
        if self.world == 0:
            return
        # The table of this world tells the next one's ranks that all is well.
        keys = [self._key(kind, self.world - 1) for kind in (_TABLE, _DECIDED)]
        keys += self._read
        with contextlib.suppress(DistError, RingError, NotImplementedError):
            for key in keys:
                self._store.delete_key(key)

    # --- waiting

    def _wait_for(self, key: str) -> bytes:
        """Return a value when it is there. Cost: one operation, and looks."""
        pause_s, looked = 0.001, time.monotonic()
        with store_errors():
            while not self._store.check([key]):
                self._pump()
                if self._deadline.passed():
                    raise self._late()
                if time.monotonic() >= looked + _LOOK_S:
                    looked = time.monotonic()
                    self._look_around()
                # Fast at first, then slower the more ranks there are.
                time.sleep(min(pause_s, self._deadline.left_s()))
                pause_s = min(1.5 * pause_s, min(_LOOK_S, 0.02 + 1e-4 * self._size))
            value: bytes = self._store.get(key)
        return value

    def _look_around(self) -> None:
        """Raise what other worlds of the generation tell of this one."""
        if self._store.check([self._key(_FAILURE)]):
            raise self._first_failure()
        if self.world > 0 and not self._store.check([self._key(_TABLE, self.world - 1)]):
            # Nobody gets here before the world before is complete, unless somebody came twice.
            raise RingError(_TOO_MANY)

    # --- failures

    def _late(self) -> RingError:
        """Return the error that names who is missing, the same in all groups."""
        # Rank 0's leader knows best who is here: its own card is not in the store.
        patience = Deadline(0.0 if 0 in self._ranks else _LOOK_S)
        while not patience.passed() and not self._store.check([self._key(_FAILURE)]):
            time.sleep(0.02)
        if not self._claim_failure():
            return self._first_failure()
        here, place = list(self._ranks), self._first
        while place < self._first + self._size:
            ranks: Sequence[int] = ()
            if place != self.place and self._store.check([self._key(_CARD, place)]):
                ranks = self._ranks_of(self._store.get(self._key(_CARD, place)))
            here += ranks
            place += self._count if place == self.place else max(len(ranks), 1)
        error = missing_ranks(here, self._size, self._deadline)
        self._announce(Failure.of_all(error))
        return error

    def _claim_failure(self) -> bool:
        """Return whether this group is the first to fail, and so announces why."""
        return bool(self._store.add(self._key(_FAILED), 1) == 1)

    def _announce(self, failure: Failure) -> None:
        """End the generation. The next one must be open before anybody hears of it."""
        self._has_failed = True
        self._store.add(_ENDED, 1)
        self._store.add(self._key(_PLACES), _OVER)
        self._set(self._key(_FAILURE), b"%d " % self.world + failure.to_bytes())
        self._decide(_IS_FAILURE + failure.to_bytes())
        self.mark_told(self._ranks)

    def _decide(self, value: bytes) -> bool:
        """Write what has become of this world, unless somebody else does."""
        if self._store.add(self._key(_DECIDED, self.world), 1) != 1:
            return False
        self._set(self._key(_TABLE, self.world), value)
        return True

    def _first_failure(self) -> RingError:
        failure = self._read_failure()
        if failure is None:
            failure = Failure("RingError", "init failed on another rank, which does not say why")
        return self._told(failure)

    def _read_failure(self) -> Failure | None:
        """Return the generation's failure; wait a moment if it is being written."""
        patience = Deadline(_LINGER_S)
        with store_errors():
            while not self._store.check([self._key(_FAILURE)]):
                if patience.passed():
                    return None
                time.sleep(0.02)
            return self._split(self._store.get(self._key(_FAILURE)))[1]

    @staticmethod
    def _split(value: bytes) -> tuple[int, Failure]:
        world, _, text = value.partition(b" ")
        return int(world) if world.isdigit() and len(world) < 20 else 0, Failure.from_bytes(text)

    def _told(self, failure: Failure) -> RingError:
        """Return another rank's failure, after noting that this group knows it."""
        if not self._has_failed:
            self._has_failed = True
            with store_errors():
                self.mark_told(self._ranks)
        return failure.error()

    def mark_told(self, ranks: Sequence[int]) -> bool:
        """Note that ranks know of the failure; return whether it is news to one of them.

        A rank that comes late is told once why its world has failed; then it begins a new one.
        """
        new = [self._store.add(self._key(_TOLD, rank), 1) == 1 for rank in ranks]
        self._store.add(self._key(_SEEN), sum(new))
        return any(new)

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def _key(self, key: str, *names: object) -> str:
        return f"{self._generation}/{key.format(*names)}"


def linger(store: AuthenticatedStore) -> None:
    """Wait a moment until all that have come know of a failure. For the process that serves.

    Args:
        store: the one that HostExchange uses.
    """
    until = Deadline(_LINGER_S)
    with contextlib.suppress(DistError, RingError):
        generation = store.add(_ENDED, 0) - 1
        while generation >= 0 and not until.passed():
            come = store.add(f"{generation}/{_PLACES}", 0) % _OVER
            if store.add(f"{generation}/{_SEEN}", 0) >= come:
                return
            time.sleep(0.02)


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Turn a store's error of thirty lines into a PeerLostError of one."""
    try:
        yield
    except DistError as error:
        raise PeerLostError(
            f"the store of this job is gone: has rank 0 exited? {first_line(error)}"
        ) from None


def _chunks(data: bytes) -> list[bytes]:
    most = CHUNK_BYTES - 16  # room for the head
    return [data[at : at + most] for at in range(0, len(data), most)] or [b""]
