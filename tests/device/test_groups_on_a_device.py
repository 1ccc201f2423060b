# SPDX-License-Identifier: Apache-2.0
"""Groups of the backend ring with tensors on a stand-in for a device.

The stand-in is of another type than a GPU, to which a group gives a backend only on request:
``cpu:ring,ringdouble:ring``. From there on torch treats both alike; tests/gpu runs the same
programs on GPUs, with ``init_process_group("ring")``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import device_double
import pytest
from device_double import DEVICE, NCCL_LIBRARY
from device_groups import GROUPS, group_on, lose_a_rank_of_a_group
from pool import run

ENVIRONMENT = {"TORCH_RING_NCCL_LIBRARY": str(NCCL_LIBRARY)}


def call_in_group(program: Callable[[str], object]) -> object:
    device_double.load()
    with group_on(DEVICE):
        before = device_double.Counts.now()
        result = program(DEVICE)
        launched = device_double.Counts.now() - before
        assert launched.collectives, "NCCL was not used"
        return result


@pytest.mark.parametrize("program", GROUPS, ids=lambda program: program.__name__)
def test_in_a_group(program: Callable[[str], None]) -> None:
    run(call_in_group, 3, args=(program,), env=ENVIRONMENT, initialized=False, kind=DEVICE)


def test_a_killed_rank_of_a_group(tmp_path: Path) -> None:
    texts = run(
        call_in_group,
        3,
        args=(functools.partial(lose_a_rank_of_a_group, tmp_path),),
        env=ENVIRONMENT,
        initialized=False,
        may_die={1},
    )
    for rank in (0, 2):
        assert "rank 1 (pid " in texts[rank], texts
