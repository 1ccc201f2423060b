# SPDX-License-Identifier: Apache-2.0
"""Gradients that are added to averaged ones, where hosts run ahead.

On the host, `tests/optimizer/test_carried_gradients.py` has the same and more.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from ahead_training import planned_passes, run_ahead_on_double
from carried_programs import add_exactly
from device_runs import run_on_double
from pool import all_have_passed, error_of
from torch import nn
from torch.optim import SGD

import torch_ring as hvd

PLANNED = 5  # steps, after which passes are planned


def add(device: str) -> None:
    for op, how in ((hvd.Average, "in the program's memory"), (hvd.Sum, "")):
        with planned_passes() as numbers:
            add_exactly(op, device, how, run_ahead=True)
        assert len(numbers) > 8


def test_the_sum_of_passes_is_the_sum_of_their_averages():
    run_on_double(add, 3)


def keep_on_some(keeping: set[int], lacks: bool, folder: Path, device: str) -> tuple[str, int]:
    """Some ranks add to an averaged gradient that others have dropped; rank 1 may add nothing.

    Returns:
        The gradient or an error, and the number of steps that all ranks took until then.
    """
    a, b = (nn.Parameter(torch.zeros(3, device=device)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(SGD([a, b], lr=0.0), [("a", a), ("b", b)])
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
    assert numbers
    return text or f"{found:.3f}", steps


@pytest.mark.parametrize(
    ("keeping", "lacks", "gradient"),  # None: the pass is refused
    [
        ({0, 1, 2}, True, 1 + 4 / 3),
        ({1}, True, 4 / 3),
        ({1}, False, None),
        ({0, 2}, True, None),
    ],
)
def test_ranks_that_keep_an_averaged_gradient(keeping, lacks, gradient, tmp_path):
    """Averages that not all ranks have are refused if a rank has added to one."""
    program = functools.partial(keep_on_some, keeping, lacks, tmp_path)
    for text, steps in run_ahead_on_double(program, 3):
        if gradient is None:
            assert steps == 0, "the ranks took a step with different gradients"
            adding, lacking = min(keeping - ({1} if lacks else set())), min({0, 1, 2} - keeping)
            assert f"rank {adding} has added the gradient of 'a' to one that was" in text, text
            assert f"averaged before, which rank {lacking} does not have" in text, text
            assert "run_ahead=False" in text
        else:
            assert text == f"{gradient:.3f}"


def change_an_average(device: str) -> float:
    """All ranks change an averaged gradient; the next pass has none of it on rank 1."""
    a, b = (nn.Parameter(torch.zeros(3, device=device)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(SGD([a, b], lr=0.0))
    for _ in range(PLANNED):
        optimizer.zero_grad()
        (a + b).sum().backward()
        optimizer.step()
    for parameter in (a, b):
        parameter.grad.mul_(0.5)
    (b * 2 if hvd.rank() == 1 else a * 2 + b * 2).sum().backward()
    optimizer.step()
    return a.grad[0].item()


def test_an_average_that_all_ranks_change():
    found = run_ahead_on_double(change_an_average, 2)
    assert found == [0.5 + 1] * 2
