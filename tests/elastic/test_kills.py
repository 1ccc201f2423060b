"""Ranks that die in every phase, also in the recovery from another death."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mortal_training
import pool
import pytest
from launcher_commands import clean_environment
from mortal_training import AFTER_A_DEATH, IN_A_STEP, Plan, expected, random_plan, undisturbed
from slow import slow_after

EPOCHS = 3


def check(plan: Plan, size: int, transport: str, folder: Path) -> int:
    """Train with deaths, check the weights; return the number of ranks that are left."""
    results = pool.run(
        mortal_training.train,
        size,
        args=(plan, EPOCHS, str(folder)),
        transport=transport,
        may_die=list(plan),
    )
    safe = [results[rank] for rank in range(size) if rank not in plan]
    for left, weights in safe:
        assert (left, weights) == safe[0]
        assert weights == pytest.approx(expected(EPOCHS), rel=1e-12)
    return int(safe[0][0])


@pytest.mark.parametrize(
    ("victim", "place"), slow_after(4, [(i % 3, p) for i, p in enumerate(IN_A_STEP)])
)
def test_a_rank_dies_in_a_step(victim: int, place: str, tmp_path: Path) -> None:
    victim = 0 if place == "checkpoint" else victim  # which rank 0 writes
    assert check({victim: (place, IN_A_STEP[place] + 1)}, 3, "shm", tmp_path) == 2


@pytest.mark.parametrize(
    ("victim", "place"), slow_after(3, [(i % 2, p) for i, p in enumerate(AFTER_A_DEATH)])
)
def test_another_rank_dies_in_the_recovery(victim: int, place: str, tmp_path: Path) -> None:
    victim = 0 if place == "leading" else victim  # which the lowest does
    assert check({2: ("bucket", 3), victim: (place, 1)}, 4, "tcp", tmp_path) == 2


@pytest.mark.slow
def test_ranks_die_where_chance_has_it(tmp_path: Path, full: bool) -> None:
    for seed in range(500 if full else 3):
        plan = random_plan(seed, 4, EPOCHS)
        try:
            # A plan may name a place to which its rank does not come: that one lives.
            left = check(plan, 4, ("shm", "tcp")[seed % 2], tmp_path / str(seed))
            assert 4 - len(plan) <= left < 4
        except (AssertionError, pool.RanksFailed) as error:
            raise AssertionError(f"seed {seed}, {plan}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "seed"), [("shm", 1), ("tcp", 2)])
def test_ranks_die_and_come_in_one_job(transport: str, seed: int, full: bool) -> None:
    deaths, seconds = (100, 1200) if full else (8, 100)
    program = Path(__file__).with_name("kills_and_joins.py")
    done = subprocess.run(
        [sys.executable, str(program), str(deaths), str(seed), str(seconds)],
        env=clean_environment(
            PYTHONPATH=os.pathsep.join(filter(None, sys.path)), TORCH_RING_TRANSPORT=transport
        ),
        capture_output=True,
        text=True,
        timeout=seconds + 60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["killed"] == deaths
    assert found["joined"] >= deaths - 3  # of four ranks, one lives to the end
    weights, losses = undisturbed(found["epochs"])
    assert found["weights"] == pytest.approx(weights, rel=1e-9)
    assert found["losses"] == pytest.approx(losses, rel=1e-9)
