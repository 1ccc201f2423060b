# SPDX-License-Identifier: Apache-2.0
"""Hardships of a device, called as device_operations are, in sizes for a GPU or for a stand-in.

Full launch queues, failed kernels, stopped and killed ranks, very many elements, all sizes of
buckets; and the calls by which launches of NCCL are polled.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import device_double
import pytest
import torch
from ahead_training import planned_passes
from device_operations import busy
from many_parameters import NUMEL, backward, make_parameters
from pool import all_have_passed, error_of
from torch import Tensor
from torch.optim import SGD
from training import assert_same_weights, joined_batches, make_model, part, train

import torch_ring as hvd
from torch_ring.world import current


def loaded_library(name: str) -> str:
    """Return the path of a library of this process, whose file's name begins so."""
    paths = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    return next(path for path in paths if Path(path).name.startswith(name))


# --- polls

# Stands before a libnccl.so.2, to which it is linked: dlsym() finds the other functions there.
COUNTING_NCCL = """
#include <dlfcn.h>
#include <atomic>
static std::atomic<long> calls{0};
extern "C" long polls() { return calls; }
extern "C" int ncclCommGetAsyncError(void* communicator, int* state) {
  using Function = int(void*, int*);
  static auto* const next = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, "ncclCommGetAsyncError"));
  ++calls;
  return next(communicator, state);
}
"""
ALLREDUCES, BUCKETS, PASSES = 200, 64, 5
BUCKET_BYTES = 4 * NUMEL


def counting_nccl(nccl: str | Path, folder: Path) -> Path:
    """Build a library that is `nccl`, and counts its polls."""
    source, library = folder / "counting_nccl.cc", folder / "libcounting_nccl.so"
    source.write_text(COUNTING_NCCL)
    command = ["g++", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)]
    # The library that a process has loaded already is found by its name, others by their path.
    command += ["-Wl,--no-as-needed", str(nccl), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


def count_polls(device: str) -> dict[str, float]:
    """Return the polls of an allreduce, and of a bucket in a pass that hosts run ahead in."""
    polls = ctypes.CDLL(os.environ["TORCH_RING_NCCL_LIBRARY"]).polls
    polls.restype = ctypes.c_long
    size, rank = hvd.size(), hvd.rank()
    tensors = [torch.full((1 << i % 15,), float(rank + i)) for i in range(ALLREDUCES)]
    tensors = [tensor.to(device) for tensor in tensors]
    hvd.allreduce(tensors[0])
    before = polls()
    for i, tensor in enumerate(tensors):
        result = hvd.allreduce(tensor, op=hvd.Sum)
        assert (result.cpu() == size * i + size * (size - 1) / 2).all()
    of_allreduces = polls() - before

    parameters = make_parameters(device, BUCKETS)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.1))
    with planned_passes() as planned:
        for number in range(2 + PASSES):
            optimizer.zero_grad()
            if number == 2:
                hvd.barrier()
                before = polls()
            backward(parameters, rank + number)
            if number >= 2:
                assert len(planned) == number - 1
            want = number + (size - 1) / 2
            assert all((parameter.grad.cpu() == want).all() for parameter in parameters)
    of_buckets = polls() - before
    return {"allreduce": of_allreduces / ALLREDUCES, "bucket": of_buckets / PASSES / BUCKETS}


# --- elements


