# SPDX-License-Identifier: Apache-2.0
"""Failures of NCCL and of a device, produced by stand-ins: an error on all ranks in time."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import signal
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
from torch_ring._C import launch_allreduce
from torch_ring.world import current


def until_noticed() -> None:
    while True:
        hvd.allreduce(torch.ones(3))
        time.sleep(0.01)


def run_without_nccl(device: str) -> tuple[str, str]:
    if hvd.rank() == 1:
        os.environ["TORCH_RING_NCCL_LIBRARY"] = "/nowhere/libnccl.so.2"
    hvd.shutdown()
    hvd.init()
    first = error_of(lambda: hvd.allreduce(torch.ones(3, device=device), name="a"))
    assert error_of(lambda: hvd.allreduce(torch.ones(3, device=device), name="a")) == first
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
    return first


def test_a_rank_without_nccl_is_named_on_all_ranks():
    for rank, (kind, text) in enumerate(run_on_double(run_without_nccl, 3)):
        assert kind == "InvalidArgumentError"
        assert text.startswith(f"rank {rank}: allreduce 'a' float32 [3] Average on "), text
        assert "rank 1 (" in text
        assert "/nowhere/libnccl.so.2" in text
        assert "rank 0 (" not in text


def begin_badly(fault: str, device: str) -> tuple[str, str]:
    """Return the error of the first collective on a device."""
    uuid = "GPU-1" if fault == "one GPU" and hvd.rank() != 1 else ""
    with device_double.faults() as faults, device_double.shared_gpu(uuid):
        if fault == "versions":
            faults.version = 22703 + 100 * (hvd.rank() == 0)
        if fault == "hangs":
            faults.init_hangs = 1
        return error_of(lambda: hvd.allreduce(torch.ones(3, device=device)))


@pytest.mark.parametrize(
    ("fault", "env", "words"),
    [
        ("versions", {}, r"rank 0 \(.*\) has 2\.28\.3, rank 1 \(.*\) has 2\.27\.3"),
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


def test_the_start_of_nccl_has_a_deadline():
    program = functools.partial(begin_badly, "hangs")
    failures = run_on_double(program, 2, TORCH_RING_TIMEOUT="0.5")
    assert any(kind == "TimeoutError" for kind, _ in failures), failures
    assert any("ncclCommInitRankConfig" in text for _, text in failures), failures


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


def wait_for_calls_in_progress(device: str) -> None:
    with device_double.faults() as faults:
        faults.in_progress = 3
        for count in (3, 5000):
            result = hvd.allreduce(torch.ones(count, device=device), op=hvd.Sum)
            assert (result.cpu() == hvd.size()).all()


def test_calls_in_progress_are_waited_for():
    run_on_double(wait_for_calls_in_progress, 2)


def fail_inside_nccl(hangs: bool, passed: Path, device: str) -> tuple[str, str]:
    """The next call on all ranks raises an error that NCCL reported late; a new init() works.

    So it does if NCCL hangs when it is aborted.
    """
    mine = torch.ones(3, device=device)
    hvd.allreduce(mine)

    def until_noticed() -> None:
        while True:
            hvd.allreduce(mine, name="x")

    with device_double.faults() as faults:
        faults.end_hangs = hangs
        pool.all_have_passed(passed, hvd.size())  # from now on aborts are counted, or hang
        faults.async_error = 3 * (hvd.rank() == 1)  # ncclInternalError
        failure = error_of(until_noticed)
        if not hangs:  # by the engine's thread, if no thread waits
            assert pool.eventually(lambda: faults.aborted == 1)
        hvd.shutdown()
        if hangs:
            assert faults.freed == 0
            faults.async_error = faults.end_hangs = 0
            assert pool.eventually(lambda: faults.freed == 1, 20)
    hvd.init()
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [hvd.size()] * 3
    return failure


@pytest.mark.parametrize(("hangs", "timeout"), [(False, "30"), (True, "1")])
def test_an_error_inside_nccl_ends_the_job_and_another_can_begin(hangs, timeout, tmp_path):
    program = functools.partial(fail_inside_nccl, hangs, tmp_path)
    results = run_on_double(program, 2, TORCH_RING_TIMEOUT=timeout)
    (kind, text), (own_kind, own_text) = results
    assert own_kind == "RingError"
    assert "the double's error" in own_text
    assert kind == "PeerLostError"
    assert "rank 1 (" in text
    assert "the double's error" in text


def lose_a_rank_that_has_not_launched(passed: Path, device: str) -> tuple[str, str]:
    """Rank 1 dies while the others have launched without it, and make no calls."""
    mine = torch.ones(3, device=device)
    hvd.allreduce(mine)
    engine = current.engine()
    if hvd.rank() == 1:
        pool.all_have_passed(passed, hvd.size())
        os.kill(os.getpid(), signal.SIGKILL)
    launched = launch_allreduce(engine, mine, hvd.Sum, 1.0, 1.0)
    pool.all_have_passed(passed, hvd.size())
    mine.cpu()  # the current stream waits for nothing
    while not launched.done():
        time.sleep(0.01)  # would take forever without an abort of the device
    assert error_of(launched.wait)[0] == "PeerLostError"
    return error_of(lambda: launch_allreduce(engine, mine, hvd.Sum, 1.0, 1.0))


def test_streams_do_not_wait_for_a_dead_rank(tmp_path):
    # test_hardships.py has a death after all have launched.
    program = functools.partial(lose_a_rank_that_has_not_launched, tmp_path)
    results = run_on_double(program, 3, may_die={1})
    for rank in (0, 2):
        kind, text = results[rank]
        assert kind == "PeerLostError"
        assert "rank 1 (pid " in text, text


def hang_on_the_stream(device: str) -> tuple[str, str]:
    mine = torch.ones(3, device=device)
    hvd.allreduce(mine)
    with device_double.faults() as faults:
        faults.hang = 1
        result = hvd.allreduce(mine, op=hvd.Sum)
        result.cpu()  # ends when the communicator is aborted
        failure = error_of(lambda: hvd.allreduce(mine))
        assert faults.aborted == 1
    return failure


def test_a_collective_on_a_stream_has_a_deadline():
    # The start of NCCL has this deadline, too.
    failures = run_on_double(hang_on_the_stream, 2, TORCH_RING_TIMEOUT="2")
    for kind, text in failures:
        assert kind == "TimeoutError", text
        assert "has not ended within 2" in text, text


def end_one_by_one(passed: Path, device: str) -> None:
    """The ranks end and begin again, each while the others still use the device."""
    size, own = hvd.size(), hvd.rank()
    mine = torch.ones(3, device=device)
    with device_double.faults() as faults, logged() as log:
        for world in (1, 2):
            assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [size] * 3
            for rank in reversed(range(size)):
                ended = passed / f"{world}.{rank}"
                if rank == own:
                    assert faults.destroyed == world - 1
                    hvd.shutdown()
                    ended.touch()
                assert pool.eventually(ended.exists)
                assert (mine + rank).tolist() == [1 + rank] * 3
            assert pool.eventually(lambda world=world: faults.freed == world)
            assert (faults.aborted, faults.destroyed) == (0, world)
            hvd.init()
    assert "left behind" not in " ".join(log)


def test_an_end_waits_for_no_rank_that_goes_on(tmp_path):
    run_on_double(functools.partial(end_one_by_one, tmp_path), 3)


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
