"""init() warns ranks that leave most of their CPUs idle, as under an MPI."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch
from logs import logged
from pool import run

import torch_ring as hvd


def lines(cpus: int, threads: int, variables: dict[str, str], bound: bool) -> list[str]:
    """Return the lines of init() about threads, on ranks that may run on `cpus` CPUs."""
    first = cpus * int(os.environ["RANK"]) if bound else 0
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    torch.set_num_threads(threads)
    mine = set(range(first, first + cpus))
    with patch("os.sched_getaffinity", lambda _pid: mine), logged() as messages:
        hvd.init()
        hvd.shutdown()
        hvd.init()  # says nothing again
    return [message for message in messages if "thread" in message]


@pytest.mark.parametrize(
    ("cpus", "threads", "variables", "bound", "said"),
    [
        pytest.param(8, 1, {}, False, ("1 thread", 8, 4, 1), id="eight CPUs"),
        pytest.param(64, 8, {}, False, ("8 threads", 64, 32, 8), id="some threads"),
        pytest.param(64, 16, {}, False, None, id="half, as of hardware threads"),
        pytest.param(2, 1, {}, False, None, id="a share each"),
        pytest.param(1, 1, {}, True, None, id="bound to a core each"),
        pytest.param(64, 1, {"OMP_NUM_THREADS": "1"}, False, None, id="chosen"),
    ],
)
def test_idle_cpus_are_told(cpus, threads, variables, bound, said):
    first, second = run(lines, 2, args=(cpus, threads, variables, bound), initialized=False)
    assert second == []
    if said is None:
        assert first == []
    else:
        number, there, share, now = said
        assert first == [
            f"a rank computes with {number}, and 2 ranks share {there} CPUs here: set "
            f"OMP_NUM_THREADS={share} for all ranks to use them, or OMP_NUM_THREADS={now} to keep "
            "it so"
        ]
