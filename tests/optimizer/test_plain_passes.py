# SPDX-License-Identifier: Apache-2.0
"""Plain passes (dense gradients, in host memory, as they are) end in C++, without Python."""

from __future__ import annotations

import pytest
import torch
from on_ranks import on_ranks
from pool import error_of, run
from torch.optim import SGD
from training import grads, take_step, weights

import torch_ring as hvd


@on_ranks(2)
def test_ranks_in_different_steps_are_told() -> None:
    """All ranks have all gradients, and one has taken another step."""
    parameters = weights(1, 1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0))
    for _ in range(3):
        take_step(optimizer, sum(parameters))
    if hvd.rank() == 1:
        with optimizer.skip_synchronize():
            optimizer.step()
    kind, text = error_of(sum(parameters).backward)
    assert kind == "MismatchError", text
    assert "rank 0 has taken 3 optimizer steps, rank 1 4" in text


def leave_one_to_the_step(by_hand: bool) -> None:
    """A pass reduces the whole bucket of one parameter; the other's gradient is left to step()."""
    a, b = parameters = weights(1, 1)
    passes = 1 if by_hand else 2
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), backward_passes_per_step=passes)
    mine = hvd.rank() + 1
    for _ in range(4):
        optimizer.zero_grad()
        (a * mine).backward()
        if by_hand:
            b.grad = torch.full_like(b, mine)
        else:
            ((a + b) * mine).backward()
        optimizer.step()
        assert grads(parameters) == [1.5 * passes, 1.5]


def leave_a_part_of_a_bucket() -> None:
    """A pass computes one of two gradients of a bucket; the other one is an older sum."""
    a, b = parameters = weights(1, 1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=hvd.Sum)
    for _ in range(3):
        take_step(optimizer, a + b)
    a.grad = None
    (a * 3).backward()
    assert grads(parameters) == [3 * hvd.size(), hvd.size()]


def end_in_python_on_one_rank() -> None:
    """Both ways to end a pass send the same names and bytes."""
    a, b = parameters = weights(1, 1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=hvd.Sum)
    for step in range(4):
        if step == 2 and hvd.rank() == 1:  # then no digests of weights are sent
            optimizer._reducer.plain = None
        optimizer.zero_grad()
        ((a * 2 + b * 4) * (1 + hvd.rank())).backward()
        assert grads(parameters) == [6, 12]
        optimizer.step()


ONE_EACH = {"TORCH_RING_BUCKET_BYTES": "64"}


@pytest.mark.parametrize(
    ("check", "args", "env"),
    [
        (leave_one_to_the_step, (False,), ONE_EACH),
        (leave_one_to_the_step, (True,), ONE_EACH),
        (leave_a_part_of_a_bucket, (), {}),
        (end_in_python_on_one_rank, (), {}),
    ],
)
def test_plain_passes(check, args, env):
    run(check, 2, args=args, env=env)
