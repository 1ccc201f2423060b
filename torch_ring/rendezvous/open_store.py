"""open_store: the store of a world whose ranks have been told its address a moment ago."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from torch_ring.errors import PeerLostError, first_line

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
        if listener is None:  # torch tries until its timeout where nobody listens
            socket.create_connection(address, _REACH_S).close()
        return TCPStore(
            *address,
            is_master=listener is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_S),
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (DistError, OSError) as error:
        raise PeerLostError(f"{what}: {first_line(error)}") from None
