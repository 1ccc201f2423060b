"""Ranks of an optimizer with shard_state=True die or join: the others have their parts."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import namespaces
import pool
import pytest
import torch
from arrivals import run_with_arrivals
from mortal_training import AFTER_A_DEATH, IN_A_STEP
from slow import slow, slow_after
from test_kills import check

import torch_ring as hvd
from torch_ring.errors import PeerLostError

STEPS = 8
TORN = ("in its part", "after its part", "unheard")


def make() -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(50, 60), torch.nn.Linear(60, 50)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def gradients(model: torch.nn.Module, step: int) -> torch.Tensor:
    """Return a loss that is the same on all ranks, so that their number does not matter."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(4, 50, dtype=torch.float64, generator=generator)
    return (model(batch) - batch).square().mean()


def undisturbed() -> list[torch.Tensor]:
    model, optimizer = make()
    for step in range(STEPS):
        optimizer.zero_grad()
        gradients(model, step).backward()
        optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    return [*(p.detach() for p in model.parameters()), *state]


def train(place: str, victim: int, passed: Path) -> tuple[int, bool, int]:
    """Train; one of the ranks present in step 4 dies then.

    Returns:
        The step with which the training went on, whether a parameter has moved in memory, and the
        number of ranks at the end.
    """
    hvd.init()  # on hosts
    size = hvd.size()
    model, optimizer = make()
    optimizer = hvd.DistributedOptimizer(optimizer, shard_state=True)
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    name, begins = hvd.rank(), []
    shards = optimizer._shards
    addresses: list[list[int]] = []

    groups = shards._groups

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def begin_together(*args: Any) -> Any:
        """Begin a part when no rank can learn of a death before its own part."""
        shards._groups = groups
        pool.all_have_passed(passed, size)
        if name == victim and place != "after its part":
            die()
        return groups(*args)

    def fail(*_: object) -> None:
        """Fail before the first write, as if the victim had died before that."""
        del shards._note_write
        raise PeerLostError("rank 1 is lost")

    @hvd.elastic.run
    def go_on(state: Any) -> None:
        begins.append(state.step)
        while state.step < STEPS:
            addresses.append([parameter.data_ptr() for parameter in model.parameters()])
            optimizer.zero_grad()
            if state.step == 4 and hvd.size() == size and place in TORN:
                shards._groups = begin_together
            if (name, state.step) == (victim, 4) and hvd.size() == size:
                if place == "before its part":
                    shards._enter = die
                elif place == "after its part":
                    shards._leave = die
                elif place == "backward":
                    die()
            if (name, state.step, place) == (0, 4, "unheard") and hvd.size() == size:
                shards._note_write = fail
            gradients(model, state.step).backward()
            optimizer.step()
            state.step += 1
            if state.step == 2:
                state.commit()

    go_on(state)
    assert shards.is_active == (hvd.size() > 1)
    found = [*(p.detach() for p in model.parameters())]
    found += [value for values in optimizer.state.values() for value in values.values()]
    for ours, theirs in zip(found, undisturbed(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    copied = any(each != addresses[0] for each in addresses)
    return begins[-1], copied, hvd.size()


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("place", ["backward", "before its part"])
def test_survivors_have_the_parts_of_a_dead_rank(place: str, victim: int, tmp_path: Path) -> None:
    """The survivors go on with that step, and copy nothing."""
    found = pool.run(train, 3, args=(place, victim, tmp_path), may_die=[victim])
    assert [each for each in found if each] == [(4, False, 2)] * 2


@pytest.mark.parametrize("place", TORN)
def test_a_torn_step_is_taken_back(place: str, tmp_path: Path) -> None:
    """The progress of a dead rank in its part is unknown: all go back to the last commit.

    This holds even if one of them learns of the death before its first write, and another after.
    """
    found = pool.run(train, 3, args=(place, 1, tmp_path), may_die=[1])
    assert [each for each in found if each] == [(2, False, 2)] * 2


@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` (iproute2)")
@pytest.mark.parametrize(
    ("place", "victim", "layout", "step"),
    [
        ("backward", 3, (0, 0, 1, 1), 4),
        ("in its part", 2, (0, 0, 1, 1), 2),
        slow("backward", 3, (0, 0, 1, 2), 4),  # a whole host
        slow("in its part", 3, (0, 0, 1, 2), 2),  # ranks of other hosts have begun theirs
        slow("before its part", 1, (0, 0, 0, 1), 4),
        slow("after its part", 1, (0, 0, 0, 1), 2),
    ],
)
def test_a_rank_dies_on_one_of_several_hosts(
    hosts: list[str], place: str, victim: int, layout: tuple[int, ...], step: int, tmp_path: Path
) -> None:
    found = pool.run(
        train,
        4,
        args=(place, victim, tmp_path),
        initialized=False,
        transport="",
        env={"MASTER_ADDR": f"{namespaces.NETWORK}.1", "MASTER_PORT": "29517"},
        may_die=[victim],
        namespaces=[hosts[host] for host in layout],
    )
    assert [each for each in found if each] == [(step, False, 3)] * 3


def train_with_newcomers() -> tuple[int, bool, int]:
    model, optimizer = make()
    optimizer = hvd.DistributedOptimizer(optimizer, shard_state=True)
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def go_on(state: Any) -> None:
        while state.step < STEPS or hvd.size() < 3:
            optimizer.zero_grad()
            if state.step < STEPS:
                gradients(model, state.step).backward()
                optimizer.step()
                state.step += 1
            state.commit()

    go_on(state)
    found = [*(p.detach() for p in model.parameters())]
    found += [value for values in optimizer.state.values() for value in values.values()]
    for ours, theirs in zip(found, undisturbed(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    shards = optimizer._shards
    return hvd.size(), shards.is_shared, len(shards._owners)


@pytest.mark.parametrize("size", [1, 2])
def test_newcomers_share_the_memory_of_their_host(size: int) -> None:
    found = run_with_arrivals(train_with_newcomers, size, 3 - size)
    assert found == [(3, True, 3)] * 3


@pytest.mark.parametrize(
    ("victim", "place"), slow_after(4, [(i % 3, p) for i, p in enumerate(IN_A_STEP)])
)
def test_a_rank_dies_in_a_step(victim: int, place: str, tmp_path: Path) -> None:
    victim = 0 if place == "checkpoint" else victim  # rank 0 writes it
    plan = {victim: (place, IN_A_STEP[place] + 1)}
    assert check(plan, 3, "shm", tmp_path, shard_state=True) == 2


@pytest.mark.parametrize(
    ("victim", "place"), slow_after(2, [(i % 2, p) for i, p in enumerate(AFTER_A_DEATH)])
)
def test_another_rank_dies_in_the_recovery(victim: int, place: str, tmp_path: Path) -> None:
    victim = 0 if place == "leading" else victim  # the lowest rank leads
    plan = {2: ("bucket", 3), victim: (place, 1)}
    assert check(plan, 4, "shm", tmp_path, shard_state=True) == 2
