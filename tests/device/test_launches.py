# SPDX-License-Identifier: Apache-2.0
"""Requests of a backward pass to a device: launches, events and host waits, by bucket."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import device_double
import torch
from device_double import Counts
from device_runs import run_on_double
from many_parameters import NUMEL, backward, make_parameters
from torch import nn

import torch_ring as hvd

TENSORS_OF_LAUNCH = 64  # as CUDA's, in tests/doubles/device_operators.cc
GRADIENT_BYTES = 4 * NUMEL  # 16 KiB
BUCKET_BYTES = 128 * GRADIENT_BYTES  # 2 MiB
BUCKETS = [64, 128, 128, 116, 64]  # gradients; the first and the last have 1 MiB
ENVIRONMENT = {"TORCH_RING_BUCKET_BYTES": str(BUCKET_BYTES), "TORCH_RING_FUSION_THRESHOLD": "0"}


def counted(run: Callable[[], object]) -> Counts:
    """Return this rank's requests to the device during `run`."""
    hvd.barrier()  # earlier work has been enqueued
    before = Counts.now()
    run()
    hvd.barrier()
    return Counts.now() - before


def of_a_pass(parameters: list[nn.Parameter], zero: Callable[[], object]) -> Counts:
    """Return the requests of a backward pass to the device, after the buckets are planned."""

    def one() -> None:
        zero()
        backward(parameters, hvd.rank() + 1.0)

    for _ in range(4):  # the last ones are planned
        one()
    return counted(one)


def drop(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def check_launches(device: str) -> None:
    """Compare passes with plain torch's: once with new gradients, once in place."""
    alone, parameters = make_parameters(device), make_parameters(device)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    buckets = len(BUCKETS)
    copies_in = sum(math.ceil(bucket / TENSORS_OF_LAUNCH) for bucket in BUCKETS)
    zero_alone = functools.partial(torch.optim.SGD(alone).zero_grad, set_to_none=False)
    for zero, plain, kernels in (
        (optimizer.zero_grad, functools.partial(drop, alone), copies_in),
        (functools.partial(optimizer.zero_grad, set_to_none=False), zero_alone, 0),
    ):
        added = of_a_pass(parameters, zero) - of_a_pass(alone, plain)
        assert all(p.grad.eq((hvd.size() + 1) / 2).all() for p in parameters)
        assert added.kernels == kernels, added  # NCCL divides by the number of ranks
        assert (added.copies, added.host_waits) == (0, 0), added
        assert (added.collectives, added.threads) == (buckets, buckets), added
        assert added.polls >= buckets, added
        # One event before each bucket, and one at the end of work that is enqueued together: the
        # last one stands for the others.
        assert (added.recorded, added.awaited) == (2 * buckets, buckets + 1), added


def test_a_planned_pass_launches_by_bucket_and_not_by_parameter():
    run_on_double(check_launches, 2, TORCH_RING_RUN_AHEAD="1", **ENVIRONMENT)


def check_group(device: str) -> None:
    tensors = [torch.full((10 + i,), hvd.rank() + 1.0, device=device) for i in range(160)]
    hvd.grouped_allreduce(tensors)
    results = []
    added = counted(lambda: results.extend(hvd.grouped_allreduce(tensors)))
    assert all(result.eq((hvd.size() + 1) / 2).all() for result in results)
    assert (added.recorded, added.awaited) == (2, 2), added
    assert (added.collectives, added.host_waits) == (1, 0), added
    assert added.kernels == 2 * math.ceil(len(tensors) / TENSORS_OF_LAUNCH), added  # in and out


def test_a_group_of_tensors_has_one_event_before_it_and_one_after_it():
    run_on_double(check_group, 2)


def check_streams(device: str) -> None:
    """A stream waits for earlier work with later work, and for each by itself."""
    late = torch.ones(3, device=device)
    hvd.allreduce_(late)
    here = torch.accelerator.current_stream()
    for stream in [here, torch.Stream(device), here]:
        early = torch.full((NUMEL,), hvd.rank() + 1.0, device=device)
        if hvd.rank() == 1:
            device_double.delay(50)
        first = hvd.allreduce_async(early, name="early")
        second = hvd.allreduce_async(late, name="late")
        hvd.synchronize(second)
        with stream:
            assert hvd.synchronize(first).tolist() == [1.5] * NUMEL


def test_each_stream_waits_for_results():
    run_on_double(check_streams, 2, TORCH_RING_FUSION_THRESHOLD="0")
