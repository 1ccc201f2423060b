# SPDX-License-Identifier: Apache-2.0
"""Two elastic functions, one after the other, in one program."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pool
import pytest
import torch
from arrivals import run_with_arrivals
from on_ranks import on_ranks

import torch_ring as hvd
from torch_ring.elastic import job

STEPS = 4


def make() -> tuple[torch.nn.Linear, Any]:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))


def train_twice(folder_name: str, comes_in: int) -> list[Any]:
    """Train in two functions; a process joins in one of them. Return the steps, and the weight."""
    process, begun = os.environ["TORCH_RING_PROCESS"], Path(folder_name) / "second"
    if process == "p2" and comes_in == 2:
        assert pool.eventually(begun.exists, 30.0)
    model, optimizer = make()
    state = hvd.elastic.TorchState(model, optimizer, step=0, end=-1)
    if comes_in == 2:
        state.end = STEPS  # is no constructor's value
    state.register_reset_callbacks([lambda: setattr(state, "end", state.step + STEPS)])
    seen: list[list[int]] = []

    @hvd.elastic.run
    def train(state: Any) -> str:
        if hvd.rank() == 0 and len(seen) == 2:
            begun.touch()
        while state.step != state.end:
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            seen[-1].append(state.step)
            state.step += 1
            state.check_host_updates()
        return "done"

    results = []
    for function in range(2):
        if function == 1:
            assert state.step == (0 if process == "p2" and comes_in == 2 else state.end)
            state.step, state.end = 100, -1 if comes_in == 2 else 100 + STEPS
        seen.append([])
        results.append(train(state))
    return [*results, *seen, model.weight.item()]


@pytest.mark.parametrize("comes_in", [1, 2])
def test_a_process_that_has_come_trains_in_the_second_function(
    comes_in: int, tmp_path: Path
) -> None:
    results = run_with_arrivals(train_twice, 2, 1, args=(str(tmp_path), comes_in))
    for returned in results[:2]:
        assert returned[:2] == ["done", "done"]
        assert returned[2] == list(range(len(returned[2])))
        assert returned[3] == list(range(100, 100 + len(returned[3])))
        assert returned[4] == -float(len(returned[2]) + len(returned[3]))
    first, second, steps, more, weight = results[2]
    assert weight == results[0][4]
    assert second == "done"
    assert more == results[0][3][-STEPS:]
    if comes_in == 1:
        assert (first, steps) == ("done", results[0][2][-STEPS:])
    else:
        assert (first, steps) == (None, [])


@on_ranks(2)
def test_a_function_begins_with_the_present_values() -> None:
    model, optimizer = make()
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    seen: list[int] = []

    @hvd.elastic.run
    def train(state: Any, until: int) -> None:
        while state.step < until:
            seen.append(state.step)
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            state.step += 1

    state.step = 2  # as from a checkpoint
    train(state, 4)
    train(state, 6)  # goes on
    state.step = 3
    train(state, 5)
    assert (seen, model.weight.item()) == ([2, 3, 4, 5, 3, 4], -6.0)


@on_ranks(2)
def test_ranks_that_call_functions_unequally_often_are_told() -> None:
    if hvd.rank() == 1:
        job._count(1, 0)  # it has called a function that rank 0 has not
    train = hvd.elastic.run(lambda _: None)
    kind, text = pool.error_of(lambda: train(hvd.elastic.ObjectState(step=0)))
    assert kind == "MismatchError"
    assert "unequally often: [1, 2] times, by rank" in text
