"""Defaults of waiting: a living, late rank does not end a job."""

import contextlib
import threading

import namespaces
import pytest
import torch
from pool import error_of, run

import torch_ring as hvd
from torch_ring._C import arm_failpoints
from torch_ring.config import SETTINGS, Config

LONGEST = {
    s.variable: f"{1e8 if s.field != 'fusion_window_s' else 1000:g}"
    for s in SETTINGS
    if isinstance(getattr(Config(), s.field), float)
}


def reduce_a_little() -> None:
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_longest_times_that_the_settings_take(transport):
    run(reduce_a_little, 2, transport=transport, env=LONGEST)


@pytest.mark.slow
@pytest.mark.netns
def test_the_longest_times_that_the_settings_take_on_two_hosts(hosts):
    env = LONGEST | {"MASTER_ADDR": f"{namespaces.NETWORK}.1"}
    run(reduce_a_little, 2, transport="", env=env, namespaces=hosts[:2])


def wait_for_late_data() -> None:
    hvd.allreduce(torch.ones(100_000))
    # Rank 1 lives, and its data arrive later than a lost rank is given up.
    arm_failpoints("data.receive:1:late=2500" if hvd.rank() == 0 else "")
    sums = hvd.allreduce(torch.ones(100_000), op=hvd.Sum)
    arm_failpoints("")
    assert (sums == hvd.size()).all()


def test_a_live_rank_whose_data_are_late_is_waited_for_by_default():
    env = {"TORCH_RING_TIMEOUT": "0", "TORCH_RING_HEARTBEAT_TIMEOUT": "1"}
    run(wait_for_late_data, 2, transport="tcp", env=env)


def ask_for_other_things_beside_a_thread() -> tuple[str, str]:
    with contextlib.ExitStack() as stack:
        end = threading.Event()
        thread = threading.Thread(target=end.wait)
        thread.start()
        stack.callback(thread.join)
        stack.callback(end.set)
        outcome = error_of(lambda: hvd.allreduce(torch.ones(3), name=f"of rank {hvd.rank()}"))
        # The job goes on.
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
        return outcome


@pytest.mark.slow
def test_a_thread_that_submits_nothing_hides_no_mismatch():
    """All ranks wait for different operations: an error, after a grace for the other thread."""
    env = {"TORCH_RING_TIMEOUT": "0"}
    for kind, text in run(ask_for_other_things_beside_a_thread, 2, env=env):
        assert kind == "MismatchError", text
        assert "'of rank 0'" in text, text
        assert "'of rank 1'" in text, text


def leave_with_an_error() -> tuple[str, str] | None:
    hvd.allreduce(torch.ones(3))
    if hvd.rank() == 0:
        return error_of(lambda: hvd.allreduce(torch.ones(3), name="doomed"))
    with contextlib.suppress(RuntimeError):
        try:
            raise RuntimeError("disk full")
        finally:
            hvd.shutdown()
    return None


def test_the_other_ranks_hear_why_a_rank_has_left():
    """tests/world/test_exits.py has the other ways to leave."""
    (kind, text), _ = run(leave_with_an_error, 2)
    assert kind == "PeerLostError", text
    assert "rank 1 (pid " in text, text
    assert "left: RuntimeError: disk full at test_patience.py:" in text, text
