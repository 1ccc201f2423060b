# SPDX-License-Identifier: Apache-2.0
"""Errors of ranks that wait for others in vain, and reports of an interrupt."""

import threading
import time

import pytest
from bell import Bell, a_signal_after
from exchanges import exchange_on, new_name, path_on_host, place_of
from torch.distributed import HashStore

from torch_ring.errors import RingError, TimeoutError
from torch_ring.setup import host_socket
from torch_ring.setup.exchange import FailurePath, failing_together
from torch_ring.setup.failure import Failure, missing_ranks
from torch_ring.setup.host_socket import HostLeader
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import Deadline
from torch_ring.setup.store import StorePlace


def is_asked(path: FailurePath) -> bool:
    """Return whether a rank waits at a leader that has not let it in yet."""
    assert isinstance(path.host, HostLeader)
    return bool(path.host._selector.select(0))


def test_an_interrupt_before_the_welcome_is_told(monkeypatch):
    monkeypatch.setattr(host_socket, "TELL_S", 0.05)  # there is nobody left to tell
    name = new_name()
    busy = path_on_host(Identity(0, 3), 30.0, None, name)  # leads, but does not look yet
    with a_signal_after(0.3, once=lambda: is_asked(busy)), pytest.raises(Bell):
        path_on_host(Identity(1, 3), 30.0, None, name)
    began = time.monotonic()
    with (
        pytest.raises(RingError, match=r"^init failed on rank 1: Bell$"),
        failing_together(busy),
    ):
        exchange_on(busy)
    assert time.monotonic() - began < 10


def test_ranks_that_have_come_but_do_not_go_on_are_the_ones_that_are_named():
    name = new_name()
    path = path_on_host(Identity(0, 4, local_size=2), 1.5, place_of(HashStore()), name)
    other: list[FailurePath] = []
    identity = Identity(1, 4, local_size=2)
    thread = threading.Thread(
        target=lambda: other.append(path_on_host(identity, 30.0, place_of(None), name))
    )
    thread.start()
    with (
        pytest.raises(TimeoutError, match=r"^rank 1 of 4 did not arrive within 1\.5 s"),
        failing_together(path),
    ):
        exchange_on(path)
    thread.join(20)
    other[0].close()


BY_PARENT = "meet only if MASTER_ADDR and MASTER_PORT are set"
ON_ONE_HOST = "? MASTER_ADDR={} means that all ranks are on this host: if they are not"
PLAIN = "and do they call init()?"


@pytest.mark.parametrize(
    ("job", "address", "local_size", "hint"),
    [
        ("", None, None, BY_PARENT),
        ("4711/0", None, None, PLAIN),
        # As with an operator that gives rank 0 its own host as "localhost".
        ("4711/0", "127.0.0.1", 1, ON_ONE_HOST),
        ("4711/0", "127.0.0.1", 2, PLAIN),
    ],
)
def test_the_error_of_a_missing_rank_has_the_probable_cause(
    monkeypatch, job, address, local_size, hint
):
    monkeypatch.setattr(host_socket, "TELL_S", 0.05)  # there is nobody to tell
    if address is not None:
        monkeypatch.setenv("MASTER_ADDR", address)
    path = path_on_host(Identity(0, 2, job=job, local_size=local_size), 0.3, None, new_name())
    with pytest.raises(TimeoutError) as raised, failing_together(path):
        exchange_on(path)
    text = str(raised.value)
    assert text.startswith("rank 1 of 2 did not arrive within 0.3 s")
    assert hint.format(address) in text
    assert text.endswith(PLAIN) == (hint == PLAIN)
    assert ("MASTER_PORT" in text) == (hint == BY_PARENT)


def test_a_store_that_nobody_serves_does_not_hold_up_the_failure():
    waits = []

    def find(deadline, _):
        waits.append(deadline.timeout_s)
        raise TimeoutError("nothing answers")

    identity, place = Identity(1, 2, local_size=2), StorePlace(None, False, find)
    path = path_on_host(identity, 0.3, place, new_name())
    with pytest.raises(TimeoutError, match="nothing answers"), failing_together(path):
        exchange_on(path)
    assert waits[0] == 0.3
    assert all(seconds < 1 for seconds in waits[1:])


def test_a_list_of_missing_ranks_is_never_empty():
    deadline = Deadline(2.0)
    assert str(missing_ranks([0, 2], 3, deadline)).startswith("rank 1 of 3 did not arrive within")
    late = str(missing_ranks([0, 1, 2], 3, deadline))
    assert late.startswith("all 3 ranks have come, but the last of them not within 2 s")


def test_a_failure_that_was_sent_writes_no_control_characters():
    sent = Failure("RingError", "one\n\x1b[2Jtwo").to_bytes()
    assert Failure.from_bytes(sent).text == "one\n?[2Jtwo"
