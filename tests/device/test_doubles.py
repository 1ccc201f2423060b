# SPDX-License-Identifier: Apache-2.0
"""The stand-ins behave as a device with streams, and as NCCL among processes."""

import contextlib
import time
from collections.abc import Callable

import device_double
import pytest
import torch
from device_double import DEVICE, delay, held_stream
from device_runs import run_on_double

import torch_ring as hvd


def check_device(_: str) -> None:
    check_streams()
    check_freed_memory()
    check_failed_device()


def test_device() -> None:
    run_on_double(check_device, 1)


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


def check_nccl(device: str) -> None:
    """A reduction waits for the streams of all ranks."""
    rank, size = hvd.rank(), hvd.size()
    hvd.allreduce(torch.ones(1, device=device))
    default, stream = torch.accelerator.current_stream(), torch.Stream(device)
    data = torch.full((300_000,), float(rank), device=device)  # does not fit in a mailbox
    torch.accelerator.synchronize()
    with stream, held_stream() if rank == 0 else contextlib.nullcontext():
        handle = hvd.allreduce_async_(data, op=hvd.Sum)
        hvd.barrier()
        with default:
            assert data.eq(rank).all()  # rank 0's stream has not reached it
        hvd.barrier()
    assert hvd.synchronize(handle).eq(sum(range(size))).all()


def test_nccl_among_processes() -> None:
    run_on_double(check_nccl, 3)
