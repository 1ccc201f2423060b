"""A device on which every call fails, as after an assertion in a kernel: an error on all ranks."""

from __future__ import annotations

import ctypes
import functools
import time
from pathlib import Path

import device_double
import torch
from device_runs import run_on_double
from pool import all_have_passed, error_of, eventually

import torch_ring as hvd

pytestmark = device_double.needed


def until_noticed() -> None:
    while True:
        hvd.allreduce(torch.ones(3))
        time.sleep(0.01)


def fail_while_work_is_pending(passed: Path, device: str) -> tuple[str, str]:
    """Rank 1's device fails while a collective waits there; the engine's thread finds it."""
    mine = torch.ones(3, device=device)
    hvd.allreduce(mine)
    with device_double.faults() as faults:
        faults.hang = 1
        hvd.allreduce_async_(mine)
        all_have_passed(passed, hvd.size())
        with device_double.failed_device(hvd.rank() == 1):
            failure = error_of(until_noticed)
            hvd.shutdown()
    return failure


def test_a_failed_device_is_told_to_all_ranks(tmp_path):
    failures = run_on_double(functools.partial(fail_while_work_is_pending, tmp_path), 3)
    for rank, (kind, text) in enumerate(failures):
        assert kind == ("RingError" if rank == 1 else "PeerLostError"), text
        assert "device-side assert triggered" in text
        assert "frame #" not in text  # of C++
        assert "Exception raised from" not in text
        assert rank == 1 or "rank 1 (" in text


def look_after_the_end(passed: Path, device: str) -> None:
    """The division of an Average stands behind an aborted collective, and takes long."""
    torch.set_num_threads(1)
    mine = torch.ones(32 << 20, device=device)
    last = ctypes.c_float.from_address(mine.data_ptr() + mine.nbytes - mine.element_size())
    hvd.allreduce(torch.ones(3, device=device))
    with device_double.faults() as faults:
        faults.hang = 1
        hvd.allreduce_async_(mine, op=hvd.Average)
        all_have_passed(passed, hvd.size())
        assert error_of(until_noticed)[0] != "nothing"
        hvd.shutdown()
    value = last.value
    assert not eventually(lambda: last.value != value, 0.5)


def test_a_device_has_no_work_when_its_memory_is_freed(tmp_path):
    run_on_double(functools.partial(look_after_the_end, tmp_path), 2, TORCH_RING_TIMEOUT="2")
