# SPDX-License-Identifier: Apache-2.0
"""Gradients set by a program, and shared parameters, where hosts run ahead.

On the host, `tests/optimizer` has the same in `test_gradients_by_hand.py` and
`test_shared_parameters.py`.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from ahead_training import planned_passes, run_ahead_on_double
from pool import all_have_passed, error_of
from slot_programs import train_programs_at_random
from torch import Tensor, nn
from torch.optim import SGD

import torch_ring as hvd

STEPS = 9


def scalars(device: str, *values: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([float(value)], device=device)) for value in values]


def assert_near(tensor: Tensor, value: float) -> None:
    assert abs(tensor.item() - value) < 1e-4, (tensor.item(), value)


def set_in_each_step(device: str) -> None:
    for first, ranks in [(True, [0]), (False, [0]), (True, [0, 1]), (False, [0, 1])]:
        computed, by_hand, unused = parameters = scalars(device, 1, 2, 3)
        optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.25))
        for step in range(STEPS):
            optimizer.zero_grad()
            gradient = torch.full_like(by_hand, 1.0 + hvd.rank())
            if first and hvd.rank() in ranks:
                by_hand.grad = gradient
            (computed * (1 + hvd.rank())).backward()
            if not first and hvd.rank() in ranks:
                by_hand.grad = gradient
            optimizer.step()
            assert_near(computed, 1 - 0.25 * 1.5 * (step + 1))
            assert_near(by_hand, 2 - 0.25 * sum(1 + rank for rank in ranks) / 2 * (step + 1))
        assert_near(unused, 3)


def test_gradients_set_beside_backward():
    run_ahead_on_double(set_in_each_step, 2)


def leave_one_unused(device: str) -> int:
    used, unused = parameters = scalars(device, 1, 2)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.25))
    with planned_passes() as numbers:
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            used.backward()
            optimizer.step()
            assert_near(used, 1 - 0.25 * (step + 1))
    assert_near(unused, 2)
    return len(numbers)


def test_an_unused_parameter_keeps_no_host_from_running_ahead():
    for count in run_ahead_on_double(leave_one_unused, 2):
        assert count >= STEPS - 4


def set_in_a_planned_step(everywhere: bool, folder: Path, device: str) -> None:
    used, by_hand = parameters = scalars(device, 1, 2)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.25))

    def take_steps(with_gradient: bool) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            used.backward()
            if with_gradient:
                by_hand.grad = torch.full_like(by_hand, 1.0 + hvd.rank())
            optimizer.step()

    take_steps(False)
    # Hosts run ahead: another rank could meet the failure in the steps before it.
    all_have_passed(folder, hvd.size())
    _, text = error_of(lambda: take_steps(everywhere or hvd.rank() == 1))
    if everywhere:
        assert not text
        assert_near(used, 1 - 0.25 * 2 * STEPS)
        assert_near(by_hand, 2 - 0.25 * 1.5 * STEPS)
    else:
        assert "If the program has set a gradient itself before step()" in text, text
        assert by_hand.item() == 2


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_gradient_set_in_a_planned_step_is_averaged_or_refused(everywhere, tmp_path):
    run_ahead_on_double(functools.partial(set_in_a_planned_step, everywhere, tmp_path), 2)


def set_in_place_of_backward(first: bool, device: str) -> None:
    """In one step all ranks set a gradient that all passes before have computed."""
    computed, other = parameters = scalars(device, 0, 0)
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=1.0))
    gradient = torch.full_like(other, 1.0 + hvd.rank())
    for step in range(STEPS):
        is_set = step == STEPS - 2
        optimizer.zero_grad()
        if is_set and first:
            other.grad = gradient
        (computed * 2 + (0 if is_set else other * 4)).backward()
        if is_set and not first:
            other.grad = gradient
        optimizer.step()
    assert_near(computed, -2 * STEPS)
    assert_near(other, -4 * (STEPS - 1) - (1 + hvd.size()) / 2)


@pytest.mark.parametrize("first", [True, False], ids=["before backward", "after backward"])
def test_a_gradient_set_where_passes_had_one(first):
    run_ahead_on_double(functools.partial(set_in_place_of_backward, first), 2)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_optimizers_of_the_same_parameters_that_come_and_go(op, full):
    seeds = range(1000 if full else 15)
    program = functools.partial(train_programs_at_random, seeds, op)
    run_ahead_on_double(program, 2, deadline_s=3600.0 if full else 120.0)
