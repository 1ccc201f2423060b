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

BOUND = {"bound": True}
A_GPU = {"gpus": 1}
OR_CALL = "(or torch.set_num_threads, if the program calls it)"


def lines(cpus: int, threads: int, machine: dict[str, float], variables: dict[str, str]) -> list:
    """Return the lines of init() about threads, on ranks that may run on `cpus` CPUs."""
    first = cpus * int(os.environ["RANK"]) if machine.get("bound") else 0
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.pop(name, None)
    os.environ.update(variables)
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


def told(ranks: int, *args: object) -> list[str]:
    first, *others = run(lines, ranks, args=args, initialized=False)
    assert others == [[]] * (ranks - 1)
    return first


@pytest.mark.parametrize(
    ("cpus", "threads", "machine", "said"),
    [
        pytest.param(8, 1, {}, ("1 thread", "2 ranks share 8 CPUs", 4), id="eight CPUs"),
        pytest.param(64, 8, {}, ("8 threads", "2 ranks share 64 CPUs", 32), id="some threads"),
        pytest.param(64, 16, {}, None, id="half, as of hardware threads"),
        pytest.param(2, 1, {}, None, id="a share each"),
        pytest.param(1, 1, BOUND, None, id="bound to a core each"),
        pytest.param(64, 1, {"quota": 4}, None, id="a share of the quota"),
    ],
)
def test_idle_cpus_are_told(cpus, threads, machine, said):
    found = told(2, cpus, threads, machine, {})
    if said is None:
        assert found == []
        return
    number, there, share = said
    assert found == [
        f"a rank computes with {number}, and {there} here: set OMP_NUM_THREADS={share} {OR_CALL} "
        f"for all ranks to use them, or OMP_NUM_THREADS={threads} to keep it so"
    ]


@pytest.mark.parametrize(
    ("ranks", "cpus", "threads", "machine", "said"),
    [
        pytest.param(2, 2, 2, {}, ("2 ranks share 2 CPUs", 1), id="all threads"),
        pytest.param(2, 8, 4, {}, None, id="half of the hardware threads"),
        pytest.param(2, 8, 8, BOUND, None, id="bound"),
        pytest.param(2, 8, 8, A_GPU, None, id="on a GPU"),
        pytest.param(2, 64, 64, {"quota": 4}, ("2 ranks share 4 CPUs", 2), id="a quota"),
        pytest.param(
            2, 8, 8, {"quota": 1.5, **BOUND}, ("2 ranks share 1.5 CPUs", 1), id="less than one"
        ),
        pytest.param(4, 16, 8, {}, ("4 ranks share 16 CPUs", 4), id="one for two"),
        pytest.param(4, 16, 7, {}, None, id="chosen by the program"),
        pytest.param(3, 1, 1, {}, None, id="the least"),
    ],
)
def test_threads_that_wait_for_a_cpu_are_told(ranks, cpus, threads, machine, said):
    found = told(ranks, cpus, threads, machine, {})
    if said is None:
        assert found == []
        return
    there, share = said
    assert found == [
        f"a rank computes with {threads} threads, and {there} here: set OMP_NUM_THREADS={share} "
        f"{OR_CALL} so that threads do not wait for a CPU, or OMP_NUM_THREADS={threads} to keep it "
        "so"
    ]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
@pytest.mark.parametrize("threads", [1, 64])
def test_a_number_that_is_chosen_is_no_matter(name, threads):
    assert told(2, 64, threads, {}, {name: str(threads)}) == []
