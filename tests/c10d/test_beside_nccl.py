# SPDX-License-Identifier: Apache-2.0
"""`ring` for CPU tensors beside a backend for tensors on a device: "cpu:ring,cuda:nccl".

With NCCL the test goes as far as NCCL needs no GPU. On a stand-in for a device, the other backend
is gloo, which refuses its tensors.
"""

from __future__ import annotations

from typing import Any

import device_double
import pytest
import torch
import torch.distributed as dist

from tests.support.groups import default_group
from tests.support.pool import error_of, run

WANTS_A_GPU = (
    "ProcessGroupNCCL is only supported with GPUs, no GPUs found",
    "nccl2 requires at least one CUDA device",  # torch 2.15 and later
)


def use_both() -> None:
    device_double.load()
    with default_group(f"cpu:ring,{device_double.DEVICE}:gloo"):
        rank, size = dist.get_rank(), dist.get_world_size()
        there = torch.ones(3, device=device_double.DEVICE)
        kind, text = error_of(lambda: dist.all_reduce(there))
        assert kind == "RuntimeError", "ring would have reduced it"
        assert "gloo" in text.lower()
        here = torch.full((3,), rank + 1.0)
        dist.all_reduce(here)
        assert here.tolist() == [size * (size + 1) / 2] * 3
        assert error_of(lambda: dist.all_reduce(torch.ones(rank + 1)))[0] == "MismatchError"
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, rank)
        assert gathered == list(range(size))


@pytest.mark.slow
@device_double.needed
def test_each_tensor_goes_to_the_backend_of_its_device() -> None:
    run(use_both, 2, initialized=False)


def beside_nccl() -> tuple[str, str]:
    def start() -> None:
        with default_group("cpu:ring,cuda:nccl"):
            pass

    return error_of(start)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_beside_ring_wants_a_gpu_and_no_more() -> None:
    for kind, text in run(beside_nccl, 2, initialized=False):
        assert kind in ("ValueError", "RuntimeError", "DistBackendError")
        assert any(demand in text for demand in WANTS_A_GPU), text
