# SPDX-License-Identifier: Apache-2.0
"""Gradients set by a program, and shared parameters, where hosts run ahead.

tests/model has more programs of both.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from ahead_training import planned_passes, run_ahead_on_double
from pool import all_have_passed, error_of
from slot_programs import train_programs_at_random
from torch import nn
from torch.optim import SGD

import torch_ring as hvd

STEPS = 9


def set_in_planned_steps(everywhere: bool, folder: Path, device: str) -> None:
    """A parameter has no gradient at first; then all ranks set it themselves, or one does."""
    used, by_hand = parameters = [nn.Parameter(torch.ones(1, device=device)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.25))

    def take_steps(with_gradient: bool) -> None:
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            used.backward()
            if with_gradient:
                by_hand.grad = torch.full_like(by_hand, 1.0 + hvd.rank())
            optimizer.step()

    with planned_passes() as numbers:
        take_steps(False)
    assert len(numbers) >= STEPS - 4, "an unused parameter keeps no host from running ahead"
    # Hosts run ahead: another rank could meet the failure in the steps before it.
    all_have_passed(folder, hvd.size())
    _, text = error_of(lambda: take_steps(everywhere or hvd.rank() == 1))
    if everywhere:
        assert not text
        assert used.item() == 1 - 0.25 * 2 * STEPS
        assert by_hand.item() == 1 - 0.25 * 1.5 * STEPS
    else:
        assert "If the program has set a gradient itself before step()" in text, text
        assert by_hand.item() == 1


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_gradient_set_in_a_planned_step_is_averaged_or_refused(everywhere, tmp_path):
    run_ahead_on_double(functools.partial(set_in_planned_steps, everywhere, tmp_path), 2)


def set_in_place_of_backward(first: bool, device: str) -> None:
    """In one step all ranks set a gradient that all passes before have computed."""
    computed, other = parameters = [nn.Parameter(torch.zeros(1, device=device)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=1.0))
    for step in range(STEPS):
        is_set = step == STEPS - 2
        optimizer.zero_grad()
        if is_set and first:
            other.grad = torch.full_like(other, 1.0 + hvd.rank())
        (computed * 2 + (0 if is_set else other * 4)).backward()
        if is_set and not first:
            other.grad = torch.full_like(other, 1.0 + hvd.rank())
        optimizer.step()
    assert computed.item() == -2 * STEPS
    assert other.item() == -4 * (STEPS - 1) - 1.5


@pytest.mark.parametrize("first", [True, False], ids=["before backward", "after backward"])
def test_a_gradient_set_where_passes_had_one(first):
    run_ahead_on_double(functools.partial(set_in_place_of_backward, first), 2)


def test_optimizers_of_the_same_parameters_that_come_and_go(full):
    seeds = range(1000 if full else 15)
    program = functools.partial(train_programs_at_random, seeds, hvd.Average)
    run_ahead_on_double(program, 2, deadline_s=3600.0 if full else 120.0)
