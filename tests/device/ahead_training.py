# SPDX-License-Identifier: Apache-2.0
"""Training whose hosts run ahead, on a stand-in for a device: models and their steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import device_runs
import pytest
import torch
from many_parameters import backward
from pool import eventually
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import torch_ring as hvd
from torch_ring.optimizer.backward_sync import backward_sync_of
from torch_ring.optimizer.planned_pass import PlannedPasses

run_ahead_on_double = functools.partial(device_runs.run_on_double, TORCH_RING_RUN_AHEAD="1")
SIZE = 3
FEATURES = 5

DEADLINE_S = 30.0
PLANNED = 2  # the first pass of a plan
AHEAD = 1  # passes that a host may finish before the slowest one begins the first


def wait_for(path: Path) -> None:
    assert eventually(path.exists, DEADLINE_S)


@contextlib.contextmanager
def planned_passes() -> Iterator[list[int]]:
    """Yield the numbers of the planned passes that this rank runs in the block."""
    numbers: list[int] = []
    run = PlannedPasses._run

    def counted(self: PlannedPasses, number: int, *arguments: object) -> object:
        numbers.append(number)
        return run(self, number, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannedPasses, "_run", counted)
        yield numbers


class Branches(nn.Module):
    """A trunk and three branches; a pass uses the given branches."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Linear(FEATURES, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        self.to(device)

    def forward(self, batch: Tensor, used: Iterable[int] = (0,)) -> Tensor:
        hidden = torch.tanh(self.trunk(batch))
        return sum(self.branches[index](hidden).square().mean() for index in used)


def batch_of(step: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(100 * hvd.rank() + step)
    return torch.randn(4, FEATURES, generator=generator).to(device)


def wrapped(model: nn.Module, run_ahead: bool | None) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), run_ahead=run_ahead)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [weight.detach().cpu() for weight in model.parameters()]


class Training:
    """A model on a device, and its steps."""

    def __init__(self, device: str, run_ahead: bool | None = True) -> None:
        self.device = device
        self.model = Branches(device)
        self.optimizer = wrapped(self.model, run_ahead)
        self.done = 0
        self.batches = [batch_of(step, device) for step in range(100)]

    def backward(self, *used: int) -> None:
        self.optimizer.zero_grad()
        self.model(self.batches[self.done], used or (0,)).backward()

    def step(self, *used: int) -> None:
        self.backward(*used)
        self.optimizer.step()
        self.done += 1

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


class Assigning(torch.optim.Optimizer):
    """Sets weights to their gradients."""

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        super().__init__(weights, {})

    @torch.no_grad()
    def step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.copy_(weight.grad)


class Quiet(Training):
    """Steps without host waits on the stand-in, although most of its operators wait."""

    def __init__(self, device: str) -> None:
        self.weights = [torch.nn.Parameter(torch.zeros(5, device=device)) for _ in range(3)]
        self.optimizer = hvd.DistributedOptimizer(Assigning(self.weights))
        self.done = 0

    def backward(self, *_: int) -> None:
        self.optimizer.zero_grad()
        backward(self.weights, self.done + hvd.rank())

    def check(self) -> None:
        expected = torch.full((5,), self.done - 1 + (hvd.size() - 1) / 2)
        for weight in self.weights:
            torch.testing.assert_close(weight.detach().cpu(), expected)


AnyTraining = TypeVar("AnyTraining", Training, Quiet)


def is_planned() -> bool:
    return bool(backward_sync_of(hvd.global_process_set).run_ahead._plan)


def in_a_plan(training: AnyTraining) -> AnyTraining:
    """Take steps until passes are planned."""
    training.steps(PLANNED + 2)
    assert is_planned()
    return training
