"""Ranks die while they train, and the others go on: same weights, no sample lost."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Sequence

import pool
import pytest
import torch
from slow import on_shm_and_slowly_on_tcp

import torch_ring as hvd
from torch_ring.world import current

STEPS = 12


def gradient_of(step: int, rank: int) -> float:
    """Return the gradient of a rank in a step, the same for the weight and the bias."""
    return (step + 1.0) * (rank + 1)


def train_with_deaths(deaths: Sequence[tuple[int, int]]) -> tuple[int, int, float, list[int]]:
    """Train; the rank `first` of the old world dies in the backward pass of a step."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    name = hvd.rank()
    sizes: list[int] = []

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        for state.step in range(state.step, STEPS):
            optimizer.zero_grad()
            loss = model(torch.full((1, 1), gradient_of(state.step, hvd.rank()))).sum()
            if (name, state.step) in deaths:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            sizes.append(hvd.size())
        state.step = STEPS

    train(state)
    return hvd.rank(), hvd.size(), model.weight.item(), sizes


def expected(size: int, deaths: Sequence[tuple[int, int]]) -> float:
    weight, left = 0.0, size
    for step in range(STEPS):
        left -= sum(at == step for _, at in deaths)
        weight -= sum(gradient_of(step, rank) for rank in range(left)) / left
    return weight


CASES = [
    (2, [(0, 5)]),
    (3, [(2, 0)]),
    (4, [(0, 3)]),
    (4, [(1, 4), (3, 4)]),
    (4, [(0, 2), (1, 7), (2, 9)]),
]


@on_shm_and_slowly_on_tcp
@pytest.mark.parametrize(("size", "deaths"), CASES)
def test_survivors_go_on(transport: str, size: int, deaths: list[tuple[int, int]]) -> None:
    results = pool.run(
        train_with_deaths,
        size,
        args=(deaths,),
        transport=transport,
        may_die=[rank for rank, _ in deaths],
    )
    survivors = [result for result in results if result is not None]
    assert len(survivors) == size - len(deaths)
    for rank, (new_rank, new_size, weight, sizes) in enumerate(survivors):
        assert (new_rank, new_size) == (rank, len(survivors))
        assert weight == pytest.approx(expected(size, deaths))
        assert len(sizes) == STEPS


def hold_worlds() -> list[bool]:
    """Return for each world so far whether it still has an engine, the present one last."""
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    name, engines = hvd.rank(), []
    gc.collect()
    gc.disable()

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        engines.append(weakref.ref(current.engine()))
        while state.step < 8:
            optimizer.zero_grad()
            if (name, state.step) in ((3, 2), (2, 4), (1, 6)):
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            state.step += 1

    train(state)
    gc.enable()
    return [engine() is not None for engine in engines]


@on_shm_and_slowly_on_tcp
def test_ended_worlds_go_without_garbage_collection(transport: str) -> None:
    results = pool.run(hold_worlds, 4, transport=transport, may_die=[1, 2, 3])
    assert results[0] == [False, False, False, True]
