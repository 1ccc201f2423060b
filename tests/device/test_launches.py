# SPDX-License-Identifier: Apache-2.0
"""Requests of a backward pass to a device: launches, events and host waits, by bucket."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import device_double
import pytest
import torch
from ahead_training import planned_passes
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

    for _ in range(4):  # the last ones are planned, where hosts run ahead
        one()
    return counted(one)


def check_launches(run_ahead: bool, device: str) -> None:
    """Compare passes with plain torch's: once with new gradients, once in place."""
    with planned_passes() as planned:
        new, in_place = added_by_passes(device)
    # The first two of ten passes are agreed.
    assert len(planned) == (8 if run_ahead else 0)
    buckets = len(BUCKETS)
    copies_in = sum(math.ceil(bucket / TENSORS_OF_LAUNCH) for bucket in BUCKETS)
    for added, kernels in ((new, copies_in), (in_place, 0)):
        assert added.kernels == kernels, added  # NCCL divides by the number of ranks
        assert (added.copies, added.host_waits) == (0, 0), added
        assert (added.collectives, added.threads) == (buckets, buckets), added
        assert added.polls >= buckets, added
        # One event before each bucket, and one at the end of work that is enqueued together.
        if run_ahead:
            assert added.recorded == 2 * buckets, added
            assert added.awaited == buckets + 1, added  # the last one stands for the others
        else:
            assert buckets < added.recorded <= 2 * buckets, added
            assert buckets < added.awaited <= 2 * buckets, added


def added_by_passes(device: str) -> tuple[Counts, Counts]:
    alone, parameters = make_parameters(device), make_parameters(device)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    new = of_a_pass(parameters, optimizer.zero_grad) - of_a_pass(alone, lambda: drop(alone))
    assert all(p.grad.eq((hvd.size() + 1) / 2).all() for p in parameters)
    in_place = of_a_pass(parameters, lambda: optimizer.zero_grad(set_to_none=False)) - of_a_pass(
        alone, lambda: torch.optim.SGD(alone).zero_grad(set_to_none=False)
    )
    assert all(p.grad.eq((hvd.size() + 1) / 2).all() for p in parameters)
    return new, in_place


def drop(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


@pytest.mark.parametrize("run_ahead", [False, True], ids=["agreed", "ahead"])
def test_a_pass_launches_by_bucket_and_not_by_parameter(run_ahead):
    run_on_double(
        functools.partial(check_launches, run_ahead),
        2,
        TORCH_RING_RUN_AHEAD=str(int(run_ahead)),
        **ENVIRONMENT,
    )


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
