# SPDX-License-Identifier: Apache-2.0
"""Failures of NCCL and of a device, produced by stand-ins: an error on all ranks in time.

tests/cpp has more of them: missing and unlike libraries, launches that are not taken, hanging ends.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import device_double
import pool
import pytest
import torch
from device_runs import run_on_double
from logs import logged
from pool import error_of

import torch_ring as hvd


def until_noticed() -> None:
    while True:
        hvd.allreduce(torch.ones(3))
        time.sleep(0.01)


def begin_badly(fault: str, device: str) -> tuple[str, str]:
    """Return the error of the first collective on a device."""
    uuid = "GPU-1" if fault == "one GPU" and hvd.rank() != 1 else ""
    with device_double.shared_gpu(uuid):
        return error_of(lambda: hvd.allreduce(torch.ones(3, device=device)))


@pytest.mark.parametrize(
    ("fault", "env", "words"),
    [
        (
            "one GPU",
            {},
            r"rank 0 \([^)]*\), rank 2 \([^)]*\) use one GPU \(GPU-1\).*"
            r"torch\.cuda\.set_device\(hvd\.local_rank\(\) % torch\.cuda\.device_count\(\)\)",
        ),
        ("blocking", {"NCCL_COMM_BLOCKING": "1"}, "NCCL_COMM_BLOCKING is set"),
    ],
)
def test_nccl_that_cannot_begin_is_refused(fault, env, words):
    for kind, text in run_on_double(functools.partial(begin_badly, fault), 3, **env):
        assert kind == "InvalidArgumentError"
        assert re.search(words, text, re.DOTALL), text
        assert fault != "one GPU" or "rank 1 (" not in text


def share_a_gpu_on_purpose(variable: str, device: str) -> None:
    os.environ[variable] = str(hvd.rank() + 1)
    with device_double.shared_gpu("GPU-1"):
        result = hvd.allreduce(torch.ones(3, device=device), op=hvd.Sum)
    del os.environ[variable]
    assert result.tolist() == [hvd.size()] * 3


@pytest.mark.parametrize("variable", ["NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"])
def test_ranks_share_a_gpu_on_purpose(variable):
    run_on_double(functools.partial(share_a_gpu_on_purpose, variable), 2)


def begin_apart(folder: Path, device: str) -> None:
    """NCCL is slow to begin on rank 1 alone."""
    mine = torch.ones(3, device=device)
    with device_double.faults() as faults:
        faults.init_hangs = hvd.rank() == 1

        def go_on() -> None:
            if hvd.rank() == 0:
                early = pool.eventually(begun.is_set, 1)
                (folder / "seen").touch()
                assert not early
            else:
                assert pool.eventually((folder / "seen").exists)
                faults.init_hangs = 0

        begun = threading.Event()
        with ThreadPoolExecutor() as threads:
            seen = threads.submit(go_on)
            handle = hvd.allreduce_async(mine, op=hvd.Sum)
            result = hvd.synchronize(handle)  # waits until it is enqueued
            begun.set()
            seen.result()
    assert result.tolist() == [hvd.size()] * 3


def test_no_rank_goes_on_before_nccl_has_begun_on_all(tmp_path):
    run_on_double(functools.partial(begin_apart, tmp_path), 2)


def fail_inside_nccl(passed: Path, device: str) -> tuple[str, str]:
    """The next call on all ranks raises an error that NCCL reported late; a new init() works."""
    mine = torch.ones(3, device=device)
    hvd.allreduce(mine)

    def until_noticed() -> None:
        while True:
            hvd.allreduce(mine, name="x")

    with device_double.faults() as faults:
        pool.all_have_passed(passed, hvd.size())  # from now on aborts are counted
        faults.async_error = 3 * (hvd.rank() == 1)  # ncclInternalError
        failure = error_of(until_noticed)
        # By the engine's thread, if no thread waits.
        assert pool.eventually(lambda: faults.aborted == 1)
        hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [hvd.size()] * 3
    return failure


def test_an_error_inside_nccl_ends_the_job_and_another_can_begin(tmp_path):
    results = run_on_double(functools.partial(fail_inside_nccl, tmp_path), 2)
    (kind, text), (own_kind, own_text) = results
    assert own_kind == "RingError"
    assert "the double's error" in own_text
    assert kind == "PeerLostError"
    assert "rank 1 (" in text
    assert "the double's error" in text


def remove_a_set(device: str) -> None:
    with device_double.faults() as faults, logged() as log:
        mine = torch.ones(3, device=device)
        some = hvd.add_process_set([0, 1])
        if some.included():
            assert hvd.allreduce(mine, op=hvd.Sum, process_set=some).tolist() == [2] * 3
        hvd.remove_process_set(some)
        assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [hvd.size()] * 3
        assert pool.eventually(lambda: faults.destroyed == (hvd.rank() < 2))
        assert faults.aborted == 0
    assert "left behind" not in " ".join(log)


def test_a_removed_set_ends_its_communicator():
    run_on_double(remove_a_set, 3)


# --- a device on which every call fails, as after an assertion in a kernel


def fail_while_work_is_pending(passed: Path, device: str) -> tuple[str, str]:
    """Rank 1's device fails while a collective waits there; the engine's thread finds it."""
    mine = torch.ones(3, device=device)
    hvd.allreduce(mine)
    with device_double.faults() as faults:
        faults.hang = 1
        hvd.allreduce_async_(mine)
        pool.all_have_passed(passed, hvd.size())
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
        pool.all_have_passed(passed, hvd.size())
        assert error_of(until_noticed)[0] != "nothing"
        hvd.shutdown()
    value = last.value
    assert not pool.eventually(lambda: last.value != value, 0.5)


def test_a_device_has_no_work_when_its_memory_is_freed(tmp_path):
    run_on_double(functools.partial(look_after_the_end, tmp_path), 2, TORCH_RING_TIMEOUT="2")


def reduce_between_hosts(device: str) -> tuple[str, str]:
    return error_of(lambda: hvd.allreduce(torch.ones(3, device=device)))


@pytest.mark.parametrize("tls", ["1", "cpu"])
def test_data_in_the_clear_are_refused_or_accepted_by_name(tls: str) -> None:
    env = {"TORCH_RING_TRANSPORT": "tcp", "TORCH_RING_TLS": tls}
    for kind, text in run_on_double(reduce_between_hosts, 2, **env):
        assert kind == ("nothing" if tls == "cpu" else "InvalidArgumentError"), text
        assert tls == "cpu" or "NCCL sends tensors between hosts in the clear" in text
