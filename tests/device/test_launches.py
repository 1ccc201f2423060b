"""Requests of a backward pass to a device: launches, events and host waits, by bucket."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import device_double
import pytest
import torch
from ahead_programs import planned_passes
from device_double import Counts
from device_runs import run_on_double
from many_parameters import NUMEL, backward, make_parameters
from torch import nn

import torch_ring as hvd

pytestmark = device_double.needed

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

    for _ in range(6):  # the last ones are planned, where hosts run ahead
        one()
    return counted(one)


def check_launches(run_ahead: bool, device: str) -> None:
    """Compare passes with plain torch's: once with new gradients, once in place."""
    with planned_passes() as planned:
        check_passes(device)
    # The first two of fourteen passes are agreed.
    assert len(planned) == (12 if run_ahead else 0)


def check_passes(device: str) -> None:
    alone, parameters = make_parameters(device), make_parameters(device)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    check_added(
        of_a_pass(parameters, optimizer.zero_grad) - of_a_pass(alone, lambda: drop(alone)),
        copies_in=sum(math.ceil(bucket / TENSORS_OF_LAUNCH) for bucket in BUCKETS),
    )
    assert all(p.grad.eq((hvd.size() + 1) / 2).all() for p in parameters)
    check_added(
        of_a_pass(parameters, lambda: optimizer.zero_grad(set_to_none=False))
        - of_a_pass(alone, lambda: torch.optim.SGD(alone).zero_grad(set_to_none=False)),
        copies_in=0,
    )


def drop(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def check_added(added: Counts, copies_in: int) -> None:
    buckets = len(BUCKETS)
    assert added.copies == 0, added
    assert added.host_waits == 0, added
    assert added.collectives == buckets, added
    assert added.threads == buckets, added
    assert added.polls >= buckets, added
    assert added.kernels == copies_in, added  # NCCL divides by the number of ranks
    # Events before and after each bucket; and at the end of work enqueued together.
    assert 2 * buckets < added.recorded <= 3 * buckets, added
    assert added.awaited == 2 * buckets, added


@pytest.mark.parametrize("run_ahead", [False, True], ids=["agreed", "ahead"])
def test_a_pass_launches_by_bucket_and_not_by_parameter(run_ahead):
    run_on_double(
        functools.partial(check_launches, run_ahead),
        2,
        TORCH_RING_RUN_AHEAD=str(int(run_ahead)),
        **ENVIRONMENT,
    )
