# SPDX-License-Identifier: Apache-2.0
"""init() warns ranks that leave most of their CPUs idle, or whose threads wait for one."""

from __future__ import annotations

import math
import os
from unittest.mock import patch

import pytest
import torch
from logs import logged
from pool import run

import torch_ring as hvd
from torch_ring.setup import control_groups

BOUND = {"bound": 1}
A_GPU = {"gpus": 1}
USE = "for all ranks to use them"
WAIT = "so that threads do not wait for a CPU"


def lines(cpus: int, threads: int, machine: dict[str, float], chosen: str) -> list[str]:
    """Return the lines of init() about threads, on ranks that may run on `cpus` CPUs."""
    first = cpus * int(os.environ["RANK"]) if machine.get("bound") else 0
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.pop(name, None)
    if chosen:
        os.environ[chosen] = str(threads)
    torch.set_num_threads(threads)
    mine = set(range(first, first + cpus))
    with (
        patch("os.sched_getaffinity", lambda _pid: mine),
        patch.object(control_groups, "cpu_quota", lambda: machine.get("quota", math.inf)),
        patch("torch.cuda.device_count", lambda: machine.get("gpus", 0)),
        logged() as messages,
    ):
        hvd.init()
        hvd.shutdown()
        hvd.init()  # says nothing again
    return [message for message in messages if "thread" in message]


@pytest.mark.parametrize(
    ("ranks", "cpus", "threads", "machine", "chosen", "said"),
    [
        pytest.param(2, 8, 1, {}, "", ("1 thread", "8 CPUs", 4, USE), id="eight CPUs"),
        pytest.param(2, 64, 16, {}, "", None, id="half, as of hardware threads"),
        pytest.param(2, 64, 1, {"quota": 4}, "", None, id="a share of the quota"),
        pytest.param(2, 64, 1, {}, "OMP_NUM_THREADS", None, id="few are chosen"),
        pytest.param(2, 2, 2, {}, "", ("2 threads", "2 CPUs", 1, WAIT), id="all threads"),
        pytest.param(2, 8, 4, {}, "", None, id="half of the hardware threads"),
        pytest.param(2, 8, 8, BOUND, "", None, id="bound"),
        pytest.param(2, 8, 8, A_GPU, "", None, id="on a GPU"),
        pytest.param(
            *(2, 8, 8, {"quota": 1.5, **BOUND}, "", ("8 threads", "1.5 CPUs", 1, WAIT)),
            id="less than one of the quota",
        ),
        pytest.param(4, 16, 8, {}, "", ("8 threads", "16 CPUs", 4, WAIT), id="one for two"),
        pytest.param(4, 16, 7, {}, "", None, id="set by the program"),
        pytest.param(2, 64, 64, {}, "MKL_NUM_THREADS", None, id="many are chosen"),
    ],
)
def test_idle_cpus_and_threads_that_wait_for_one_are_told(
    ranks, cpus, threads, machine, chosen, said
):
    found, *others = run(lines, ranks, args=(cpus, threads, machine, chosen), initialized=False)
    assert others == [[]] * (ranks - 1)
    if said is None:
        assert found == []
        return
    number, there, share, gain = said
    assert found == [
        f"a rank computes with {number}, and {ranks} ranks share {there} here: set "
        f"OMP_NUM_THREADS={share} (or torch.set_num_threads, if the program calls it) {gain}, or "
        f"OMP_NUM_THREADS={threads} to keep it so"
    ]
