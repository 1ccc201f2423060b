"""StoreExchange: values and failures that ranks exchange over the store during init()."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from torch_ring import errors
from torch_ring.errors import (
    InvalidArgumentError,
    PeerLostError,
    RingError,
    TimeoutError,
    first_line,
)
from torch_ring.rendezvous.deadline import Deadline

__all__ = ["StoreExchange", "name_ranks"]

# Keys. "inits/<rank>" counts the worlds that a rank has begun to join. Under a world's number:
_SIZE = "size"  # the number of ranks, according to the first to arrive
_FAILURE = "failure"  # the failure that ends this init()
_SEEN = "failure_seen"  # the number of ranks that know of the failure
_FINISHED = "finished"  # this world needs the store no more

_LINGER_S = 2.0  # seconds that a store's server waits for the others to learn of a failure


class StoreExchange:
    """One rank's side of the exchange that makes one world; a `SetupExchange`.

    Its methods raise PeerLostError if the store is gone.

    Args:
        store: seen only by the ranks of this start of the job.
        rank, size: the index of this process; the number of processes.
        deadline: the deadline of the whole init().
        serves: whether this process serves the store.

    Raises:
        RingError: another process has this rank, too.
        InvalidArgumentError: another rank has another size.
    """

    def __init__(
        self, store: Store, rank: int, size: int, deadline: Deadline, *, serves: bool = False
    ) -> None:
        self.deadline = deadline
        self._rank = rank
        self._size = size
        self._serves = serves
        self._names: list[str] = []
        with _store_errors():
            number = store.add(f"inits/{rank}", 1)
        self._store = PrefixStore(str(number), store)
        self._before = PrefixStore(str(number - 1), store) if number > 1 else None
        try:
            self._arrive()
        except BaseException as error:
            self.fail(error)
            raise

    def gather(self, name: str, value: str) -> list[str]:
        """Return the values that all ranks give under `name`, by rank.

        Cost: a few messages a rank. The last rank to arrive writes the list for all.

        Raises:
            TimeoutError: ranks did not arrive before the deadline; names them.
            RingError: another rank has failed; says why.
        """
        self._names.append(name)
        keys = self._keys(name)
        with _store_errors():
            self._store.set(keys[self._rank], value)
            if self._store.add(f"{name}/count", 1) == self._size:
                self._store.set(name, json.dumps([self._store.get(k).decode() for k in keys]))
            for _ in self._until_deadline():
                self.check()
                if self._store.check([name]):
                    values: list[str] = json.loads(self._store.get(name))
                    return values
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        raise TimeoutError(
            f"{name_ranks(missing)} of {self._size} did not arrive {self.deadline}: have these "
            "processes started, and do they call init()?"
        )

    def check(self) -> None:
        """Raise the failure of another rank, if there is one."""
        with _store_errors():
            failure = self._failure()
        if failure:
            raise failure

    def explain(self, error: RingError) -> RingError:
        """Return the failure of another rank behind `error`, or `error` itself.

        A rank that fails writes its reason to the store a moment after its connections close.
        """
        with contextlib.suppress(DistError):
            for _ in range(50):
                failure = self._failure()
                if failure:
                    return failure
                time.sleep(0.02)
        return error

    def finish(self) -> None:
        """Record that this rank needs the store no more."""
        if self._rank == 0:
            with _store_errors():
                self._store.set(_FINISHED, "")

    def clean_up(self) -> None:
        """Remove the keys that nobody reads any more. Call when all ranks have joined."""
        if self._rank != 0:
            return
        # The keys of the previous world were kept to detect two processes with the same rank.
        old = [(self._before, key) for key in (_SIZE, _FAILURE, _SEEN, _FINISHED)]
        new = [
            (self._store, key)
            for name in self._names
            for key in (*self._keys(name), f"{name}/count", name)
        ]
        with contextlib.suppress(DistError, NotImplementedError):
            for store, key in old + new:
                if store is not None:
                    store.delete_key(key)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one cannot go on; a server waits until they know."""
        with contextlib.suppress(DistError):
            kind = type(error).__name__ if isinstance(error, RingError) else "RingError"
            reason = str(error) or type(error).__name__
            text = f"init failed on rank {self._rank}: {reason}"
            self._store.compare_set(_FAILURE, "", json.dumps([self._rank, kind, text]))
            self._store.add(_SEEN, 1)
            until = time.monotonic() + _LINGER_S if self._serves else 0.0
            while time.monotonic() < until:
                if self._store.add(_SEEN, 0) == self._size:
                    break
                time.sleep(0.02)

    def _arrive(self) -> None:
        with _store_errors():
            before = self._before
            if before and not before.check([_FINISHED]) and not before.check([_FAILURE]):
                self._store = before  # the world whose ranks must learn of it
                raise RingError(
                    f"two processes are rank {self._rank} of {self._size}, or one was killed in "
                    "the middle of init() and another one started in its place"
                )
            size = int(self._store.compare_set(_SIZE, "", str(self._size)))
            if size != self._size:
                raise InvalidArgumentError(
                    f"rank {self._rank} is one of {self._size}, but another rank is one of {size}: "
                    "give all ranks the same size"
                )

    def _failure(self) -> RingError | None:
        if not self._store.check([_FAILURE]):
            return None
        _, kind, text = json.loads(self._store.get(_FAILURE))
        known = kind in ("MismatchError", "PeerLostError", "TimeoutError")
        failure: RingError = getattr(errors, kind if known else "RingError")(text)
        return failure

    def _keys(self, name: str) -> list[str]:
        return [f"{name}/{rank}" for rank in range(self._size)]

    def _until_deadline(self) -> Iterator[None]:
        """Pace a polling loop: fast at first, then slower the more ranks there are."""
        pause_s, longest_s = 0.001, 0.02 + 1e-4 * self._size
        while not self.deadline.passed():
            yield
            time.sleep(min(pause_s, self.deadline.left_s()))
            pause_s = min(1.5 * pause_s, longest_s)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"; a long list is cut."""
    some = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {some}{more}"


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Turn a store's error of thirty lines into a PeerLostError of one."""
    try:
        yield
    except DistError as error:
        raise PeerLostError(
            f"the store of this job is gone: has rank 0 exited? {first_line(error)}"
        ) from None
