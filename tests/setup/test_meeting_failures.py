"""Errors of ranks that wait for others in vain, and the news of an interrupt."""

import contextlib
import os
import signal
import threading
import time

import made_up
import pytest
from bell import Bell, a_signal_after
from pool import error_of, run
from slow import slow
from torch.distributed import HashStore

from torch_ring.errors import RingError, TimeoutError
from torch_ring.setup.exchange import Meeting, failing_together
from torch_ring.setup.failure import missing_ranks, two_of_a_rank
from torch_ring.setup.launchers import Identity
from torch_ring.setup.network import Deadline
from torch_ring.setup.store import StorePlace

_numbers = iter(range(1 << 30))


def new_name() -> str:
    return f"\0torch_ring failures {os.getpid()} {next(_numbers)}"


def place_of(store):
    return StorePlace(None, False, lambda *_: store)


def test_an_interrupt_before_the_welcome_is_told():
    name = new_name()
    busy = Meeting(Identity(0, 3), Deadline(30.0), None, name)  # leads, but does not look yet
    with a_signal_after(0.3), pytest.raises(Bell):
        Meeting(Identity(1, 3), Deadline(30.0), None, name)
    began = time.monotonic()
    with (
        pytest.raises(RingError, match=r"^init failed on rank 1: Bell$"),
        contextlib.closing(busy),
        failing_together(busy),
    ):
        busy.meet(made_up.card(0), {})
    assert time.monotonic() - began < 10


def stop_while_leading(name: str) -> tuple[str, int]:
    rank = int(os.environ["RANK"])
    met = None
    while met is None:
        met = Meeting(Identity(rank, 2), Deadline(2.0), None, name)
        if (met._leader is not None) == bool(rank):  # rank 0 is to lead
            met.close()
            met = None
    if met._leader is not None:
        while 1 not in met._leader.members:
            met._leader.pump(0.1)
        os.kill(os.getpid(), signal.SIGSTOP)
        met.close()
        return "", os.getpid()
    above = met._above
    with contextlib.closing(met):
        met.meet(made_up.card(1), {})
        _, text = error_of(met.pass_down)
    os.kill(above.pid, signal.SIGCONT)
    return text, above.pid


def test_a_leader_that_is_stopped_is_told_at_the_deadline_and_not_later():
    (_, leader), (text, told) = run(
        stop_while_leading, 2, args=[new_name()], transport="", initialized=False
    )
    assert text.startswith("the leader of this host, rank 0, has not answered within 2 s")
    assert f"its process {leader} is stopped" in text
    assert told == leader


def test_ranks_that_have_come_but_do_not_go_on_are_the_ones_that_are_named():
    name = new_name()
    met = Meeting(Identity(0, 4, local_size=2), Deadline(1.5), place_of(HashStore()), name)
    other: list[Meeting] = []
    identity = Identity(1, 4, local_size=2)
    thread = threading.Thread(
        target=lambda: other.append(Meeting(identity, Deadline(30.0), place_of(None), name))
    )
    thread.start()
    with (
        pytest.raises(TimeoutError, match=r"^rank 1 of 4 did not arrive within 1\.5 s"),
        contextlib.closing(met),
        failing_together(met),
    ):
        met.meet(made_up.card(0), {})
    thread.join(20)
    other[0].close()


@pytest.mark.parametrize("job", ["", "4711/0"])
def test_ranks_that_meet_by_their_parent_are_told_so(job):
    met = Meeting(Identity(0, 2, job=job), Deadline(0.3), None, new_name())
    with pytest.raises(TimeoutError) as raised, contextlib.closing(met), failing_together(met):
        met.meet(made_up.card(0), {})
    text = str(raised.value)
    assert text.startswith("rank 1 of 2 did not arrive within 0.3 s")
    assert ("meet only if MASTER_ADDR and MASTER_PORT are set" in text) == (not job)


@pytest.mark.parametrize("job", ["", "4711/0"])
@pytest.mark.parametrize(("address", "local_size"), [("localhost", None), slow("127.0.0.1", 1)])
def test_ranks_with_a_loopback_address_are_told_so(monkeypatch, job, address, local_size):
    """As an operator does that gives rank 0 its own host as "localhost"."""
    monkeypatch.setenv("MASTER_ADDR", address)
    identity = Identity(0, 2, job=job, local_size=local_size)
    met = Meeting(identity, Deadline(0.3), None, new_name())
    with pytest.raises(TimeoutError) as raised, contextlib.closing(met), failing_together(met):
        met.meet(made_up.card(0), {})
    text = str(raised.value)
    assert text.startswith("rank 1 of 2 did not arrive within 0.3 s")
    assert f"? MASTER_ADDR={address} means that all ranks are on this host: if they are not" in text
    assert "MASTER_PORT" not in text


def test_a_loopback_address_is_right_where_the_launcher_says_so(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    identity = Identity(0, 2, job="4711/0", local_size=2)
    met = Meeting(identity, Deadline(0.3), None, new_name())
    with pytest.raises(TimeoutError) as raised, contextlib.closing(met), failing_together(met):
        met.meet(made_up.card(0), {})
    assert str(raised.value).endswith("and do they call init()?")


def test_a_store_that_nobody_serves_does_not_hold_up_the_failure():
    waits = []

    def find(deadline, _):
        waits.append(deadline.timeout_s)
        raise TimeoutError("nothing answers")

    met = Meeting(
        Identity(1, 2, local_size=2), Deadline(0.3), StorePlace(None, False, find), new_name()
    )
    with (
        pytest.raises(TimeoutError, match="nothing answers"),
        contextlib.closing(met),
        failing_together(met),
    ):
        met.meet(made_up.card(1), {})
    assert waits[0] == 0.3
    assert all(seconds < 1 for seconds in waits[1:])


def test_a_list_of_missing_ranks_is_never_empty():
    deadline = Deadline(2.0)
    assert str(missing_ranks([0, 2], 3, deadline)).startswith("rank 1 of 3 did not arrive within")
    late = str(missing_ranks([0, 1, 2], 3, deadline))
    assert late.startswith("all 3 ranks have come, but the last of them not within 2 s")


def test_two_processes_of_a_rank_may_be_two_jobs():
    text = str(two_of_a_rank(1, 3))
    assert text.startswith("two processes are rank 1 of 3, or another job has the same MASTER_ADDR")
