# SPDX-License-Identifier: Apache-2.0
"""Random training programs on a stand-in for a device, against one process.

`--full` runs a thousand of them, RANDOM_PROGRAM=17 the one with that seed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import pool
import pytest
from device_runs import run_on_double
from program_runs import run_programs
from random_programs import Program, make_program

PROGRAMS, ALL_PROGRAMS = 40, 1000
ALONE = os.environ.get("RANDOM_PROGRAM")
A_PROGRAM_S = 5.0  # average on a slow machine


def run_all(
    programs: Sequence[Callable[[int], Program]], size: int, run_ahead: bool, bucket_bytes: str
) -> tuple[int, list[str]]:
    """Return the number of planned passes, and the names of refused programs."""
    program = functools.partial(run_programs, programs=programs, run_ahead=run_ahead)
    deadline_s = pool.DEADLINE_S + A_PROGRAM_S * len(programs)
    env = {"TORCH_RING_BUCKET_BYTES": bucket_bytes}
    return run_on_double(program, size, deadline_s=deadline_s, **env)[0]


# Many buckets, and one for each dtype.
@pytest.mark.parametrize("run_ahead", [False, True], ids=["agreed", "ahead"])
@pytest.mark.parametrize(("size", "bucket_bytes", "part"), [(2, "64", 0), (3, "512", 1)])
def test_random_programs(size, bucket_bytes, part, run_ahead, full):
    count = ALL_PROGRAMS if full else PROGRAMS if run_ahead else PROGRAMS // 4
    seeds = [int(ALONE)] if ALONE else range(part, count, 2)
    programs = [functools.partial(make_program, seed) for seed in seeds]
    planned, refused = run_all(programs, size, run_ahead, bucket_bytes)
    assert ALONE or bool(planned) == run_ahead, "no pass was planned, or one that should not be"
    assert ALONE or (0 < len(refused) < len(programs) if run_ahead else not refused), refused
