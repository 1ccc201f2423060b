# SPDX-License-Identifier: Apache-2.0
"""Ranks die in every phase, including the recovery from another death, and others come.

The survivors have the weights of a training without deaths, on one rank, their process sets, and no
ended world.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import mortal_training
import pool
import pytest
from arrivals import run_with_arrivals
from host_fixtures import run_on_hosts
from mortal_training import (
    AFTER_A_DEATH,
    IN_A_SHARDED_STEP,
    IN_A_STEP,
    KINDS,
    Plan,
    expected,
    random_plan,
)
from on_ranks import on_ranks
from slow import slow

import torch_ring as hvd
from torch_ring.optimizer.distributed_optimizer import follow_world

EPOCHS = 3


def require_survivors(results: list[Any], victims: Collection[int], tolerance: float) -> None:
    survivors = [found for name, found in enumerate(results) if name not in victims]
    epochs, weights = survivors[0][2:]
    assert survivors == [(r, len(survivors), epochs, weights) for r in range(len(survivors))]
    assert weights == pytest.approx(expected(epochs), rel=tolerance)


IN_STEPS: list[Plan] = [
    {0: ("checkpoint", 2), 1: ("forward", 11)},  # rank 0 writes them
    {1: ("bucket", 6), 0: ("hosts", 11)},
    {1: ("commit", 3), 0: ("step", 11)},
    {1: ("half a commit", 3), 0: ("stepped", 11)},
]
"""Deaths in the second epoch, and in the third."""

IN_A_RECOVERY: list[Plan] = [
    {1: ("regrouping", 1), 0: ("leading", 1)},  # the lowest rank leads
    {1: ("regrouped", 1), 0: ("init", 1)},
    {1: ("resume", 1), 0: ("joined", 1)},
    {1: ("callback", 1), 0: ("resumed", 1)},
    {1: ("sets made", 1), 0: ("sets", 1)},
    {1: ("arriving", 1), 0: ("arrived", 1)},
    {1: ("told", 1)},
]
"""Deaths after that of rank 3."""


def every_place() -> list[Any]:
    """Return deaths at all places, with all kinds of optimizers."""
    plans = [*IN_STEPS, *({3: ("bucket", 3), **plan} for plan in IN_A_RECOVERY)]
    assert {place for plan in plans for place, _ in plan.values()} == {*IN_A_STEP, *AFTER_A_DEATH}
    cases = [(KINDS[index % 3], 4, plan) for index, plan in enumerate(plans)]
    cases += [
        ("plain", 2, {0: ("forward", 1)}),  # in the first step; one is left
        ("sharded", 3, {1: ("bucket", 4), 2: ("bucket", 4)}),  # at once
        *[("sharded", 3, {victim: (place, 4)}) for victim, place in enumerate(IN_A_SHARDED_STEP)],
        # Ranks take another number of passes from then on.
        ("in passes", 4, {3: ("bucket", 4), 1: ("a later pass", 2)}),
    ]
    # Parts of the state survive in the memory of a host only.
    return [
        (*case, "shm" if case[0] == "sharded" else ("tcp", "shm")[index % 2])
        for index, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("kind", "size", "plan", "transport"), every_place(), ids=str)
def test_ranks_die(kind: str, size: int, plan: Plan, transport: str, tmp_path: Path) -> None:
    args = plan, EPOCHS, str(tmp_path), kind
    results = pool.run(mortal_training.train, size, args=args, transport=transport, may_die=[*plan])
    require_survivors(results, plan, 1e-12)


@pytest.mark.netns
@pytest.mark.parametrize(
    ("kind", "plan", "layout"),
    [
        ("sharded", {3: ("in its part", 4)}, (0, 0, 1, 1)),
        slow("sharded", {3: ("bucket", 4)}, (0, 0, 1, 2)),  # a whole host
        ("plain", {3: ("bucket", 4), 1: ("told", 1)}, (0, 1, 2, 0)),
    ],
)
def test_ranks_die_on_hosts(
    hosts: list[str], kind: str, plan: Plan, layout: Sequence[int], tmp_path: Path
) -> None:
    args = plan, EPOCHS, str(tmp_path), kind
    results = run_on_hosts(mortal_training.train, hosts, layout, *args, may_die=[*plan])
    require_survivors(results, plan, 1e-12)


@on_ranks(3, transport="tcp")
def test_parts_outside_shared_memory_are_lost_with_their_world() -> None:
    """As the elastic state does when ranks have come that share no memory, and one has died."""
    model, optimizer = mortal_training.make()
    optimizer = hvd.DistributedOptimizer(optimizer, shard_state=True)
    model(mortal_training.Samples().values).backward()
    optimizer.step()
    hvd.shutdown()
    hvd.init()
    kind, text = pool.error_of(lambda: follow_world(optimizer))
    assert (kind, "begin again from a checkpoint" in text) == ("InvalidArgumentError", True)


@pytest.mark.parametrize(
    ("kind", "size", "plan"),
    [
        ("in passes", 2, {}),
        ("sharded", 1, {}),
        ("plain", 3, {0: ("half a copy", 2)}),  # the giver dies: the second copy is the newcomer's
    ],
)
def test_one_comes(kind: str, size: int, plan: Plan, tmp_path: Path) -> None:
    stay = {*range(size + 1)} - plan.keys()
    args = plan, 2, str(tmp_path), kind, stay
    results = run_with_arrivals(mortal_training.train, size, 1, args=args, may_die=[*plan])
    require_survivors(results, plan, 1e-12)


def forget_torchrun() -> None:
    del os.environ["TORCHELASTIC_RUN_ID"]  # no other launcher has started this process


@pytest.mark.parametrize("victim", [0, slow(1)])
def test_a_rank_that_dies_before_the_function_is_missed(victim: int, tmp_path: Path) -> None:
    plan: Plan = {victim: ("before", 1)}
    results = run_with_arrivals(
        *(mortal_training.train, 3, 0),
        args=(plan, EPOCHS, str(tmp_path), "plain"),
        may_die=[victim],
        before=forget_torchrun,
    )
    require_survivors(results, plan, 1e-12)


def stop_and_continue(folder: str) -> str:
    """Rank 2 is stopped until the others train without it; they train until it has noticed."""
    name, state = hvd.rank(), hvd.elastic.ObjectState(step=0)
    pids = hvd.allgather_object(os.getpid())
    has_left = Path(folder) / "has left"

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        is_over = False
        while not is_over:
            if name == 0 and hvd.size() == 3 and state.step == 3:
                os.kill(pids[2], signal.SIGSTOP)
            if name == 0 and hvd.size() == 2:
                os.kill(pids[2], signal.SIGCONT)
            state.step += 1
            is_over = hvd.broadcast_object(has_left.exists())

    kind, _ = pool.error_of(lambda: train(state))
    if name == 2:
        has_left.touch()
    return kind


@pytest.mark.slow
def test_a_stopped_rank_that_comes_back_leaves(tmp_path: Path) -> None:
    heartbeat = {"TORCH_RING_HEARTBEAT_TIMEOUT": "2"}
    results = pool.run(stop_and_continue, 3, args=(str(tmp_path),), env=heartbeat)
    assert results == ["nothing", "nothing", "LeftOutError"]


def die_or_come_late(seed: int, plan: Plan, victims: Collection[int], *args: Any) -> Any:
    """Train; a victim dies after some time, if it does not die at its place before."""
    name = int(os.environ["TORCH_RING_PROCESS"][1:])
    if name in victims:
        seconds = random.Random(f"{seed} {name}").uniform(0.01, 2.0)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM, at any instruction
    return mortal_training.train(plan, *args)


def come_late() -> None:
    if "TORCH_RING_ELASTIC_NEWCOMER" in os.environ:
        time.sleep(random.uniform(0.0, 1.0))


@pytest.mark.slow
def test_ranks_die_and_come_where_chance_has_it(tmp_path: Path, full: bool) -> None:
    for seed in range(500 if full else 4):
        chance = random.Random(seed)
        size, arrivals, folder = 3, 1, tmp_path / str(seed)
        victims = chance.sample(range(size), chance.randint(1, size - 1))  # one has the state
        victims += [name for name in range(size, size + arrivals) if chance.random() < 0.5]
        plan = random_plan(chance, size, victims)
        kind, transport = chance.choice([("plain", "shm"), ("plain", "tcp"), ("sharded", "shm")])
        args = seed, plan, victims, EPOCHS, str(folder), kind
        try:
            results = run_with_arrivals(
                *(die_or_come_late, size, arrivals),
                args=(*args, {*range(size + arrivals)} - {*victims}),
                transport=transport,
                may_die=victims,
                before=come_late,
            )
            require_survivors(results, victims, 1e-9)
        except (AssertionError, pool.RanksFailed) as error:
            raise AssertionError(
                f"seed {seed}, {kind}, {transport}, {plan}, {victims}: {error}"
            ) from error
