"""Random training programs on a stand-in for a device: weights as a simple model expects.

RANDOM_PROGRAMS=1000 runs more of them, RANDOM_PROGRAM=17 the one with that seed.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import device_double
import pool
import pytest
from device_runs import run_on_double
from program_runs import run_programs

pytestmark = device_double.needed

PROGRAMS = int(os.environ.get("RANDOM_PROGRAMS", "40"))
ALONE = os.environ.get("RANDOM_PROGRAM")
A_PROGRAM_S = 5.0  # a slow machine's, on average: the deadline of each of them is in program_runs


def seeds_of(part: int, parts: int) -> list[int]:
    return [int(ALONE)] if ALONE else list(range(part, PROGRAMS, parts))


def run_seeds(seeds: list[int], size: int, reports: Path, run_ahead: bool, **env: str) -> None:
    """Run programs; a failure shows what each rank was at, which a hang's does not tell else."""
    program = functools.partial(
        run_programs, seeds=seeds, reports=str(reports), run_ahead=run_ahead
    )
    deadline_s = pool.DEADLINE_S + A_PROGRAM_S * len(seeds)
    try:
        run_on_double(program, size, deadline_s=deadline_s, **env)
    except pool.RanksFailed as failure:
        texts = [f"--- {path.name} was at ---\n{path.read_text()}" for path in reports.iterdir()]
        raise pool.RanksFailed("\n".join([str(failure), *texts])) from None


# Many buckets, and one for each dtype.
@pytest.mark.parametrize("run_ahead", [False, True], ids=["agreed", "ahead"])
@pytest.mark.parametrize(("size", "bucket_bytes", "part"), [(2, "64", 0), (3, "512", 1)])
def test_weights_after_every_step(size, bucket_bytes, part, run_ahead, tmp_path):
    seeds = seeds_of(part, 2)
    run_seeds(seeds, size, tmp_path, run_ahead, TORCH_RING_BUCKET_BYTES=bucket_bytes)
