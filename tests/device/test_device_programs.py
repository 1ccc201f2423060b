"""The programs for accelerators on stand-ins: host memory as a device, and our own NCCL."""

from __future__ import annotations

import device_double
import pytest
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

pytestmark = device_double.needed


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


def test_adasum_on_a_stand_in():
    """Adasum needs a power of two of ranks."""
    run_on_double(mix_host_and_device, 2)
