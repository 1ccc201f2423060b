# SPDX-License-Identifier: Apache-2.0
"""The programs for accelerators on stand-ins: host memory as a device, and our own NCCL."""

from __future__ import annotations

import pytest
import torch
from device_compression import COMPRESSION
from device_data import DATA
from device_float16 import FLOAT16
from device_gradients import GRADIENTS
from device_jobs import JOBS
from device_launches import LAUNCHES
from device_operations import OPERATIONS, mix_host_and_device
from device_places import PLACES
from device_runs import run_on_double
from device_training import TRAINING

import torch_ring as hvd
from tests.collectives.test_default_device import call_all


@pytest.mark.parametrize(
    "program",
    [
        *OPERATIONS,
        *LAUNCHES,
        *FLOAT16,
        *COMPRESSION,
        *PLACES,
        *TRAINING,
        *GRADIENTS,
        *JOBS,
        *DATA,
    ],
    ids=lambda program: program.__name__,
)
def test_on_a_stand_in(program):
    run_on_double(program, 3)  # on a device no algorithm depends on the size ...


@pytest.mark.parametrize("program", OPERATIONS, ids=lambda program: program.__name__)
def test_alone_on_a_stand_in(program):
    run_on_double(program, 1)  # ... except on a single rank, which sends nothing


def call_all_anew(device: str) -> None:
    hvd.shutdown()  # init() is called with the default device, too
    call_all(device, torch.float32)


@pytest.mark.parametrize("program", [call_all_anew, mix_host_and_device])
def test_by_two_on_a_stand_in(program):
    run_on_double(program, 2)
