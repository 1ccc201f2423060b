"""A rank dies while it sends its state to a newcomer."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from arrivals import run_with_arrivals

import torch_ring as hvd


def die(_root: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def let_one_in() -> tuple[list[int], float, float]:
    """A process joins; rank 0 dies when the newcomer has received the first of two models.

    Returns:
        The steps that this process has taken, and a weight of each model.
    """
    process = os.environ["TORCH_RING_PROCESS"]
    torch.manual_seed(int(process == "p3"))
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    state = hvd.elastic.TorchState(first, optimizer, second=second, step=0, end=-1)
    state.register_reset_callbacks([lambda: setattr(state, "end", state.step + 2)])
    steps: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        if process == "p0":  # from now on the ranks have the same state
            state._handlers["second"].copy_from = die
        while state.step != state.end:
            optimizer.zero_grad()
            (first(torch.ones(1, 1)) + second(torch.ones(1, 1))).sum().backward()
            optimizer.step()
            steps.append(state.step)
            state.step += 1
            state.check_host_updates()

    train(state)
    return steps, first.weight.item(), second.weight.item()


def test_the_others_that_have_the_state_give_it_and_no_step_is_lost() -> None:
    results = run_with_arrivals(let_one_in, 3, 1, may_die=[0])
    assert results[0] is None
    steps, *weights = results[1]
    assert steps == list(range(len(steps)))
    assert results[2] == (steps, *weights)
    assert results[3] == (steps[-2:], *weights)
