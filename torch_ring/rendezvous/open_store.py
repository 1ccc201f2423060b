"""open_store: the store of a world whose ranks have been told its address a moment ago."""

from __future__ import annotations

import socket
from collections.abc import Callable

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torch_ring._C import StoreCall
from torch_ring.errors import PeerLostError, first_line
from torch_ring.rendezvous.deadline import Deadline
from torch_ring.rendezvous.store_client import finish

__all__ = ["CONNECT_S", "open_store"]

CONNECT_S = 12.0
"""Seconds for which torch's store tries to connect. It looks up the names of both ends, and for a
name server that does not answer the system waits 5 s each time."""

_REACH_S = 1.5  # one lost packet costs a second


def open_store(
    address: tuple[str, int], what: str, listener: socket.socket | None = None
) -> TCPStore:
    """Return the store at an address.

    Args:
        address: host and port.
        what: which store it is, in errors.
        listener: a socket that listens there, which the store takes: this process serves it. None:
            another one does.

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
    """Wait for a store, as long as `check` raises nothing."""
    if not finish(call, Deadline(CONNECT_S), check):
        raise OSError(f"it has not answered within {CONNECT_S:g} s")
    store: TCPStore = call.result()
    return store


def _require_open(connection: socket.socket) -> None:
    """Raise OSError if a store has closed a connection; torch would try again until its timeout."""
    try:
        if not connection.recv(1):  # a store says nothing before it is asked
            raise OSError("it has ended")
    except BlockingIOError:
        pass
