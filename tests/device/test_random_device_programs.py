# SPDX-License-Identifier: Apache-2.0
"""Random training programs on a stand-in for a device: weights as expected by a simple model.

`--full` runs a thousand of them, RANDOM_PROGRAM=17 the one with that seed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pool
import pytest
from device_runs import run_on_double
from hostile_programs import HOSTILE, ends, hostile
from program_runs import ENDINGS, run_programs
from random_programs import Program, make_program

PROGRAMS, ALL_PROGRAMS = 30, 1000
both_ways = pytest.mark.parametrize("run_ahead", [False, True], ids=["agreed", "ahead"])
ALONE = os.environ.get("RANDOM_PROGRAM")
A_PROGRAM_S = 5.0  # average on a slow machine; the deadline of each one is in program_runs


def run_all(
    programs: Sequence[Callable[[int], Program]],
    size: int,
    reports: Path,
    run_ahead: bool,
    **env: str,
) -> tuple[int, int]:
    """Return the numbers of planned passes and refused programs.

    A failure shows each rank's place, even after a hang.
    """
    on_device = functools.partial(
        run_programs, programs=programs, reports=str(reports), run_ahead=run_ahead
    )
    deadline_s = pool.DEADLINE_S + A_PROGRAM_S * len(programs)
    try:
        return run_on_double(on_device, size, deadline_s=deadline_s, **env)[0]
    except pool.RanksFailed as failure:
        texts = [f"--- {path.name} was at ---\n{path.read_text()}" for path in reports.iterdir()]
        raise pool.RanksFailed("\n".join([str(failure), *texts])) from None


# Many buckets, and one for each dtype.
@both_ways
@pytest.mark.parametrize(("size", "bucket_bytes", "part"), [(2, "64", 0), (3, "512", 1)])
def test_random_programs(size, bucket_bytes, part, run_ahead, tmp_path, full):
    count = ALL_PROGRAMS if full else PROGRAMS if run_ahead else PROGRAMS // 4
    seeds = [int(ALONE)] if ALONE else range(part, count, 2)
    programs = [functools.partial(make_program, seed) for seed in seeds]
    planned, _ = run_all(programs, size, tmp_path, run_ahead, TORCH_RING_BUCKET_BYTES=bucket_bytes)
    assert ALONE or bool(planned) == run_ahead, "no pass was planned, or one that should not be"


def test_hostile_programs(tmp_path):
    programs = [functools.partial(hostile, name) for name in HOSTILE]
    _, refused = run_all(programs, 3, tmp_path, True, TORCH_RING_BUCKET_BYTES="64")
    assert 0 < refused < len(HOSTILE)


@pytest.mark.parametrize("ending", ENDINGS)
@both_ways
def test_a_misdeed_is_an_error_on_all_ranks(ending, run_ahead, tmp_path):
    # Before the first planned pass, and after it.
    programs = [functools.partial(ends, ending, first) for first in ((2, 9) if run_ahead else (2,))]
    timeout = "3" if ending == "waits elsewhere" else "20"
    env = {"TORCH_RING_BUCKET_BYTES": "1", "TORCH_RING_TIMEOUT": timeout}
    _, refused = run_all(programs, 3, tmp_path, run_ahead, **env)
    assert refused == 0
