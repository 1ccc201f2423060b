# SPDX-License-Identifier: Apache-2.0
"""Gradients of one bucket from several streams, on the stand-ins."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ahead_training import Quiet
from device_double import held_stream
from device_runs import run_on_double
from torch import Tensor, nn

import torch_ring as hvd


class _Produce(torch.autograd.Function):
    """A loss of 0 whose gradient is `value` in every element, and the stream that makes it."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: float, seen: list[torch.Stream]) -> Tensor:
        ctx.value, ctx.seen = value, seen
        ctx.save_for_backward(parameter)
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        (parameter,) = ctx.saved_tensors
        ctx.seen.append(torch.accelerator.current_stream())
        return torch.full_like(parameter, ctx.value), None, None


class TwoStreams:
    """A bucket of two gradients; the first to arrive is made on a stream of its own."""

    def __init__(self, device: str) -> None:
        self.main, self.side = torch.accelerator.current_stream(), torch.Stream(device)
        self.parameters = [nn.Parameter(torch.zeros(1000, device=device)) for _ in range(2)]
        with self.side:  # a parameter's accumulator keeps the stream of its first use
            self.accumulator = self.parameters[0].view_as(self.parameters[0]).grad_fn
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self.parameters, lr=0.1))
        for _ in range(3):
            self.backward()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        seen: list[torch.Stream] = []
        last = _Produce.apply(self.parameters[1], hvd.rank() + 1.0, seen)
        with self.side:
            first = _Produce.apply(self.parameters[0], hvd.rank() + 1.0, seen)
        torch.autograd.backward([first, last], [torch.ones_like(first), torch.ones_like(last)])
        assert seen == [self.side, self.main]

    def check(self) -> None:
        for parameter in self.parameters:
            assert parameter.grad is not None
            assert parameter.grad.eq((hvd.size() + 1) / 2).all()


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Stop `stream` until the block ends."""
    with contextlib.ExitStack() as stack:
        with stream:
            stack.enter_context(held_stream())
        yield


def wait_for_a_late_stream(device: str) -> None:
    program = TwoStreams(device)
    with held(program.side):
        program.backward()
    program.check()


def read_before_memory_is_used_again(device: str) -> None:
    """The copy runs late; the memory of the other stream's gradient is dropped long before."""
    program = TwoStreams(device)
    with held(program.main):
        program.backward()
        deadline = time.monotonic() + 0.2
        while not program.side.query() and time.monotonic() < deadline:
            time.sleep(0.001)
    program.check()


@pytest.mark.parametrize(
    "program",
    [wait_for_a_late_stream, read_before_memory_is_used_again],
    ids=lambda program: program.__name__,
)
def test_a_bucket_of_two_streams(program):
    run_on_double(program, 2)


def read_late(cure: str, device: str) -> None:
    """A side stream reads a gradient after the host has made the next pass."""
    main, side = torch.accelerator.current_stream(), torch.Stream(device)
    training = Quiet(device)
    training.steps(3)
    kept = torch.zeros(5, device=device)
    with held(side):
        gradient = training.weights[0].grad
        assert gradient is not None
        if cure == "clone":
            gradient = gradient.clone()
        side.wait_stream(main)
        with side:
            kept.copy_(gradient)
        gradient.record_stream(side)
        del gradient
        if cure == "wait":
            main.wait_stream(side)
        training.step()
    side.synchronize()
    assert kept.tolist() == [2 + (hvd.size() - 1) / 2] * 5
    training.check()


@pytest.mark.parametrize("cure", ["clone", "wait"])
def test_a_side_stream_reads_a_gradient(cure):
    run_on_double(functools.partial(read_late, cure), 2)
