"""Optimizers on process sets while ranks die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import pool
import pytest
import torch
from process_set_use import check_process_set
from slow import on_shm_and_slowly_on_tcp

import torch_ring as hvd
from torch_ring.optimizer.backward_sync import backward_sync_of

STEPS = 8

Death = tuple[int, int]
"""The rank of the first world that dies, and the step in which it does."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_in_a_set(
    ranks: Sequence[int], deaths: Sequence[Death], early: bool = False
) -> tuple[float, float]:
    """Train on a process set, and on all ranks; return the weights of both.

    Args:
        early: whether victims die before the step's first pass, which then fails at its end: with
            buckets sent, and objects kept by the error's traceback.
    """
    name = hvd.rank()
    workers = hvd.add_process_set(ranks)
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    for model in models:
        torch.nn.init.zeros_(model.weight)
    in_set, of_all = (
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), process_set=process_set
        )
        for model, process_set in zip(models, (workers, hvd.global_process_set), strict=True)
    )
    state = hvd.elastic.TorchState(
        models[0], in_set, other=models[1], other_optimizer=of_all, step=0
    )

    @hvd.elastic.run
    def train(state: Any) -> None:
        for state.step in range(state.step, STEPS):
            for model, optimizer in zip(models, (in_set, of_all), strict=True):
                optimizer.zero_grad()
                loss = model(torch.full((1, 1), (state.step + 1.0) * (name + 1))).sum()
                if (name, state.step) in deaths and (early or optimizer is of_all):
                    die()
                if early and state.step in (step for _, step in deaths):
                    time.sleep(0.1)  # the others learn of it before that pass
                loss.backward()
            of_all.step()
            in_set.step()

    train(state)
    return models[0].weight.item(), models[1].weight.item()


def expected_weights(
    members: Sequence[int], size: int, deaths: Sequence[Death]
) -> tuple[float, float]:
    """Return the weights of the members; the death of a rank ends its part with that step."""
    weight = other = 0.0
    for step in range(STEPS):
        living = [rank for rank in range(size) if dict(deaths).get(rank, STEPS) > step]
        weight -= (step + 1.0) * sum(rank + 1 for rank in members) / len(members)
        other -= (step + 1.0) * sum(rank + 1 for rank in living) / len(living)
    return weight, other


@on_shm_and_slowly_on_tcp
@pytest.mark.parametrize(
    ("size", "ranks", "deaths"),
    [
        (3, [1, 2], [(0, 3)]),
        (4, [0, 2, 3], [(1, 0)]),
        (4, [1, 3], [(2, 2), (0, 5)]),
    ],
)
def test_an_optimizer_on_a_set_goes_on(
    size: int, ranks: list[int], deaths: list[Death], transport: str
) -> None:
    victims = [rank for rank, _ in deaths]
    weights = pool.run(
        train_in_a_set, size, args=(ranks, deaths), transport=transport, may_die=victims
    )
    for rank in ranks:
        assert weights[rank] == pytest.approx(expected_weights(ranks, size, deaths))


@on_shm_and_slowly_on_tcp
def test_a_pass_that_failed_at_its_end_leaves_nothing_behind(transport: str) -> None:
    ranks, deaths = [0, 2, 3], [(1, 0)]
    weights = pool.run(
        train_in_a_set, 4, args=(ranks, deaths, True), transport=transport, may_die=[1]
    )
    for rank in ranks:
        assert weights[rank] == pytest.approx(expected_weights(ranks, 4, deaths))


def step_in_a_lost_set(replaces: bool) -> tuple[str, float]:
    name = hvd.rank()
    workers = hvd.add_process_set([0, 1])
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), process_set=workers
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    def replace() -> None:
        others = hvd.add_process_set([0, hvd.size() - 1])
        state.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=2.0), process_set=others
        )

    if replaces:
        state.register_reset_callbacks([replace])

    @hvd.elastic.run
    def train(state: Any) -> None:
        for state.step in range(state.step, STEPS):
            hvd.barrier()
            state.optimizer.zero_grad()
            model(torch.full((1, 1), name + 1.0)).sum().backward()
            hvd.barrier()
            if (name, state.step) == (1, 3):
                die()
            hvd.barrier()
            state.optimizer.step()

    return pool.error_of(lambda: train(state))[0], model.weight.item()


def test_an_optimizer_on_a_lost_set_does_not_step() -> None:
    outcomes = pool.run(step_in_a_lost_set, 4, args=(False,), may_die=[1])
    assert [outcomes[rank][0] for rank in (0, 2, 3)] == ["ProcessSetLostError"] * 3
    assert outcomes[0][1] == -4.5  # of the three steps before


def test_a_callback_may_replace_an_optimizer_on_a_lost_set() -> None:
    outcomes = pool.run(step_in_a_lost_set, 4, args=(True,), may_die=[1])
    assert [outcomes[rank][0] for rank in (0, 2, 3)] == ["nothing"] * 3
    # Three steps of ranks 0 and 1, then five of the former ranks 0 and 3, at twice the rate.
    assert outcomes[0][1] == -4.5 - 2 * 5 * 2.5


def count_agreements() -> tuple[int, int]:
    """Train on all ranks, which also form a set without an optimizer."""
    name = hvd.rank()
    pair = hvd.add_process_set([0, 1])
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    counts: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        for state.step in range(state.step, STEPS):
            optimizer.zero_grad()
            if (name, state.step) == (2, 3):
                die()
            model(torch.ones(1, 1)).sum().backward()
            counts.append(backward_sync_of(hvd.global_process_set).number)
            optimizer.step()

    train(state)
    check_process_set(pair, [0, 1])
    return pair.process_set_id or 0, counts[-1] - counts[-2]


def test_a_set_that_has_all_ranks_is_no_other_world() -> None:
    """A backward pass is agreed on once."""
    assert pool.run(count_agreements, 3, may_die=[2])[:2] == [(1, 1)] * 2
