"""Gradients that are added to averaged ones: the averaged part is carried, and not sent again."""

from __future__ import annotations

import pytest
import torch
from carried_programs import DIRECT, add_exactly, train_at_random
from pool import run
from torch import nn
from torch.optim import SGD
from worlds import on_both_transports

import torch_ring as hvd

both_ops = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])


@both_ops
@on_both_transports
@pytest.mark.parametrize("how", ["", "in the program's memory", "complex"])
def test_the_sum_of_passes_is_the_sum_of_their_averages(transport, op, how):
    run(add_exactly, 3, args=(op, "cpu", how), transport=transport, env=DIRECT)


def train_programs(seeds: range, op: hvd.ReduceOp) -> None:
    for seed in seeds:
        train_at_random(seed, op, "cpu")


@both_ops
@on_both_transports
@pytest.mark.parametrize("size", [2, 3])
def test_random_programs(transport, op, size):
    run(train_programs, size, args=(range(12), op), transport=transport, env=DIRECT)


def fail_in_the_midst(op: hvd.ReduceOp, number: int) -> None:
    """A hook fails on all ranks after its parameter's gradient was added to an averaged one."""
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(SGD(parameters, lr=0.0), op=op)
    total = sum(1 + rank for rank in range(hvd.size())) / (1 if op == hvd.Sum else hvd.size())
    reached: list[int] = []
    fails = False

    def hook(index: int) -> None:
        reached.append(index)
        if fails and len(reached) == number:
            raise ArithmeticError

    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: hook(index))

    def backward() -> None:
        reached.clear()
        (sum(p.sum() for p in parameters) * (1 + hvd.rank())).backward()

    backward()
    fails = True
    with pytest.raises(ArithmeticError):
        backward()
    assert len(reached) == number
    added = [float(index in reached) for index in range(3)]
    for parameter, passes in zip(parameters, added, strict=True):
        assert parameter.grad.tolist() == [total + passes * (1 + hvd.rank())] * 3
    fails = False
    backward()
    for parameter, passes in zip(parameters, added, strict=True):
        assert parameter.grad.tolist() == [(2 + passes) * total] * 3
    optimizer.step()


@both_ops
@on_both_transports
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_pass_that_fails_in_the_midst(transport, op, number):
    run(fail_in_the_midst, 2, args=(op, number), transport=transport)


def keep_on_some(keeping: list[int]) -> float:
    """A rank that adds nothing has an averaged gradient, or has dropped it."""
    a, b = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(SGD([a, b], lr=0.0))
    (a + b).backward()
    if hvd.rank() not in keeping:
        a.grad = None
    (b if hvd.rank() == 1 else a * 2 + b).backward()
    optimizer.step()
    return a.grad.item()


@on_both_transports
@pytest.mark.parametrize(
    ("keeping", "gradient"),
    [([0, 1, 2], 1 + 4 / 3), ([1], 4 / 3), ([0, 2], 2 / 3 + 4 / 3), ([0, 1], 2 / 3 + 4 / 3)],
)
def test_a_rank_that_adds_nothing(transport, keeping, gradient):
    found = run(keep_on_some, 3, args=(keeping,), transport=transport)
    assert found == pytest.approx([gradient] * 3)
