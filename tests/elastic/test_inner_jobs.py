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


def by_arguments() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    without_torchrun()
    os.environ |= {"RANK": "2", "WORLD_SIZE": "3"}  # the newcomer's
    hvd.init(rank=rank, size=size)


def by_hand() -> None:
    without_torchrun()
    hvd.init()


def without_torchrun() -> None:
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[name]
    del os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_RANK"]
    del os.environ["LOCAL_RANK"]


def evaluate(begin: Callable[[], None]) -> tuple[int, float]:
    begin()
    size, total = hvd.size(), hvd.allreduce(torch.ones(1) + hvd.rank(), op=hvd.Sum).item()
    hvd.shutdown()
    return size, total


@pytest.mark.parametrize("begin", [by_torchrun, by_arguments, by_hand])
def test_a_newcomers_own_job_has_no_newcomers(begin: Callable[[], None]) -> None:
    env = NEWCOMER | ({} if begin is by_torchrun else {"MASTER_PORT": str(free_port())})
    found = run(evaluate, 2, args=(begin,), env=env, initialized=False)
    assert found == [(2, 3.0)] * 2
