"""open_store: a store that ends while a rank connects to it."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from torch_ring.errors import PeerLostError
from torch_ring.setup import store_client as module
from torch_ring.setup.store_client import open_store

_WHO = "the store of this test"


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_store_that_ends_meanwhile_is_given_up(
    monkeypatch: pytest.MonkeyPatch, is_reset: bool
) -> None:
    """torch would try until its timeout."""
    monkeypatch.setattr(module, "CONNECT_S", 30.0)
    listener = socket.create_server(("127.0.0.1", 0))

    def end() -> None:
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(listener.accept()[0]) for _ in range(2)]
            stack.enter_context(listener)
            for each in connections if is_reset else ():
                linger_for_0_s = (1).to_bytes(4, "little") + bytes(4)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_for_0_s)

    thread = threading.Thread(target=end)
    thread.start()
    expected = f"{_WHO}: .*(it has ended|reset by peer)"
    with pytest.raises(PeerLostError, match=expected):
        open_store(listener.getsockname(), _WHO)
    thread.join()


def test_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(PeerLostError, match=f"{_WHO}: .*refused"):
        open_store(address, _WHO)
