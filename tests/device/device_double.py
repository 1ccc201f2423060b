# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for a GPU and for NCCL in the ranks of a test: host memory and threads.

They show whether results are right, and whether streams wait where they must. Times measured on
them say nothing about a GPU.

Their streams have threads, which do not survive a fork: a test's function calls `load()` on its
rank, and no code may call it before.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import types
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest
import torch

DEVICE = "ringdouble"  # the name of its type in torch.device; its key is PrivateUse1
_LIBRARIES = Path(__file__).parents[2] / "build/cpp/plain"
NCCL_LIBRARY = _LIBRARIES / "libnccl_double.so"
_DEVICE_LIBRARY = _LIBRARIES / "libdevice_double.so"

needed = pytest.mark.skipif(not _DEVICE_LIBRARY.exists(), reason="`make doubles` builds the device")


class Faults(ctypes.Structure):
    """Faults of this process's NCCL double: NcclDoubleFaults in nccl_double.h."""

    _fields_ = [
        ("version", ctypes.c_int),
        ("in_progress", ctypes.c_int),
        ("async_error", ctypes.c_int),
        ("init_hangs", ctypes.c_int),
        ("aborted", ctypes.c_int),
        ("destroyed", ctypes.c_int),
        ("hang", ctypes.c_int),
        ("serial", ctypes.c_int),
        ("end_hangs", ctypes.c_int),
        ("freed", ctypes.c_int),
    ]


_captures = 0  # number of present captures in this process
_uuid = ""  # of this process's devices, in place of their own


@functools.cache
def load() -> None:
    """Make `DEVICE` a device of torch in this process."""
    torch.ops.load_library(str(_DEVICE_LIBRARY))
    torch.utils.rename_privateuse1_backend(DEVICE)
    module = types.ModuleType(f"torch.{DEVICE}")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        get_device_properties=_properties,
        device=_device,
        current_device=torch.accelerator.current_device_index,
        set_device=torch.accelerator.set_device_index,
        current_stream=torch.accelerator.current_stream,
        stream=lambda stream: stream,  # a stream is a context manager itself
        set_stream=torch.accelerator.set_stream,
        synchronize=torch.accelerator.synchronize,
        Stream=functools.partial(torch.Stream, DEVICE),
        Event=functools.partial(torch.Event, DEVICE),
        manual_seed_all=lambda _seed: None,  # random numbers are the CPU's
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        _is_in_bad_fork=lambda: False,
        is_current_stream_capturing=lambda: _captures > 0,
    )
    torch._register_device_module(DEVICE, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _properties(index: int) -> types.SimpleNamespace:
    """Return the properties of a device; those of other processes are other devices."""
    return types.SimpleNamespace(uuid=_uuid or f"{os.getpid():08x}-0000-0000-0000-{index + 1:012x}")


def _device(device: torch.device | str | int | None) -> torch.accelerator.device_index:
    """Return a context in which a device is the current one."""
    if device is None or isinstance(device, int):
        return torch.accelerator.device_index(device)
    return torch.accelerator.device_index(torch.device(device).index)


@functools.cache
def nccl() -> ctypes.CDLL:
    """Return the NCCL double of this process."""
    return ctypes.CDLL(str(NCCL_LIBRARY))


@contextlib.contextmanager
def faults() -> Iterator[Faults]:
    """Yield the faults of this process, which end with the block; counts begin at 0."""
    address = nccl().nccl_double_faults
    address.restype = ctypes.POINTER(Faults)
    now: Faults = address().contents
    now.aborted = now.destroyed = now.freed = 0
    usual = bytes(now)
    try:
        yield now
    finally:
        ctypes.memmove(ctypes.byref(now), usual, len(usual))


@dataclass(frozen=True)
class Counts:
    """Requests of this process to a GPU: Counts in tests/doubles/counts.h."""

    kernels: int = 0
    copies: int = 0
    recorded: int = 0  # events
    awaited: int = 0  # events, by a stream
    host_waits: int = 0
    collectives: int = 0  # launches of NCCL: calls, or groups of them
    threads: int = 0  # of NCCL, for launches
    polls: int = 0  # of launches in progress
    sleeps: int = 0  # of threads that poll

    @classmethod
    def now(cls) -> Counts:
        """Return the counts since the process began."""
        return cls(*torch.ops.ringdouble.counts())

    def __sub__(self, other: Counts) -> Counts:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Counts(*(mine - earlier for mine, earlier in pairs))


@contextlib.contextmanager
def failed_device(fails: bool = True) -> Iterator[None]:
    """Let each call for the device fail until the block ends, as after an error in a kernel."""
    torch.ops.ringdouble.set_failed(fails)
    try:
        yield
    finally:
        torch.ops.ringdouble.set_failed(False)


def delay(milliseconds: int) -> None:
    """Keep the current stream busy."""
    torch.ops.ringdouble.delay(milliseconds)


def move(module: torch.nn.Module, place: str) -> None:
    """Move a module as ``module.to(place)`` does where torch lets parameters change their device.

    Of a device that torch does not know, ``to()`` makes new parameters instead.
    """
    if "cuda" in {place, *(parameter.device.type for parameter in module.parameters())}:
        module.to(place)
        return
    for parameter in module.parameters():
        moving = [parameter] if parameter.grad is None else [parameter, parameter.grad]
        for tensor in moving:
            torch.ops.ringdouble.set_data(tensor, tensor.detach().to(place))


@contextlib.contextmanager
def held_stream() -> Iterator[None]:
    """Stop the current stream until the block ends."""
    gate = torch.ops.ringdouble.close_gate()
    try:
        yield
    finally:
        torch.ops.ringdouble.open_gate(gate)


@contextlib.contextmanager
def shared_gpu(uuid: str) -> Iterator[None]:
    """Pretend that this process's devices are one that other processes use, too."""
    global _uuid
    _uuid = uuid
    try:
        yield
    finally:
        _uuid = ""


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """Pretend that the current streams are captured into a graph until the block ends.

    Enqueued work still runs: a stand-in has no graphs.
    """
    global _captures
    _captures += 1
    try:
        yield
    finally:
        _captures -= 1
