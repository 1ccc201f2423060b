# SPDX-License-Identifier: Apache-2.0
"""The stand-in behaves as a device with streams; most tests here would find nothing without."""

import torch
from device_double import DEVICE, held_stream
from device_runs import run_on_double


def check_device(_: str) -> None:
    check_streams()
    check_freed_memory()


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
