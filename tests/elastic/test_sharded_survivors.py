# SPDX-License-Identifier: Apache-2.0
"""Ranks of an optimizer with shard_state=True die in its step: the others have their parts."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import namespaces
import pool
import pytest
import torch

import torch_ring as hvd
from torch_ring.errors import PeerLostError
from torch_ring.optimizer.distributed_optimizer import follow_world

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


def check(place: str, victim: int, passed: Path, size: int, **where: Any) -> None:
    """Check that the survivors copy nothing.

    They go on with that step; or with the last commit after a torn one, since the progress of a
    dead rank in its part is unknown, even if one of them learns of the death before its first
    write, and another after.
    """
    found = pool.run(train, size, args=(place, victim, passed), may_die=[victim], **where)
    step = 2 if place in TORN else 4
    assert [each for each in found if each] == [(step, False, size - 1)] * (size - 1)


@pytest.mark.parametrize(
    ("place", "victim"),
    [("backward", 0), ("before its part", 2), *[(place, 1) for place in TORN]],
)
def test_survivors_have_the_parts_of_a_dead_rank(place: str, victim: int, tmp_path: Path) -> None:
    check(place, victim, tmp_path, 3)


@pytest.mark.netns
@pytest.mark.parametrize(
    ("place", "victim", "layout"),
    [
        ("backward", 3, (0, 0, 1, 2)),  # a whole host
        ("in its part", 2, (0, 0, 1, 1)),
    ],
)
def test_a_rank_dies_on_one_of_several_hosts(
    hosts: list[str], place: str, victim: int, layout: tuple[int, ...], tmp_path: Path
) -> None:
    check(
        *(place, victim, tmp_path, len(layout)),
        initialized=False,
        transport="",
        env={"MASTER_ADDR": f"{namespaces.NETWORK}.1", "MASTER_PORT": "29517"},
        namespaces=[hosts[host] for host in layout],
    )


def follow_without_shared_memory() -> tuple[str, str]:
    """As the elastic state does when ranks have come that share no memory, and one has died."""
    model, optimizer = make()
    optimizer = hvd.DistributedOptimizer(optimizer, shard_state=True)
    gradients(model, 0).backward()
    optimizer.step()
    hvd.shutdown()
    hvd.init()
    return pool.error_of(lambda: follow_world(optimizer))


def test_parts_outside_shared_memory_are_lost_with_their_world() -> None:
    for kind, text in pool.run(follow_without_shared_memory, 3, transport="tcp"):
        assert (kind, "begin again from a checkpoint" in text) == ("InvalidArgumentError", True)
