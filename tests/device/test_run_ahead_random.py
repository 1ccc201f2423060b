"""Random programs in planned passes: every gradient counts, once, and no rank hangs.

`--full` runs a thousand of them.
"""

from __future__ import annotations

import functools
import random

import device_double
import pool
import pytest
import torch
from ahead_programs import planned_passes
from ahead_training import run_ahead_on_double
from torch.optim import SGD

import torch_ring as hvd

pytestmark = [device_double.needed, pytest.mark.slow]

WEIGHTS, STEPS, QUIET_STEPS = 4, 60, 20
PROGRAMS, ALL_PROGRAMS = 10, 250  # of each test
A_PROGRAM_S = 5.0  # average on a slow machine


def run_random_program(seed: int, device: str) -> None:
    """Take steps with given gradients; in some passes ranks lack some of them.

    A new gradient comes on all ranks at once, or a rank has no data in that pass.
    """
    choice, size, me = random.Random(seed), hvd.size(), hvd.rank()
    networks = [
        [torch.nn.Parameter(torch.zeros(3, device=device)) for _ in range(WEIGHTS)]
        for _ in range(choice.choice([1, 2]))
    ]
    op = choice.choice([hvd.Average, hvd.Sum])
    passes = choice.choice([1, 1, 2])
    set_to_none = choice.choice([True, False])
    optimizers = [
        hvd.DistributedOptimizer(SGD(network, lr=1.0), op=op, backward_passes_per_step=passes)
        for network in networks
    ]
    expected = [torch.zeros(WEIGHTS) for _ in networks]
    used = [[True, True, False, False] for _ in networks]
    for step in range(STEPS + QUIET_STEPS):
        is_quiet = step >= STEPS
        changes = choice.random() < 0.03
        if changes:  # other weights are used, by all ranks
            used = [[True, *(choice.random() < 0.6 for _ in each[1:])] for each in used]
        now = step % len(networks)
        if not is_quiet and choice.random() < 0.02:  # another network than in the cycle
            now = choice.randrange(len(networks))
        # In the pass of a change it could leave a rank the gradients of the passes before.
        lacks = not (is_quiet or changes) and choice.random() < 0.06
        optimizers[now].zero_grad(set_to_none=set_to_none)
        for _ in range(passes):
            loss = []
            for rank in range(size):
                has_data = is_quiet or passes > 1 or choice.random() > 0.02
                for index in range(WEIGHTS):
                    number = choice.randrange(1, 9)
                    is_used = used[now][index] and not (lacks and choice.random() < 0.3)
                    if not has_data or not is_used:
                        continue
                    expected[now][index] -= number / (size if op == hvd.Average else 1)
                    if rank == me:
                        loss.append((networks[now][index] * number).sum())
            if loss:
                sum(loss).backward()
        optimizers[now].step()
    for network, numbers in zip(networks, expected, strict=True):
        found = torch.stack([weight[0].detach().cpu() for weight in network])
        torch.testing.assert_close(found, numbers, msg=lambda text: f"program {seed}: {text}")


def run_random_programs(first: int, count: int, device: str) -> int:
    """Return the number of planned passes."""
    with planned_passes() as numbers:
        for seed in range(first, first + count):
            run_random_program(seed, device)
    return len(numbers)


@pytest.mark.parametrize(("size", "first"), [(2, 0), (3, 1000)])
def test_every_gradient_counts(size, first, full):
    count = ALL_PROGRAMS if full else PROGRAMS
    planned = run_ahead_on_double(
        functools.partial(run_random_programs, first, count),
        size,
        deadline_s=pool.DEADLINE_S + A_PROGRAM_S * count,
    )
    assert planned[0] > 20
    assert len(set(planned)) == 1, "ranks agree on which passes are planned"
