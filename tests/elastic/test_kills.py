"""Ranks die in every phase, including the recovery from another death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import mortal_training
import namespaces
import pool
import pytest
import torch
from deaths_in_init import let_die
from launcher_commands import clean_environment
from mortal_training import AFTER_A_DEATH, IN_A_STEP, Plan, expected, random_plan, undisturbed
from slow import slow_after

import torch_ring as hvd
from torch_ring.setup import host_socket
from torch_ring.world import current

EPOCHS = 3


def check(plan: Plan, size: int, transport: str, folder: Path, *, shard_state: bool = False) -> int:
    """Train with deaths, check the weights; return the number of survivors."""
    results = pool.run(
        mortal_training.train,
        size,
        args=(plan, EPOCHS, str(folder), shard_state),
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
    victim = 0 if place == "checkpoint" else victim  # rank 0 writes it
    assert check({victim: (place, IN_A_STEP[place] + 1)}, 3, "shm", tmp_path) == 2


@pytest.mark.parametrize(
    ("victim", "place"), slow_after(3, [(i % 2, p) for i, p in enumerate(AFTER_A_DEATH)])
)
def test_another_rank_dies_in_the_recovery(victim: int, place: str, tmp_path: Path) -> None:
    victim = 0 if place == "leading" else victim  # the lowest rank leads
    assert check({2: ("bucket", 3), victim: (place, 1)}, 4, "tcp", tmp_path) == 2


def recover_without_a_deadline(place: str) -> tuple[int, int]:
    """Train; rank 3 dies in a step, and rank 1 while the others make the next world.

    A wait for a missing rank until the deadline ends the test, since a leader does not go on
    without it after a moment, or tell it of the failure.
    """
    os.environ["TORCH_RING_INIT_TIMEOUT"] = "3600"
    current._REJOIN_S = host_socket._GRACE_S = host_socket.TELL_S = 1800.0
    name, rejoin = hvd.rank(), current.rejoin

    def rejoin_and_die(*args: Any) -> None:
        if name == 1 and place == "rejoining":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == 1:
            let_die(place)
        rejoin(*args)

    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def go_on(state: Any) -> int:
        while state.step < 3:
            if state.step == 1 and name == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            total = int(hvd.allreduce(torch.tensor(name), op=hvd.Sum))
            state.step += 1
            state.commit()
        return total

    with mock.patch.object(current, "rejoin", rejoin_and_die):
        return go_on(state), hvd.size()


@pytest.mark.parametrize("place", slow_after(1, ["rejoining", "arriving", "arrived"]))
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_nobody_waits_for_a_rank_that_dies_in_the_recovery(place: str, transport: str) -> None:
    results = pool.run(
        *(recover_without_a_deadline, 4), args=(place,), transport=transport, may_die=[1, 3]
    )
    assert results == [(2, 2), None, (2, 2), None]


@pytest.mark.parametrize("place", slow_after(1, ["rejoining", "arriving", "told", "engine"]))
def test_nobody_waits_for_a_rank_that_dies_on_another_host(hosts: list[str], place: str) -> None:
    results = pool.run(
        *(recover_without_a_deadline, 4),
        args=(place,),
        transport="",
        env={"MASTER_ADDR": f"{namespaces.NETWORK}.1"},
        may_die=[1, 3],
        namespaces=[hosts[host] for host in (0, 1, 2, 0)],
    )
    assert results == [(2, 2), None, (2, 2), None]


@pytest.mark.slow
def test_ranks_die_where_chance_has_it(tmp_path: Path, full: bool) -> None:
    for seed in range(500 if full else 3):
        plan = random_plan(seed, 4, EPOCHS)
        try:
            # A plan may name a place that its rank never reaches: that rank survives.
            left = check(plan, 4, ("shm", "tcp")[seed % 2], tmp_path / str(seed))
            assert 4 - len(plan) <= left < 4
        except (AssertionError, pool.RanksFailed) as error:
            raise AssertionError(f"seed {seed}, {plan}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("levels", [(), ("hierarchy",)])
@pytest.mark.parametrize(("transport", "seed"), [("shm", 1), ("tcp", 2)])
def test_ranks_die_and_come_in_one_job(
    transport: str, seed: int, levels: tuple[str, ...], full: bool
) -> None:
    deaths, seconds = (100, 1200) if full else (4, 100)
    program = Path(__file__).with_name("kills_and_joins.py")
    done = subprocess.run(
        [sys.executable, str(program), str(deaths), str(seed), str(seconds), *levels],
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
    if levels and transport == "tcp":
        return  # each rank is a host there, and its steps of a round go with it
    weights, losses, losses_after = undisturbed(found["epochs"])
    assert found["weights"] == pytest.approx(weights, rel=1e-9)
    if levels:
        # DiLoCo's step() agrees after the inner step. If that fails, the batch is done again with
        # the weights of its step, which is passed over: once a death at most.
        pairs = zip(found["losses"], losses, strict=True)
        again = [i for i, (one, other) in enumerate(pairs) if one != pytest.approx(other, rel=1e-9)]
        assert len(again) <= deaths
        for index in again:
            losses[index] = losses_after[index]
    assert found["losses"] == pytest.approx(losses, rel=1e-9)
