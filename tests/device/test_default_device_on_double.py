"""A GPU as torch's default device, on a stand-in: helper tensors still lie on the CPU."""

from __future__ import annotations

import device_double
import pool
import pytest
import torch
from device_double import DEVICE, NCCL_LIBRARY

from tests.collectives.test_default_device import call_all

pytestmark = device_double.needed


def call_all_on_double(manner: str) -> None:
    device_double.load()
    call_all(DEVICE, torch.float32, manner)


@pytest.mark.parametrize("manner", ["default", "context"])
def test_public_functions_where_a_gpu_is_the_default_device(manner: str) -> None:
    env = {"TORCH_RING_NCCL_LIBRARY": str(NCCL_LIBRARY)}
    pool.run(call_all_on_double, 2, args=(manner,), env=env, initialized=False, kind=DEVICE)
