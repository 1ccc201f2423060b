# SPDX-License-Identifier: Apache-2.0
"""StoreExchange: the hosts of a job gather one value each over a store.

A group of ranks, usually those of a host, takes part as one. Its leader takes the next places of a
counter, one for each rank of the group, and stores its value under the first of them. Every `size`
places make a world, so the leader of rank 0's group finds all values by going from place to place.
It writes all of them under one key, for which the others wait. Cost: three operations a group, a
fourth to read its value, and a few polls for the values; two operations less in each further round.

A failure ends a generation of worlds: it takes the place of the values that others wait for, and
the counter jumps. So a rank that comes later is notified once, and then begins a new generation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed import DistError

from torch_ring.errors import PeerLostError, RingError, first_line
from torch_ring.setup.failure import Failure, missing_ranks, other_version, twice, two_of_a_rank
from torch_ring.setup.frames import Kind, decode, encode
from torch_ring.setup.job_key import AuthenticatedStore
from torch_ring.setup.network import Deadline
from torch_ring.setup.peer_info import pack, unpack

__all__ = ["CHUNK_BYTES", "StoreExchange", "linger"]

CHUNK_BYTES = 1_000_000
"""The most bytes of a value: TCPStore refuses 8 MiB, and a proxy may refuse less."""

_ENDED = "generations_ended"  # a key; under a generation's number:
_PLACES = "places"  # places taken
_VALUE = "value/{}/{}"  # by round and place
_VALUES = "values/{}/{}"  # by world and round: the values of all, or the failure
_CHUNK = "values/{}/{}/{}"  # their further chunks
_DECIDED = "decided/{}"  # by world: number of attempts to write the values of the first round
_FAILED = "failed"  # number of failures
_FAILURE = "failure"  # the first failure
_NOTIFIED = "notified/{}"  # by rank: number of its notifications
_SEEN = "seen"  # number of ranks that know of the failure

_OVER = 1 << 40  # added to the places of a generation that has ended
_MOST_CHUNKS = 256
_LINGER_S = 2.0  # seconds that others get to write, or to read, the failure of an init()
_FAILURES_EVERY_S = 1.0  # between two checks for failures

_NO_PLACE = "the store gives no place: has somebody else written into it?"
_TOO_MANY = twice("two processes have the same rank")


class StoreExchange:
    """One group's side of the exchange that makes one world; see `exchange`.

    Its methods raise PeerLostError if the store is gone, and another rank's failure.

    Thread: one at a time. Blocking: `gather`.

    Args:
        store: seen only by the ranks of this start of the job.
        size: the number of ranks of the world.
        ranks: the ranks of this group.
        deadline: the deadline of the whole init().
        ranks_of: returns the ranks of another group's first value; raises RingError if they cannot
            make a world with this group's.
        watch: called while waiting; raises failures of this group.

    Attributes:
        place: the group's first place in this generation.
        world: the number of the world in this generation.
        here: the ranks that have arrived, as far as this group knows.
    """

    def __init__(
        self,
        store: AuthenticatedStore,
        size: int,
        ranks: Sequence[int],
        deadline: Deadline,
        ranks_of: Callable[[Any], Sequence[int]],
        watch: Callable[[], object] = lambda: None,
    ) -> None:
        self.here = list(ranks)
        self._store, self._size, self._ranks = store, size, ranks
        self._deadline, self._ranks_of, self._watch = deadline, ranks_of, watch
        self._count = count = len(ranks)
        self._generation, place = 0, 0
        self._round = 0
        self._others: list[int] = []  # the places of the other groups
        self._read: list[str] = []  # keys that are not needed after all have joined
        self._looked_at = time.monotonic()
        self._has_failed = False
        with store_errors():
            while (end := store.add(self._key(_PLACES), count)) >= _OVER:
                if deadline.passed():
                    raise RingError(_NO_PLACE)
                if self.mark_notified(self._ranks):  # they belong to the failed world
                    raise self._first_failure()
                self._generation += 1
            place = end - count
        if place < 0:
            raise RingError(_NO_PLACE)
        self.place, self.world = place, place // size
        self._first = self.world * size  # first place of this world
        if place + count > self._first + size:
            error = RingError(_TOO_MANY)
            self.fail(Failure.of_all(error))
            raise error

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all groups, in the order of their places. Blocks.

        All groups call it equally often.

        Args:
            value: this group's value, a JSON value.

        Raises:
            TimeoutError: ranks did not arrive before the deadline; names them.
            RingError: this init() has failed; or the values have no ranks, or too many; or this
                group's value was changed in the store.
        """
        self._send(value)
        return self._receive(value)

    def poll(self, _: float = 0.0, /, *, at_once: bool = False) -> None:
        """Raise another rank's failure, if there is one; reads the store at most once a second."""
        if not at_once and time.monotonic() < self._looked_at + _FAILURES_EVERY_S:
            return
        self._looked_at = time.monotonic()
        with store_errors():
            if self._store.check([self._key(_FAILURE)]):
                world, failure = self._stored_failure()
                # After this world is complete, the failure may be of a rank's next world.
                if self._round == 0 or world <= self.world:
                    raise self._notified(failure)
            before = self._key(_VALUES, self.world - 1, 0)
            if self._round == 0 and self.world > 0 and not self._store.check([before]):
                # The previous world must be complete here, unless a rank has come twice.
                raise RingError(_TOO_MANY)

    def fail(self, failure: Failure) -> Failure:
        """Report a failure of this init() to all groups; return the first failure of all."""
        if self._has_failed:
            return failure
        with contextlib.suppress(DistError, RingError):  # the failure itself counts
            if self._claim_failure():
                self._announce(failure)
            else:
                failure = self._read_failure() or failure
                self._notified(failure)
        return failure

    def close(self) -> None:
        """Remove the keys that are not read any more. Call when all ranks have joined.

        The first world of a generation leaves its keys, so that a job with one init() does nothing.
        """
        if self.world == 0 or 0 not in self._ranks:
            return
        # Keep the values of this world: they show the next one's ranks that it was complete.
        keys = [self._key(_VALUES, self.world - 1, 0), self._key(_DECIDED, self.world - 1)]
        keys += self._read
        with contextlib.suppress(DistError, RingError, NotImplementedError):
            for key in keys:
                self._store.delete_key(key)

    # --- rank 0's group, and the others

    def _send(self, value: Any) -> None:
        """Store this group's value, unless it is rank 0's group, which writes all values."""
        data = pack(value)
        if len(data) > CHUNK_BYTES:
            raise RingError(f"a value of {len(data)} bytes for {self._count} ranks is too large")
        if 0 not in self._ranks:
            with store_errors():
                self._set(self._key(_VALUE, self._round, self.place), Kind.VALUE, data)

    def _receive(self, own: Any) -> list[Any]:
        """Return the values of all groups; rank 0's group collects them for the others."""
        if 0 in self._ranks:
            found = {self.place: own, **self._collect()}
            data = pack([found[place] for place in sorted(found)])
            self._write_values(data)
        else:
            data = self._await_values()
        self._round += 1
        values = self._unpacked(data)
        if not isinstance(values, list) or self._unpacked(pack(own)) not in values:
            raise RingError(
                f"the values of the ranks in the store have another one of rank {self._ranks[0]} "
                "than it has sent: somebody else writes into the store"
            )
        return values

    def _collect(self) -> dict[int, Any]:
        """Return the values of the other groups in this round, by place."""
        if self._round > 0:
            return {place: self._value_at(place) for place in self._others}
        found: dict[int, Any] = {}
        place = self._first
        while place < self._first + self._size:
            if place == self.place:
                place += self._count
                continue
            found[place] = self._value_at(place)
            self._others.append(place)
            ranks = self._ranks_of(found[place])
            for rank in ranks:
                if rank in self.here:
                    raise two_of_a_rank(rank, self._size)
            self.here += ranks
            if not 1 <= len(ranks) <= self._first + self._size - place:
                raise RingError(_TOO_MANY)
            place += len(ranks)
        return found

    def _value_at(self, place: int) -> Any:
        key = self._key(_VALUE, self._round, place)
        self._read.append(key)
        return self._unpacked(self._wait_for(key, Kind.VALUE)[1])

    def _unpacked(self, data: bytes) -> Any:
        try:
            return unpack(data, self._size)
        except ValueError as error:
            raise other_version("a host", error) from None

    def _write_values(self, data: bytes) -> None:
        """Write the values for all groups. Raises RingError: a rank has failed before."""
        first, *more = _chunks(data)
        with store_errors():
            for number, chunk in enumerate(more, 1):
                key = self._key(_CHUNK, self.world, self._round, number)
                self._set(key, Kind.VALUES, chunk)
            head = (len(more) + 1).to_bytes(2, "big")
            if self._round > 0:
                self._read.append(self._key(_VALUES, self.world, self._round))
                self._set(self._read[-1], Kind.VALUES, head + first)
            elif not self._decide(Kind.VALUES, head + first):
                raise self._first_failure()

    def _await_values(self) -> bytes:
        kind, data = self._wait_for(
            self._key(_VALUES, self.world, self._round), Kind.VALUES, Kind.FAILURE
        )
        if kind is Kind.FAILURE:
            raise self._notified(Failure.from_bytes(data))
        count = int.from_bytes(data[:2], "big")
        if not 1 <= count <= _MOST_CHUNKS:
            raise RingError("the values of the ranks are damaged, or of another version")
        chunks = [data[2:]]
        with store_errors():
            for number in range(1, count):
                key = self._key(_CHUNK, self.world, self._round, number)
                chunks.append(self._get(key, Kind.VALUES)[1])
        return b"".join(chunks)

    # --- waiting

    def _wait_for(self, key: str, *kinds: Kind) -> tuple[Kind, bytes]:
        """Wait for a value, and return it. Cost: one operation, and the polls."""
        pause_s = 0.001
        with store_errors():
            while not self._store.check([key]):
                self._watch()
                if self._deadline.passed():
                    raise self._late()
                self.poll()
                # Poll fast at first, then more slowly, depending on the number of ranks.
                time.sleep(min(pause_s, self._deadline.left_s()))
                pause_s = min(1.5 * pause_s, min(_FAILURES_EVERY_S, 0.02 + 1e-4 * self._size))
            return self._get(key, *kinds)

    # --- failures

    def _late(self) -> RingError:
        """Return the error that names the missing ranks, the same in all groups."""
        # Rank 0's leader knows best: its own value is not in the store.
        patience = Deadline(0.0 if 0 in self._ranks else _FAILURES_EVERY_S)
        while not patience.passed() and not self._store.check([self._key(_FAILURE)]):
            time.sleep(0.02)
        if not self._claim_failure():
            return self._first_failure()
        here, place = list(self._ranks), self._first
        while place < self._first + self._size:
            ranks: Sequence[int] = ()
            key = self._key(_VALUE, 0, place)
            if place != self.place and self._store.check([key]):
                with contextlib.suppress(RingError):  # a damaged value: its ranks count as missing
                    ranks = self._ranks_of(self._unpacked(self._get(key, Kind.VALUE)[1]))
            here += ranks
            place += self._count if place == self.place else max(len(ranks), 1)
        error = missing_ranks(here, self._size, self._deadline)
        self._announce(Failure.of_all(error))
        return error

    def _claim_failure(self) -> bool:
        """Return whether this group is the first to fail, and so must announce its failure."""
        return bool(self._store.add(self._key(_FAILED), 1) == 1)

    def _announce(self, failure: Failure) -> None:
        """End the generation. The next one must be open before any rank learns of the failure."""
        self._has_failed = True
        self._store.add(_ENDED, 1)
        self._store.add(self._key(_PLACES), _OVER)
        data = failure.to_bytes()
        self._set(self._key(_FAILURE), Kind.FAILURE, b"%d " % self.world + data)
        self._decide(Kind.FAILURE, data)
        self.mark_notified(self._ranks)

    def _decide(self, kind: Kind, data: bytes) -> bool:
        """Write the outcome of this world, unless another group has; return whether it did."""
        if self._store.add(self._key(_DECIDED, self.world), 1) != 1:
            return False
        self._set(self._key(_VALUES, self.world, 0), kind, data)
        return True

    def _first_failure(self) -> RingError:
        failure = self._read_failure()
        if failure is None:
            failure = Failure("RingError", "init failed on another rank, which does not say why")
        return self._notified(failure)

    def _read_failure(self) -> Failure | None:
        """Return the generation's failure; wait a moment if it is being written."""
        patience = Deadline(_LINGER_S)
        with store_errors():
            while not self._store.check([self._key(_FAILURE)]):
                if patience.passed():
                    return None
                time.sleep(0.02)
            return self._stored_failure()[1]

    def _stored_failure(self) -> tuple[int, Failure]:
        """Return the generation's failure, and the number of its world."""
        _, data = self._get(self._key(_FAILURE), Kind.FAILURE)
        world, _, text = data.partition(b" ")
        return int(world) if world.isdigit() and len(world) < 20 else 0, Failure.from_bytes(text)

    def _notified(self, failure: Failure) -> RingError:
        """Return another rank's failure, after noting that this group knows it."""
        if not self._has_failed:
            self._has_failed = True
            with store_errors():
                self.mark_notified(self._ranks)
        return failure.error()

    def mark_notified(self, ranks: Sequence[int]) -> bool:
        """Note that ranks know of the failure; return whether it is new to one of them.

        A late rank is notified once of the failure of its world; then it begins a new one.
        """
        new = [self._store.add(self._key(_NOTIFIED, rank), 1) == 1 for rank in ranks]
        self._store.add(self._key(_SEEN), sum(new))
        return any(new)

    # --- values in the store

    def _set(self, key: str, kind: Kind, payload: bytes) -> None:
        self._store.set(key, encode(kind, payload))

    def _get(self, key: str, *kinds: Kind) -> tuple[Kind, bytes]:
        try:
            return decode(self._store.get(key), kinds)
        except ValueError as error:
            raise RingError(f"the value {key!r} in the store is damaged: {error}") from None

    def _key(self, key: str, *names: object) -> str:
        return f"{self._generation}/{key.format(*names)}"


def linger(store: AuthenticatedStore) -> None:
    """Wait a moment until all ranks that have arrived know of a failure. For the store's server.

    Args:
        store: the store that StoreExchange uses.
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
    most = CHUNK_BYTES - 64  # leaves room for the header
    return [data[at : at + most] for at in range(0, len(data), most)] or [b""]
