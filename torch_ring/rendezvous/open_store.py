"""open_store: the store of a world whose ranks have been told its address a moment ago."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from torch_ring._C import StoreCall
from torch_ring.errors import PeerLostError, first_line

__all__ = ["CONNECT_S", "open_store"]

CONNECT_S = 12.0
"""Seconds for which torch's store tries to connect. It looks up the names of both ends, and for a
name server that does not answer the system waits 5 s each time."""

_REACH_S = 1.5  # one lost packet costs a second
_SLICE_S = 0.05


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
        if listener is None:
            return _connect(address)
        return TCPStore(
            *address,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_S),
            master_listen_fd=listener.detach(),
        )
    except (DistError, RuntimeError, OSError) as error:
        raise PeerLostError(f"{what}: {first_line(error)}") from None


def _connect(address: tuple[str, int]) -> TCPStore:
    """Connect to a store while it lives; torch tries until its timeout where nobody listens."""
    with socket.create_connection(address, _REACH_S) as other:
        call = StoreCall.connect(*address, CONNECT_S)
        other.setblocking(False)
        while not call.wait(_SLICE_S):
            try:
                has_ended = not other.recv(1)  # a store says nothing before it is asked
            except BlockingIOError:
                has_ended = False
            if has_ended:
                raise OSError("it has ended")
        store: TCPStore = call.result()
        return store
