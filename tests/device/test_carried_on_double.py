"""Gradients that are added to averaged ones, on stand-ins for a GPU and for NCCL."""

from __future__ import annotations

import functools
from pathlib import Path

import device_double
import pytest
import torch
from ahead_programs import planned_passes
from carried_programs import add_exactly, train_at_random
from device_runs import run_on_double
from pool import all_have_passed, error_of
from torch import nn
from torch.optim import SGD

import torch_ring as hvd

pytestmark = device_double.needed
in_both_ways = pytest.mark.parametrize("ahead", [False, True], ids=["agreed", "ahead"])
both_ops = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
PLANNED = 5  # steps, after which passes are planned


def add(op: hvd.ReduceOp, how: str, ahead: bool, device: str) -> int:
    with planned_passes() as numbers:
        add_exactly(op, device, how, run_ahead=ahead)
    return len(numbers)


@in_both_ways
@both_ops
@pytest.mark.parametrize("how", ["", "in the program's memory"])
def test_the_sum_of_passes_is_the_sum_of_their_averages(ahead, op, how):
    for planned in run_on_double(functools.partial(add, op, how, ahead), 3):
        assert planned > 8 if ahead else planned == 0


def train_programs(seeds: range, op: hvd.ReduceOp, device: str) -> None:
    for seed in seeds:
        train_at_random(seed, op, device, run_ahead=False)


@both_ops
def test_random_programs(op, full):
    program = functools.partial(train_programs, range(1000 if full else 12), op)
    run_on_double(program, 2, deadline_s=3600.0 if full else 120.0)


def keep_on_some(
    keeping: set[int], lacks: bool, ahead: bool, folder: Path, device: str
) -> tuple[str, int]:
    """Some ranks add to an averaged gradient that others have dropped; rank 1 may add nothing.

    Returns:
        The gradient or an error, and the number of steps that all ranks took until then.
    """
    a, b = (nn.Parameter(torch.zeros(3, device=device)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(SGD([a, b], lr=0.0), [("a", a), ("b", b)], run_ahead=ahead)
    for _ in range(PLANNED):
        optimizer.zero_grad()
        (a + b).sum().backward()
        optimizer.step()
    all_have_passed(folder, hvd.size())
    b.grad = None
    if hvd.rank() not in keeping:
        a.grad = None

    def go_on() -> None:
        nonlocal found, steps
        losses = [b.sum()] if lacks and hvd.rank() == 1 else [b.sum(), (a * 2).sum()]
        sum(losses).backward()
        found = a.grad[0].item()
        for _ in range(3):
            optimizer.step()
            hvd.barrier()
            steps += 1
            optimizer.zero_grad()
            (a + b).sum().backward()

    found, steps = 0.0, 0
    with planned_passes() as numbers:
        _, text = error_of(go_on)
    assert bool(numbers) == ahead
    return text or f"{found:.3f}", steps


@in_both_ways
@pytest.mark.parametrize(
    ("keeping", "lacks", "gradient", "is_refused"),
    [
        ({0, 1, 2}, False, 1 + 2, False),
        ({0, 1, 2}, True, 1 + 4 / 3, False),
        ({1}, True, 4 / 3, False),
        ({1}, False, 1 / 3 + 2, True),
        ({0, 2}, False, 2 / 3 + 2, True),
        ({0, 2}, True, 2 / 3 + 4 / 3, True),
    ],
)
def test_ranks_that_keep_an_averaged_gradient(
    ahead, keeping, lacks, gradient, is_refused, tmp_path
):
    """Averages that not all ranks have are averaged once more, or refused where hosts run ahead."""
    program = functools.partial(keep_on_some, keeping, lacks, ahead, tmp_path)
    for text, steps in run_on_double(program, 3):
        if ahead and is_refused:
            assert steps == 0, "the ranks took a step with different gradients"
            adding, lacking = min(keeping - ({1} if lacks else set())), min({0, 1, 2} - keeping)
            assert f"rank {adding} has added the gradient of 'a' to one that was" in text, text
            assert f"averaged before, which rank {lacking} does not have" in text, text
            assert "run_ahead=False" in text
        else:
            assert text == f"{gradient:.3f}"


def change_an_average(ahead: bool, device: str) -> float:
    """All ranks change an averaged gradient; the next pass has none of it on rank 1."""
    a, b = (nn.Parameter(torch.zeros(3, device=device)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(SGD([a, b], lr=0.0), run_ahead=ahead)
    for _ in range(PLANNED):
        optimizer.zero_grad()
        (a + b).sum().backward()
        optimizer.step()
    for parameter in (a, b):
        parameter.grad.mul_(0.5)
    (b * 2 if hvd.rank() == 1 else a * 2 + b * 2).sum().backward()
    optimizer.step()
    return a.grad[0].item()


@in_both_ways
def test_an_average_that_all_ranks_change(ahead):
    found = run_on_double(functools.partial(change_an_average, ahead), 2)
    assert found == [0.5 + 1] * 2
