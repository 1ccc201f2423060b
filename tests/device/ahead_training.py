"""Training whose hosts run ahead, on a stand-in for a device: models and their steps."""

from __future__ import annotations

import functools
from pathlib import Path

import device_runs
import pytest
import torch
from ahead_programs import Branches, batch_of, wrapped
from pool import eventually

import torch_ring as hvd
from torch_ring.optimizer.backward_sync import backward_sync_of

run_ahead_on_double = functools.partial(device_runs.run_on_double, TORCH_RING_RUN_AHEAD="1")
on_worlds = pytest.mark.parametrize("size", [2, 3])

DEADLINE_S = 30.0
PLANNED = 2  # the first pass of a plan
AHEAD = 1  # passes that a host may finish before the slowest one begins the first


def wait_for(path: Path) -> None:
    assert eventually(path.exists, DEADLINE_S)


class Training:
    """A model on a device, and its steps."""

    def __init__(self, device: str, **options: object) -> None:
        self.device = device
        self.model = Branches(device)
        self.optimizer = wrapped(self.model, True, **options)
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


class Given(torch.autograd.Function):
    """A loss whose gradient is a given number."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, number: float) -> torch.Tensor:
        ctx.gradient = functools.partial(torch.full_like, weight, number)
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient(), None


class Assigning(torch.optim.Optimizer):
    """Sets weights to their gradients."""

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        super().__init__(weights, {})

    @torch.no_grad()
    def step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.copy_(weight.grad)


class Quiet:
    """Steps without host waits on the stand-in, although most of its operators wait."""

    def __init__(self, device: str) -> None:
        self.weights = [torch.nn.Parameter(torch.zeros(5, device=device)) for _ in range(3)]
        self.optimizer = hvd.DistributedOptimizer(Assigning(self.weights))
        self.done = 0

    def backward(self) -> None:
        self.optimizer.zero_grad()
        sum(Given.apply(weight, self.done + hvd.rank()) for weight in self.weights).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.done += 1

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def check(self) -> None:
        expected = torch.full((5,), self.done - 1 + (hvd.size() - 1) / 2)
        for weight in self.weights:
            torch.testing.assert_close(weight.detach().cpu(), expected)


def is_planned() -> bool:
    return bool(backward_sync_of(hvd.global_process_set).run_ahead._plan)
