"""Tests on GPUs; one GPU is enough for all ranks, each of which is a host of its own to NCCL.

NCCL refuses two ranks of one host on one GPU. Between hosts it uses sockets, here the loopback
interface's: what these tests show is whether results are right, and nothing about speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pool
import pytest
import torch
from device_data import DATA
from device_jobs import JOBS, lose_a_rank
from device_launches import LAUNCHES
from device_operations import OPERATIONS
from device_training import TRAINING

import torch_ring as hvd

# The ranks' processes come from a server that knows nothing of CUDA: to ask for it here is safe.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "TORCH_RING_TIMEOUT": "60",
}
# Kernels of processes that share a GPU take turns of milliseconds, in every step of a ring.
DEADLINE_S = 200.0


def call_on_gpu(program: Callable[[str], object]) -> object:
    # Read by NCCL once in a process, which may serve several tests.
    os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return program("cuda")


def run(program: Callable[[str], object], size: int, **options: Any) -> list[Any]:
    """Call ``program("cuda")`` on `size` ranks and return what each returned."""
    options = {"env": ENVIRONMENT, "deadline_s": DEADLINE_S, **options}
    return pool.run(call_on_gpu, size, args=(program,), **options)


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_is_named_and_nobody_waits_for_it(size):
    texts = run(lose_a_rank, size, may_die={1}, deadline_s=60)
    for rank in set(range(size)) - {1}:
        assert "rank 1 (pid " in texts[rank], texts


def check_that_capture_is_refused(device: str) -> None:
    mine = torch.ones(3, device=device)
    hvd.allreduce(mine)
    torch.cuda.synchronize()
    message = "cannot be captured into a CUDA graph"
    with pytest.raises(ValueError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        hvd.allreduce_(mine)
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [hvd.size()] * 3


@pytest.mark.parametrize("size", [1, 2])
def test_a_graph_cannot_have_collectives(size):
    run(check_that_capture_is_refused, size)


# The stacked decorators make the size the outer loop: the longest tests come last.
@pytest.mark.parametrize(
    "program",
    [*JOBS, *TRAINING, *DATA, *LAUNCHES, *OPERATIONS],
    ids=lambda program: program.__name__,
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_on_gpu(size, program):
    run(program, size)
