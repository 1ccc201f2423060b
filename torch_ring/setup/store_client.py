# SPDX-License-Identifier: Apache-2.0
"""StoreClient, open_store: a key-value store whose calls have a deadline and obey signals."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from torch_ring._C import StoreCall
from torch_ring.errors import PeerLostError, TimeoutError, first_line
from torch_ring.setup.network import Deadline

__all__ = [
    "CONNECT_S",
    "StoreClient",
    "addresses_of",
    "finish",
    "host_of",
    "open_store",
    "without_prefixes",
]

_SLICE_S = 0.05  # seconds between two checks of signals and of other ranks
_LEAST_S = 2.0  # least time limit of a call in seconds: failures are sent after the deadline
_GRACE_S = 0.5  # seconds in which an interrupted call must end, for another one to be made


class StoreClient:
    """A store of torch whose calls have a deadline.

    A call raises TimeoutError, which names the server, if the server does not answer before the
    deadline. After that, or after an interrupt, no call is made until the server has answered.

    Thread: one at a time. Blocking: every call, until the deadline.

    Args:
        store: the store.
        deadline: the deadline of the whole init().
        server: the server's name in messages.
        check: called while a call waits; an exception ends the wait.
    """

    def __init__(
        self,
        store: Store,
        deadline: Deadline,
        server: str,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._deadline = store, deadline
        self._server, self._check = server, check
        self._pending: StoreCall | None = None
        self._silent = False

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, 0 at first; return the sum."""
        return int(self._call(StoreCall.add, key, amount))

    def check(self, keys: Sequence[str], /) -> bool:
        """Return whether all keys have values."""
        return bool(self._call(StoreCall.check, list(keys)))

    def get(self, key: str, /) -> bytes:
        """Return a value; waits until it exists."""
        return bytes(self._call(StoreCall.get, key))

    def set(self, key: str, value: str | bytes, /) -> None:
        """Write a value."""
        self._call(StoreCall.set, key, _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes, /) -> bytes:
        """Write a value if the old one is as expected ("": none); return the value stored then."""
        return bytes(self._call(StoreCall.compare_set, key, _bytes(expected), _bytes(desired)))

    def delete_key(self, key: str, /) -> bool:
        """Remove a value; return whether there was one."""
        return bool(self._call(StoreCall.delete_key, key))

    def _call(self, begin: Callable[..., StoreCall], *arguments: Any) -> Any:
        if self._pending is not None:
            self._silent = self._silent or not self._pending.wait(_GRACE_S)
            if self._silent:
                raise TimeoutError(self._silence())
        self._pending = call = begin(self._store, *arguments)
        deadline = Deadline(max(self._deadline.left_s(), _LEAST_S))
        finish(call, deadline, self._check, self._silence())
        self._pending = None
        return call.result()

    def _silence(self) -> str:
        return (
            f"{self._server} has not answered {self._deadline}: is its process stopped, or its "
            "host cut off?"
        )


def finish(call: StoreCall, deadline: Deadline, check: Callable[[], None], late: str) -> None:
    """Wait until a call has ended; calls `check` meanwhile.

    A call that begins just before the deadline gets a little more time, so that a TimeoutError
    really means that the server does not answer.

    Raises:
        TimeoutError: the call has not ended before the deadline; says `late`.
    """
    deadline = Deadline(max(deadline.left_s(), min(_LEAST_S, deadline.timeout_s)))
    while not call.wait(min(_SLICE_S, deadline.left_s())):
        check()
        if deadline.passed():
            raise TimeoutError(late)


def addresses_of(host: str, deadline: Deadline, check: Callable[[], None]) -> list[str]:
    """Return the addresses of a host, in digits.

    Blocks until the system's resolver answers; an address needs no resolver.

    Raises:
        TimeoutError: the resolver has not answered before the deadline.
        InvalidArgumentError: there is no such host.
    """
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    late = f"the address of {host!r} was not found {deadline}: no resolver answers"
    call = StoreCall.resolve(host)
    finish(call, deadline, check, late)
    text: bytes = call.result()
    return text.decode().split("\n")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


CONNECT_S = 12.0
"""Seconds for which torch's store tries to connect. It looks up the names of both ends, and each
look-up takes 5 s if the name server does not answer."""

_REACH_S = 1.5  # one lost packet costs a second


def open_store(
    address: tuple[str, int], what: str, listener: socket.socket | None = None
) -> TCPStore:
    """Return the store at an address.

    Args:
        address: host and port.
        what: the name of the store in errors.
        listener: a socket that listens there; the store takes it, and this process serves. None:
            another process serves it.

    Raises:
        PeerLostError: the store cannot be reached; says `what`.
    """
    try:
        if listener is not None:
            return _result(StoreCall.serve(*address, CONNECT_S, listener.detach()), lambda: None)
        with socket.create_connection(address, _REACH_S) as other:
            other.setblocking(False)
            return _result(StoreCall.connect(*address, CONNECT_S), lambda: _require_open(other))
    except (RuntimeError, OSError) as error:
        raise PeerLostError(f"{what}: {first_line(error)}") from None


def _result(call: StoreCall, check: Callable[[], None]) -> TCPStore:
    finish(call, Deadline(CONNECT_S), check, f"it has not answered within {CONNECT_S:g} s")
    store: TCPStore = call.result()
    return store


def _require_open(connection: socket.socket) -> None:
    """Raise OSError if a store has closed a connection; torch would try again until its timeout."""
    try:
        if not connection.recv(1):  # a store sends nothing before a request
            raise OSError("it has ended")
    except BlockingIOError:
        pass


def host_of(store: Store) -> str | None:
    """Return the host that serves a store; None: not known."""
    return getattr(without_prefixes(store), "host", None)  # a TCPStore's


def without_prefixes(store: Store) -> Store:
    """Return the store behind torch's PrefixStores, of which each group has one."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
