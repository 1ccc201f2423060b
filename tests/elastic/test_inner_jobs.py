# SPDX-License-Identifier: Apache-2.0
"""Separate jobs, such as an evaluation, started by a newcomer of an elastic job."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from pool import run
from ports import free_port

import torch_ring as hvd

NEWCOMER = {
    "TORCH_RING_ELASTIC_NEWCOMER": "1",
    "TORCH_RING_PROCESS": "2.1",
    "TORCH_RING_RUN_ID": "of the elastic job",
    "HOROVOD_RANK": "2",
    "HOROVOD_SIZE": "3",
}


def by_torchrun() -> None:
    hvd.init()


def by_hand() -> None:
    launcher = ("TORCHELASTIC", "LOCAL_", "GROUP_")
    for name in [name for name in os.environ if name.startswith(launcher)]:
        del os.environ[name]
    hvd.init()


def evaluate(begin: Callable[[], None]) -> tuple[int, float]:
    begin()
    size, total = hvd.size(), hvd.allreduce(torch.ones(1) + hvd.rank(), op=hvd.Sum).item()
    hvd.shutdown()
    return size, total


@pytest.mark.parametrize("begin", [by_torchrun, by_hand])
def test_a_newcomers_own_job_has_no_newcomers(begin: Callable[[], None]) -> None:
    env = NEWCOMER | ({} if begin is by_torchrun else {"MASTER_PORT": str(free_port())})
    found = run(evaluate, 2, args=(begin,), env=env, initialized=False)
    assert found == [(2, 3.0)] * 2
