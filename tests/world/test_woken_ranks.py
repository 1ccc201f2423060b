"""A rank that was stopped in the middle of a collective, and wakes up after the others gave up."""

import os
import signal
import threading

import pytest
import torch
from pool import error_of, eventually, run

import torch_ring as hvd

COUNT = 48 << 20  # elements: rank 1 writes its half of them for tens of milliseconds


def stop_the_writer(values: torch.Tensor, pid: int, ended: threading.Event) -> None:
    """Stop a process as soon as it writes to its part of `values`, the second half."""
    watched = values[COUNT // 2]
    while watched.item() == 1:
        if ended.is_set():
            return
    os.kill(pid, signal.SIGSTOP)


def keep_what_a_stopped_rank_writes() -> str:
    """Return what happened on rank 0: "stopped in the middle", or "too late"."""
    pids = hvd.allgather_object(os.getpid())
    values = hvd.empty_shared(COUNT).fill_(1)
    hvd.barrier()
    if hvd.rank() == 1:
        error_of(lambda: hvd.allreduce_(values, op=hvd.Sum, name="x"))
        return "woken"
    ended = threading.Event()
    thread = threading.Thread(target=stop_the_writer, args=(values, pids[1], ended))
    thread.start()
    kind, text = error_of(lambda: hvd.allreduce_(values, op=hvd.Sum, name="x"))
    ended.set()
    thread.join()
    if kind == "nothing" or values[-1].item() == 2:
        os.kill(pids[1], signal.SIGCONT)
        return "too late"
    assert kind == "TimeoutError", text
    kept = values.clone()
    os.kill(pids[1], signal.SIGCONT)
    # It writes the rest within milliseconds, wherever that is now.
    assert not eventually(lambda: not torch.equal(values, kept), 1.5)
    values.fill_(3)  # the program goes on with it
    assert (values == 3).all()
    return "stopped in the middle"


@pytest.mark.slow
def test_a_woken_rank_does_not_write_to_tensors_that_others_keep():
    for _ in range(5):
        first, second = run(
            keep_what_a_stopped_rank_writes,
            2,
            env={"TORCH_RING_TIMEOUT": "1"},
            may_die={1},
        )
        assert second in (None, "woken")
        if first == "stopped in the middle":
            return
    pytest.fail("rank 1 was never stopped in the middle")
