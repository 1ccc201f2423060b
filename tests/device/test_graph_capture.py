# SPDX-License-Identifier: Apache-2.0
"""A capture into a CUDA graph is refused: a replay would reduce nothing."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
from pathlib import Path

import pytest
import torch
from device_double import captured
from device_runs import run_on_double
from torch.optim import SGD
from training import assert_same_on_all_ranks, loss_of, make_model

import torch_ring as hvd

# A library that counts in place of AMD's runtime.
AMD = """
static int mode_now = 0;
static int calls = 0;
int hipThreadExchangeStreamCaptureMode(int* mode) {
  const int before = mode_now;
  mode_now = *mode;
  *mode = before;
  return ++calls, 0;
}
int mode_of_amd(void) { return mode_now; }
int calls_of_amd(void) { return calls; }
"""


def poll_on_amd(folder: Path, device: str) -> None:
    """Another thread's capture does not forbid calls of the engine, and has its mode back."""
    amd = ctypes.CDLL(str(folder / "libamd.so"), mode=ctypes.RTLD_GLOBAL)
    hvd.allreduce(torch.ones(3, device=device))
    assert amd.calls_of_amd() > 0
    assert amd.calls_of_amd() % 2 == 0
    assert amd.mode_of_amd() == 0


def test_polls_beside_a_capture_on_amds_gpus(tmp_path):
    source = tmp_path / "amd.c"
    source.write_text(AMD)
    command = ["gcc", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "libamd.so")]
    subprocess.run(command, check=True, timeout=60)
    # New processes, which have not looked for AMD's runtime yet.
    run_on_double(functools.partial(poll_on_amd, tmp_path), 2, is_fresh=True)


def refuse_collectives(device: str) -> None:
    size, mine = hvd.size(), torch.ones(3, device=device)
    for collective in (lambda: hvd.grouped_allreduce([mine, mine]), lambda: hvd.allgather(mine)):
        with captured(), pytest.raises(ValueError, match="collective cannot be captured"):
            collective()
    with captured():
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [size] * 3  # of the host
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [size] * 3


def refuse_backward(device: str) -> None:
    """Refuse a pass, also one that only accumulates, before anything is sent; then go on."""
    for compression in (hvd.Compression.none, hvd.Compression.int8()):
        model = make_model().to(device)
        optimizer = hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=0.1), compression=compression
        )
        batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(hvd.rank())).to(device)
        for step in range(12):  # enough for hosts to run ahead
            optimizer.zero_grad()
            if step % 2:
                context = optimizer.no_sync() if step > 2 else contextlib.nullcontext()
                with captured(), context:
                    loss = loss_of(model, batch)
                    with pytest.raises(ValueError, match=r"(?s)no hooks.*make_graphed_callables"):
                        loss.backward()
                optimizer.zero_grad()
            loss_of(model, batch).backward()
            gradients = [weight.grad for weight in model.parameters()]
            assert_same_on_all_ranks(*(grad.cpu() for grad in gradients if grad is not None))
            optimizer.step()


@pytest.mark.parametrize("program", [refuse_collectives, refuse_backward])
def test_a_capture_is_refused(program):
    run_on_double(program, 3)
