# SPDX-License-Identifier: Apache-2.0
"""`ring` for CPU tensors beside a backend for tensors on a device: "cpu:ring,cuda:nccl".

The device is a stand-in. The other backend is gloo, which refuses its tensors.
"""

from __future__ import annotations

from typing import Any

import device_double
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from tests.support.groups import default_group
from tests.support.pool import error_of, expect_error


@pytest.mark.slow
@device_double.needed
@on_ranks(2, initialized=False)
def test_each_tensor_goes_to_the_backend_of_its_device() -> None:
    device_double.load()
    with default_group(f"cpu:ring,{device_double.DEVICE}:gloo"):
        rank, size = dist.get_rank(), dist.get_world_size()
        there = torch.ones(3, device=device_double.DEVICE)
        text = expect_error("RuntimeError", "", lambda: dist.all_reduce(there))
        assert "gloo" in text.lower(), "ring would have reduced it"
        here = torch.full((3,), rank + 1.0)
        dist.all_reduce(here)
        assert here.tolist() == [size * (size + 1) / 2] * 3
        assert error_of(lambda: dist.all_reduce(torch.ones(rank + 1)))[0] == "MismatchError"
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, rank)
        assert gathered == list(range(size))