def reduce_many_elements(count: int, device: str) -> None:
    """Reduce more elements than 32 bits count, if `count` says so."""
    size = hvd.size()
    mine = torch.full((count,), hvd.rank() + 1, dtype=torch.int8, device=device)
    mine[-1] = 7
    hvd.allreduce_(mine, op=hvd.Sum)
    result = mine.cpu()
    assert result[-1] == 7 * size
    assert (result[:-1] == size * (size + 1) // 2).all()


# --- failures


@contextlib.contextmanager
def broken(device: str) -> Iterator[None]:
    """Let a kernel fail by an assertion: from then on all calls for the device fail."""
    if device != "cuda":
        with device_double.failed_device():
            yield
        return
    there = torch.zeros(1, device=device)
    there[torch.tensor([5], device=device)]
    assert "device-side assert" in error_of(torch.cuda.synchronize)[1]
    yield


def fail_by_an_assertion(passed: Path, device: str) -> tuple[str, str]:
    """The last rank's device fails while a request of that rank waits for the others.

    Returns the error of this rank. The exit status of its process is the pool's to check.
    """
    size = hvd.size()
    mine = torch.ones(3, device=device)
    hvd.allreduce(mine)
    fails = hvd.rank() == size - 1
    if fails and size > 1:
        hvd.allreduce_async_(mine, name="m")
    with broken(device) if fails else contextlib.nullcontext():
        all_have_passed(passed, size)

        def notice() -> None:
            if not fails:
                hvd.allreduce_async_(mine, name="m")
            while size > 1:
                hvd.allreduce(torch.ones(3))
                time.sleep(0.01)
            hvd.allreduce(mine).tolist()

        kind, text = error_of(notice)
        hvd.shutdown()
    return kind, text


def stop_and_lose_ranks(passed: Path, stops: Sequence[float], device: str) -> list[int]:
    """In each round the last rank is stopped for some seconds, and then killed.

    Both while the others' devices are in an allreduce. Returns the sizes of the worlds.
    """
    state, sizes, first = hvd.elastic.ObjectState(), [], hvd.size()

    @hvd.elastic.run
    def play(state: hvd.elastic.ObjectState) -> None:
        size, is_last = hvd.size(), hvd.rank() == hvd.size() - 1
        sizes.append(size)
        mine = torch.ones(100_000, device=device)
        assert (hvd.allreduce(mine, op=hvd.Sum).cpu() == size).all()
        number = first - size
        if number == len(stops):
            return
        if is_last:
            stop_this_process(stops[number])
        assert (hvd.allreduce(mine, op=hvd.Sum).cpu() == size).all()
        if is_last:
            busy(device, 5000)  # its device comes late
        hvd.allreduce(mine, op=hvd.Sum)
        assert not torch.accelerator.current_stream().query()
        all_have_passed(passed / str(number), size)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.accelerator.synchronize()  # the allreduce never ends: it is aborted
        while True:
            hvd.allreduce(mine, name="next")

    play(state)
    return sizes


def stop_this_process(seconds: float) -> None:
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


# --- training


def weights_after(device: str, bucket_bytes: int, run_ahead: bool) -> list[Tensor]:
    """Train with buckets of that size, without a new world."""
    config = dataclasses.replace(current.config(), bucket_bytes=bucket_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(current, "config", lambda: config)
        model = make_model().to(device)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, run_ahead=run_ahead)
    train(model, optimizer, [part(batch).to(device) for batch in joined_batches(5)])
    return [weight.detach().cpu() for weight in model.parameters()]


def try_bucket_sizes(count: int, device: str) -> None:
    """Of two ranks, whose sums have the same bits in any order."""
    want = weights_after(device, 1 << 20, run_ahead=False)
    sizes = random.Random(11).choices(range(4, 1000), k=count)  # the gradients have 908 bytes
    for bucket_bytes in sizes:
        with planned_passes() as planned:
            found = weights_after(device, bucket_bytes, run_ahead=True)
        assert len(planned) == 3, bucket_bytes
        assert all(map(torch.equal, found, want)), bucket_bytes


def fill_the_launch_queue(kernels: int, late_s: float, device: str) -> None:
    """Launch many kernels before each gradient's bucket, while devices wait for a late rank.

    A host then stands in a launch, until its device gets on.
    """
    alone, model = make_model(), make_model().to(device)
    dust = torch.zeros(1, device=device)

    def launch_many(_: Tensor) -> None:
        for _ in range(kernels):
            dust.add_(1.0)

    for weight in model.parameters():
        weight.register_hook(launch_many)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))
    batches = joined_batches(5)
    for step, batch in enumerate(batches):
        if step in (1, 3) and hvd.rank() == hvd.size() - 1:
            time.sleep(late_s)
        train(model, optimizer, [part(batch).to(device)])
    train(alone, SGD(alone.parameters(), lr=0.1), batches)
    assert_same_weights(model.cpu(), alone)
