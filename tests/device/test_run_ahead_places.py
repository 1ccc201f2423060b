# SPDX-License-Identifier: Apache-2.0
"""Planned passes of models that move, change their dtype, or lie partly on the host."""

from __future__ import annotations

import functools
import gc

import device_double
import pytest
import torch
from ahead_training import (
    AHEAD,
    PLANNED,
    SIZE,
    Branches,
    Training,
    batch_of,
    in_a_plan,
    planned_passes,
    run_ahead_on_double,
    wrapped,
)
from pool import error_of
from torch import Tensor, nn
from torch.optim import SGD
from training import assert_same_on_all_ranks

import torch_ring as hvd


def move_away_and_back(device: str, run_ahead: bool, clears_first: bool) -> list[Tensor]:
    """Train on the device, on the host, and on the device again; return the weights."""
    model = Branches(device)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), run_ahead=run_ahead)
    place = device
    for step in range(24):
        if clears_first:
            optimizer.zero_grad()
        if step in (8, 12):
            place = "cpu" if step == 8 else device
            device_double.move(model, place)
        if not clears_first:
            optimizer.zero_grad()
        model(batch_of(step, place), (0, 1)).backward()
        assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {place}
        optimizer.step()
    return [weight.detach().cpu() for weight in model.parameters()]


def compare_moved(clears_first: bool, device: str) -> None:
    """A move ends the plan on all ranks; a new one follows when the model is back."""
    agreed = move_away_and_back(device, False, clears_first)
    with planned_passes() as numbers:
        ahead = move_away_and_back(device, True, clears_first)
    first = numbers[0] - PLANNED
    assert numbers[: 8 - PLANNED] == list(range(first + PLANNED, first + 8))
    assert numbers[8 - PLANNED] >= first + 12 + PLANNED, "none on the host"
    # Each step on the host, and one before the plan, agree on the branch that has no gradient.
    assert numbers[-1] == first + 23 + 4 + 1
    assert_same_on_all_ranks(*ahead)
    for mine, other in zip(ahead, agreed, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("clears_first", [True, False])
def test_a_model_moves_while_hosts_run_ahead(clears_first):
    run_ahead_on_double(functools.partial(compare_moved, clears_first), SIZE)


def move_to_a_second_device(device: str) -> tuple[str, str]:
    """One rank's model moves to another device than the process has used, in a plan."""
    training = in_a_plan(Training(device))
    if hvd.rank() == hvd.size() - 1:
        training.model.to(f"{device}:1")
        training.batches = [batch.to(f"{device}:1") for batch in training.batches]
        for state in training.optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].to(f"{device}:1")
    return error_of(lambda: training.steps(AHEAD + 2))


def test_a_second_device_while_hosts_run_ahead():
    errors = run_ahead_on_double(move_to_a_second_device, SIZE)
    assert [kind for kind, _ in errors] == ["PeerLostError"] * (SIZE - 1) + ["RingError"]
    for _, text in errors:
        assert "a model has moved: " in text
        assert "one process drives one device" in text


def change_the_dtype(device: str) -> tuple[str, str]:
    """All ranks make the model float64 in a plan: refused, and a new optimizer trains it."""
    training = in_a_plan(Training(device))
    training.optimizer.zero_grad()
    training.model.double()
    batch = training.batches[0].double()
    error = error_of(lambda: training.model(batch).backward())
    hvd.barrier()
    del training.optimizer
    gc.collect()
    training.optimizer = wrapped(training.model, True)
    training.batches = [batch.double() for batch in training.batches]
    with planned_passes() as numbers:
        training.steps(PLANNED + 3)
    assert len(numbers) >= 2
    assert_same_on_all_ranks(*(weight.detach().cpu() for weight in training.model.parameters()))
    return error


def test_another_dtype_while_hosts_run_ahead():
    for kind, text in run_ahead_on_double(change_the_dtype, SIZE):
        assert kind == "ValueError"
        assert "has changed its dtype from Float to Double" in text
        assert "make a new optimizer and wrap that" in text


def train_on_both(device: str) -> None:
    """Parameters on the host and on the device in one optimizer: the hosts agree on each pass."""
    host, there = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, device=device))
    optimizer = hvd.DistributedOptimizer(SGD([host, there], lr=1.0))
    with planned_passes() as numbers:
        for _ in range(PLANNED + 5):
            optimizer.zero_grad()
            (host.sum() + 2 * there.sum().cpu()).mul(hvd.rank() + 1).backward()
            optimizer.step()
    assert numbers == []
    mean = (hvd.size() + 1) / 2 * (PLANNED + 5)
    assert host.tolist() == [-mean] * 3
    assert there.tolist() == [-2 * mean] * 3


def test_models_on_the_host_and_on_the_device_are_agreed_on():
    run_ahead_on_double(train_on_both, SIZE)
