# SPDX-License-Identifier: Apache-2.0
"""Gradients of several backward passes add up for one step."""

import pytest
import torch
from pool import run
from torch.optim import SGD
from training import grads, weights
from worlds import on_both_transports

import torch_ring as hvd


def keep_gradients_over_steps() -> None:
    """Two passes a step, and no zero_grad(): the gradients of all steps add up."""
    (x,) = weights(0)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=1.0), backward_passes_per_step=2)
    expected = gradient = 0.0
    for _ in range(3):
        for factor in (1, 2):
            ((hvd.rank() + factor) * x).backward()
        gradient += 1.5 + 2.5  # the means of the ranks' factors
        assert grads([x]) == [gradient]
        optimizer.step()
        expected -= gradient
        assert x.item() == expected


def count_passes() -> None:
    (x,) = weights(1)
    optimizer = hvd.DistributedOptimizer(SGD([x], lr=0.0), backward_passes_per_step=2)
    for _ in range(2):
        ((hvd.rank() + 1) * x).backward()
        assert x.grad.item() == hvd.rank() + 1, "not reduced after one pass"
        ((hvd.rank() + 1) * x).backward()
        assert x.grad.item() == 3
        with pytest.raises(AssertionError, match=r"'allreduce.noname.0.0'.*step=2"):
            x.backward()
        optimizer.zero_grad()  # as after a step that GradScaler has skipped
    optimizer.set_backward_passes_per_step(1)
    ((hvd.rank() + 1) * x).backward()
    assert x.grad.item() == 1.5


def accumulate_unevenly() -> None:
    """Rank 1 runs one pass less than the others, and uses one parameter less in each."""
    x, y = parameters = weights(1, 1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), backward_passes_per_step=2)
    for _ in range(3):
        optimizer.zero_grad()
        (2 * x + 8 * y if hvd.rank() == 0 else 4 * x).backward()
        if hvd.rank() == 0:
            (2 * x).backward()
        optimizer.step()
        assert grads(parameters) == [4, 4]


def skip_a_step() -> None:
    """GradScaler skips a step; gradients that are zeroed in place begin anew."""
    x, y = parameters = weights(1, 1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=1.0), backward_passes_per_step=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, factor in enumerate([float("inf"), 1.0, 1.0, float("nan"), 2.0]):
        before = x.item()
        for _ in range(2):
            scaler.scale((hvd.rank() + 1) * factor * (x + 2 * y)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert x.item() == (before if step in (0, 3) else before - 3 * factor)
        for parameter in parameters:
            parameter.grad.zero_()


def drop_in_place(backward_first: bool) -> None:
    """zero_grad() leaves zeros in a gradient that only rank 0 had, and that was never averaged."""
    x, y = parameters = weights(1, 1)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=1.0, momentum=0.5))
    (x + 8 * y).backward()
    optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync():
        (x + y if hvd.rank() == 0 else x).backward()
    optimizer.zero_grad(set_to_none=False)
    if backward_first:
        (2 * x).backward()
    optimizer.step()
    assert grads(parameters) == [2.0 * backward_first, 0]
    assert y.item() == 1 - 8 - 4, "the step with zeros, as in one process"


def step_where_one_rank_accumulates() -> None:
    """Only rank 0 adds to an averaged gradient of the second optimizer, without averaging.

    Both ranks step: rank 1 knows by the pass before that there is something to average.
    """
    a, b = weights(1, 1)
    first, second = (hvd.DistributedOptimizer(SGD([p], lr=0.0)) for p in (a, b))
    for _ in range(3):
        for optimizer in (first, second):
            optimizer.zero_grad()
        (a + b * 4).backward()
        with second.no_sync():
            (a + b * 4 if hvd.rank() == 0 else a).backward()
        second.step()
        assert grads([b]) == [4 + 2]
        first.step()


@pytest.mark.parametrize(
    ("check", "args"),
    [
        (keep_gradients_over_steps, ()),
        (count_passes, ()),
        (accumulate_unevenly, ()),
        (skip_a_step, ()),
        (drop_in_place, (False,)),
        (drop_in_place, (True,)),
        (step_where_one_rank_accumulates, ()),
    ],
)
@on_both_transports
def test_passes_of_a_step(transport, check, args):
    run(check, 2, args=args, transport=transport)
