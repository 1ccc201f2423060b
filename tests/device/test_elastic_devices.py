# SPDX-License-Identifier: Apache-2.0
"""Elastic training with models on a device and NCCL, on stand-ins for both."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import pool
import pytest
import torch
from device_runs import run_on_double

import torch_ring as hvd

STEPS, DEATH = 8, 4
RATE, MOMENTUM = 0.5, 0.5


class Model(torch.nn.Module):
    """Two weights, with gradients that depend on the rank, and a buffer that counts passes."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(1000, device=device))
        self.second = torch.nn.Parameter(torch.zeros(3, device=device))
        self.register_buffer("passes", torch.zeros(1, device=device))

    def forward(self) -> torch.Tensor:
        self.passes += 1.0
        return (self.first.sum() + self.second.sum()) * float(hvd.rank() + 1)


def make(device: str) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=2)


def expected(sizes: list[int]) -> float:
    """Return a weight after steps on the given numbers of ranks."""
    weight = momentum = 0.0
    for size in sizes:
        momentum = MOMENTUM * momentum + (size + 1) / 2  # the mean of 1, 2, ...
        weight -= RATE * momentum
    return weight


def end_of(model: Model, optimizer: torch.optim.Optimizer, device: str) -> list[float]:
    """Return the weights and the momentum, on a device still, as one number each."""
    momenta = [each["momentum_buffer"] for each in optimizer.state.values()]
    tensors = [model.first, model.second, *momenta]
    assert all(tensor.device.type == device for tensor in tensors)
    assert all(bool((tensor == tensor[0]).all().cpu()) for tensor in tensors)
    return [float(tensor[0].detach().cpu()) for tensor in tensors]


def lose_one(device: str, place: str) -> tuple[list[int], list[float]]:
    """Rank 0 dies in a step; return the size of the world in each step, and the end."""
    dies = hvd.rank() == 0
    model, optimizer = make(device)
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    kept, lost = hvd.add_process_set([1, 2]), hvd.add_process_set([0, 1])
    mine = torch.ones(5, device=device)
    sizes: list[int] = []
    if lost.included():  # now it has a communicator, too
        assert hvd.allreduce(mine, op=hvd.Sum, process_set=lost).tolist() == [2.0] * 5

    def die(at: str) -> None:
        if dies and (at, state.step) == (place, DEATH):
            os.kill(os.getpid(), signal.SIGKILL)

    # After one of the two groups has been sent.
    model.first.register_hook(lambda _: die("between two groups"))

    @hvd.elastic.run
    def train(state: Any) -> None:
        for state.step in range(state.step, STEPS):
            optimizer.zero_grad()
            loss = model()
            die("before the backward pass")
            loss.backward()
            die("before step()")
            optimizer.step()
            sizes.append(hvd.size())
            if kept.included():
                total = hvd.allreduce(mine, op=hvd.Sum, process_set=kept)
                assert total.tolist() == [2.0] * 5

    train(state)
    assert kept.ranks == [0, 1]
    kind, _ = pool.error_of(lambda: hvd.allreduce(mine, process_set=lost))
    assert kind == "ProcessSetLostError"
    return sizes, end_of(model, optimizer, device)


PLACES = ["before the backward pass", "between two groups", "before step()"]


@pytest.mark.parametrize("place", PLACES)
def test_survivors_go_on_with_the_step(place: str) -> None:
    check_survivors(run_on_double(functools.partial(lose_one, place=place), 3, may_die=[0]), place)


def check_survivors(results: list[Any], place: str) -> None:
    assert results[0] is None
    (sizes, end), (other_sizes, other_end) = results[1:]
    of_three = max(sizes.count(3), other_sizes.count(3))
    # After rank 0 has sent all gradients, one or both of the others may take the step without it.
    assert of_three - DEATH in ([0, 1] if place == "before step()" else [0])
    assert min(sizes.count(3), other_sizes.count(3)) >= DEATH
    assert sizes[-1] == other_sizes[-1] == 2
    assert end == other_end
    assert end[0] == end[1] == expected([3] * of_three + [2] * (STEPS - of_three))
