# SPDX-License-Identifier: Apache-2.0
"""Random programs with several optimizers of the same parameters, against one process."""

from __future__ import annotations

import contextlib
import math
import random
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

import torch_ring as hvd


def train_at_random(seed: int, op: hvd.ReduceOp, device: str, **options: Any) -> None:
    """Optimizers of the same parameters come, go, step and zero in any order; against one process.

    A gradient has an averaged part, the same on all ranks, and a part of each rank's own.
    """
    choice, size = random.Random(seed), hvd.size()
    parameters = [
        nn.Parameter(torch.zeros(1, dtype=torch.float64, device=device)) for _ in range(4)
    ]
    weights, averaged = [0.0] * 4, [0.0] * 4
    own = [[0.0] * 4 for _ in range(size)]

    def wrap(members: list[int]) -> tuple[list[int], SGD]:
        chosen = [parameters[i] for i in members]
        return members, hvd.DistributedOptimizer(SGD(chosen, lr=0.25), op=op, **options)

    def reduce(members: list[int]) -> None:
        for i in members:
            total = sum(mine[i] for mine in own)
            averaged[i] += total if op == hvd.Sum else total / size
            for mine in own:
                mine[i] = 0.0

    by_hand: set[int] = set()  # gradients that the program has set
    optimizers = [wrap([0, 1, 2, 3])]
    done = []
    for _ in range(40):
        what = choice.choice(
            ["pass"] * 4 + ["step"] * 3 + ["zero"] * 2 + ["alone", "wrap", "drop", "hand"]
        )
        done.append(what)
        members, optimizer = choice.choice(optimizers)
        if what in ("pass", "alone"):
            used, losses = set(), []
            chosen = choice.sample(range(4), choice.randint(1, 4))
            for rank in range(size):
                if what == "pass":  # without no_sync() ranks may have different gradients
                    chosen = choice.sample(range(4), choice.randint(1, 4))
                for i in chosen:
                    used.add(i)
                    factor = choice.randint(1, 5)
                    own[rank][i] += factor
                    losses += [parameters[i] * factor] if rank == hvd.rank() else []
            with contextlib.ExitStack() as stack:
                for _, each in optimizers if what == "alone" else ():
                    stack.enter_context(each.no_sync())
                sum(losses).sum().backward()
            if what == "pass":  # takes along what was accumulated before, but not what was set
                by_hand -= used
                reduce([i for i in range(4) if i not in by_hand])
        elif what == "step":
            optimizer.step()
            reduce(members)
            by_hand -= set(members)
            for i in members:
                weights[i] -= 0.25 * averaged[i]
        elif what in ("zero", "hand"):
            optimizer.zero_grad(set_to_none=choice.random() < 0.5)
            by_hand -= set(members)
            for i in members:
                averaged[i] = 0.0
                for mine in own:
                    mine[i] = 0.0
            if what == "hand":
                i = choice.choice(members)
                parameters[i].grad = torch.full_like(parameters[i], 1.0 + hvd.rank())
                by_hand.add(i)
                for rank, mine in enumerate(own):
                    mine[i] = 1.0 + rank
        elif what == "wrap" and len(optimizers) < 4:
            optimizers.append(wrap(choice.sample(range(4), choice.randint(1, 4))))
        elif what == "drop" and len(optimizers) > 1:
            optimizers.pop(choice.randrange(1, len(optimizers)))
            del optimizer
        for i, parameter in enumerate(parameters):
            message = f"program {seed}, parameter {i}, after {done}"
            assert math.isclose(parameter.item(), weights[i], abs_tol=1e-9), message
            is_averaged = i not in by_hand and (what == "pass" or (what == "step" and i in members))
            if is_averaged and parameter.grad is not None:
                assert math.isclose(parameter.grad.item(), averaged[i], abs_tol=1e-9), message


def train_programs_at_random(
    seeds: range, op: hvd.ReduceOp, device: str = "cpu", **options: Any
) -> None:
    """Run the programs of some seeds.

    Args:
        seeds: of the programs.
        op: of the optimizers.
        device: of the parameters.
        options: others of DistributedOptimizer.
    """
    for seed in seeds:
        train_at_random(seed, op, device, **options)
