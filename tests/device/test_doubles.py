"""The stand-ins behave as a device with streams, and as NCCL among processes."""

import contextlib
import ctypes
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import device_double
import pool
import pytest
import torch
from device_double import DEVICE, delay, held_stream
from pool import run

import torch_ring as hvd

pytestmark = device_double.needed


def test_device() -> None:
    run(check_device, 1, initialized=False)  # a new process: autograd counts devices only once


def check_device() -> None:
    device_double.load()
    check_streams()
    check_freed_memory()
    check_failed_device()


def check_streams() -> None:
    stream, event = torch.Stream(DEVICE), torch.Event(DEVICE)
    default = torch.accelerator.current_stream()
    assert stream != default
    ones, target = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    default.synchronize()
    event.wait(default)  # before it is recorded, it marks no work
    assert event.query()
    with stream, held_stream():
        assert torch.accelerator.current_stream() == stream
        target.copy_(ones)
        event.record()
        with default:
            assert target.tolist() == [0, 0, 0, 0]  # the default stream waits for nothing
            assert not event.query()
            default.wait_event(event)
            assert not default.query()
    assert torch.accelerator.current_stream() == default
    assert target.tolist() == [1, 1, 1, 1]
    assert event.query()

    with stream, held_stream():
        default.wait_event(event)  # its recording is over; a later one has no effect
        event.record()
        default.synchronize()
        assert not event.query()
    event.synchronize()
    stream.synchronize()  # an event completes a little before its stream
    assert stream.query()

    begun = time.monotonic()
    delay(20)
    default.synchronize()
    assert time.monotonic() - begun >= 0.02


def check_freed_memory() -> None:
    """The next tensor on a stream gets its freed memory at once, when other streams have passed."""
    default, stream = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    for used in (False, True):
        target, tensor = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
        memory = tensor.data_ptr()
        default.synchronize()
        with stream, held_stream():
            target.copy_(tensor)
            if used:
                tensor.record_stream(stream)
            del tensor
            other = torch.empty(4, device=DEVICE)  # of another stream
            with default:
                later = torch.full((4,), 2.0, device=DEVICE)
            assert other.data_ptr() != memory
            assert (later.data_ptr() == memory) != used
            default.synchronize()
        stream.synchronize()
        assert target.tolist() == [1 if used else 2] * 4
        assert (torch.empty(4, device=DEVICE).data_ptr() == memory) == used
        del other, later


def check_failed_device() -> None:
    stream, event, tensor = torch.Stream(DEVICE), torch.Event(DEVICE), torch.zeros(3, device=DEVICE)
    event.record()
    torch.accelerator.synchronize()
    calls: list[Callable[[], object]] = [
        torch.accelerator.synchronize,
        lambda: torch.accelerator.set_device_index(0),
        torch.accelerator.current_device_index,
        stream.query,
        stream.synchronize,
        event.query,
        event.record,
        tensor.cpu,
        lambda: tensor.add_(1),
        lambda: torch.empty(3, device=DEVICE),
    ]
    with device_double.failed_device():
        for call in calls:
            with pytest.raises(RuntimeError, match="device-side assert"):
                call()
    for call in calls:
        call()


# --- NCCL


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Config(ctypes.Structure):
    """The Config of csrc/nccl/api.h."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("others", ctypes.c_int * 7),
    ]


IN_PROGRESS = 7
FLOAT32, SUM = 7, 0


def test_nccl_among_processes() -> None:
    run(check_nccl, 3)


def check_nccl() -> None:
    device_double.load()
    library = device_double.nccl()
    comm = new_communicator(library)
    rank, size = hvd.rank(), hvd.size()
    default, stream = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    queue = ctypes.c_void_p(stream.native_handle)

    count = 300_000  # does not fit in a mailbox
    data = torch.full((count,), float(rank), device=DEVICE)
    torch.accelerator.synchronize()
    with stream, held_stream() if rank == 0 else contextlib.nullcontext():
        library.ncclAllReduce(*pointers(data, data), count, FLOAT32, SUM, comm, queue)
        await_launch(library, comm)
        hvd.barrier()
        with default:
            assert data.eq(rank).all()  # rank 0's stream has not reached it
        hvd.barrier()
    stream.synchronize()
    assert data.eq(sum(range(size))).all()

    with device_double.faults() as faults:
        faults.hang = 1
        library.ncclAllReduce(*pointers(data, data), count, FLOAT32, SUM, comm, queue)
        await_launch(library, comm)
        assert not stream.query()
        library.ncclCommAbort(comm)
        stream.synchronize()
        assert faults.aborted == 1


def new_communicator(library: ctypes.CDLL) -> ctypes.c_void_p:
    library.ncclCommInitRankConfig.argtypes = [
        ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int, ctypes.c_void_p,
    ]  # fmt: skip
    unique = UniqueId()
    if hvd.rank() == 0:
        library.ncclGetUniqueId(ctypes.byref(unique))
    unique.bytes = hvd.broadcast_object(unique.bytes, 0)
    comm = ctypes.c_void_p()
    library.ncclCommInitRankConfig(
        ctypes.byref(comm), hvd.size(), unique, hvd.rank(), ctypes.byref(Config())
    )
    await_launch(library, comm)
    return comm


def await_launch(library: ctypes.CDLL, comm: ctypes.c_void_p) -> None:
    state = ctypes.c_int(IN_PROGRESS)
    for _ in itertools.takewhile(lambda _: state.value == IN_PROGRESS, range(10_000)):
        library.ncclCommGetAsyncError(comm, ctypes.byref(state))
        time.sleep(0.001)
    assert state.value == 0


def pointers(*tensors: torch.Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def test_nccl_ends_without_a_rank_that_has_died(tmp_path):
    results = pool.run(end_beside_a_death, 2, args=(tmp_path,), may_die={1})
    assert results[0] == 0


def end_beside_a_death(passed: Path) -> int:
    device_double.load()
    library = device_double.nccl()
    comm = new_communicator(library)
    pool.all_have_passed(passed, 2)
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return library.ncclCommDestroy(comm)
