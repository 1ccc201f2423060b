"""The stand-ins behave as a device with streams, and as NCCL among processes."""

import contextlib
import copy
import ctypes
import itertools
import os
import pickle
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
from torch import nn

import torch_ring as hvd

pytestmark = device_double.needed


def test_device() -> None:
    run(check_device, 1, initialized=False)  # a new process: autograd counts devices only once


def check_device() -> None:
    device_double.load()
    check_operators()
    check_training()
    check_streams()
    check_freed_memory()
    check_limit_of_memory()
    check_pools_of_streams()
    check_failed_device()


def check_operators() -> None:
    x = torch.empty(3, device=DEVICE).fill_(2)
    assert x.device == torch.device(DEVICE, 0)
    y = x + 1
    assert x.mul_(3) is x
    assert torch.equal(x.cpu(), torch.full((3,), 6.0))
    assert torch.equal(x + y, torch.full((3,), 9.0).to(DEVICE))
    assert y[1].item() == 3

    grid = torch.arange(6.0, device=DEVICE).reshape(2, 3)
    assert grid.t().contiguous().flatten().tolist() == [0, 3, 1, 4, 2, 5]
    grid[:, 1].zero_()
    assert grid.tolist() == [[0, 0, 2], [3, 0, 5]]
    assert grid.unfold(1, 2, 1).shape == (2, 2, 2)
    for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.bool):
        assert torch.equal(grid.to(dtype).cpu(), grid.cpu().to(dtype))
    assert grid.resize_(3, 4).flatten()[:6].tolist() == [0, 0, 2, 3, 0, 5]

    tensors = [torch.zeros(3, device=DEVICE), torch.zeros(2, device=DEVICE)]
    torch._foreach_copy_(tensors, [torch.ones(3, device=DEVICE), torch.full((2,), 2.0)])
    torch._foreach_mul_(tensors, 2.0)
    assert [t.tolist() for t in tensors] == [[2, 2, 2], [4, 4]]

    other = torch.ones(2, device=f"{DEVICE}:1")
    assert (other + 1).device.index == 1
    assert torch.equal(other.to(f"{DEVICE}:0").cpu(), torch.ones(2))


def check_training() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1)
    )
    data = torch.randn(5, 1, 4, 4)
    on_device = copy.deepcopy(net).to(DEVICE)
    for model, inputs in ((net, data), (on_device, data.to(DEVICE))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    for a, b in zip(net.parameters(), on_device.parameters(), strict=True):
        assert b.device.type == DEVICE
        assert torch.equal(a, b.cpu())
    restored = pickle.loads(pickle.dumps(on_device.state_dict()))
    assert restored["0.weight"].device.type == DEVICE
    assert torch.equal(restored["0.weight"], on_device[0].weight)


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


def check_limit_of_memory() -> None:
    kept = torch.zeros(1 << 20, device=DEVICE)
    torch.ops.ringdouble.limit_memory(64 << 20)
    try:
        freed = [torch.zeros(1 << 20, device=DEVICE) for _ in range(12)]
        del freed
        with torch.Stream(DEVICE) as stream:
            delay(50)
        before = device_double.Counts.now()
        torch.zeros(6 << 20, device=DEVICE)
        assert (device_double.Counts.now() - before).host_waits == 1
        assert stream.query()
        with pytest.raises(RuntimeError, match="out of memory"):
            torch.zeros(17 << 20, device=DEVICE)
    finally:
        torch.ops.ringdouble.limit_memory(2 << 30)
    assert kept.sum() == 0


def check_pools_of_streams() -> None:
    for priority in (0, -1):
        streams = [torch.Stream(DEVICE, priority=priority) for _ in range(64)]
        assert len({stream.native_handle for stream in streams}) == 32
        assert streams[:32] == streams[32:]


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

    # From each to each other, all at once; and rank 0 is idle in the second group.
    got = torch.zeros(size, count, device=DEVICE)
    mine = torch.full((count,), float(rank), device=DEVICE)
    torch.accelerator.synchronize()
    for first in (0, 1):
        library.ncclGroupStart()
        for peer in range(first, size):
            if peer == rank or rank < first:
                continue
            library.ncclSend(*pointers(mine), count, FLOAT32, peer, comm, queue)
            library.ncclRecv(*pointers(got[peer]), count, FLOAT32, peer, comm, queue)
        library.ncclGroupEnd()
        await_launch(library, comm)
    stream.synchronize()
    assert got.sum(1).tolist() == [peer * count * (peer != rank) for peer in range(size)]

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
